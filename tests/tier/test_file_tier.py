"""FileTier: it writes what the pool still holds, and loads in order until it is stopped or cannot go on."""

import errno
import gc
import hashlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagoda.core.kv import FilledBlock, Load, TierChange
from pagoda.tier import FileTier, Records

HASHES = [bytes([number]) * 32 for number in range(6)]


@pytest.fixture
def memory() -> list[np.ndarray]:
    """Two planes of 8 blocks."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (8, size), np.uint8) for size in (100, 40)]


@pytest.fixture
def tier(tmp_path: Path, memory: list[np.ndarray]) -> Generator[FileTier]:
    opened = FileTier([Records(tmp_path, "root", 1 << 20)])
    opened.attach(memory)
    yield opened
    opened.close()


def until(is_true: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < end_s
        time.sleep(0.005)


def is_idle(tier: FileTier) -> bool:
    return all(writer.is_idle for writer in tier._writers)


def filled(*blocks: int) -> list[FilledBlock]:
    return [FilledBlock(block, (0, HASHES[block])) for block in blocks]


def test_blocks_are_loaded_as_they_were_stored(tier: FileTier, memory: list[np.ndarray]) -> None:
    tier.store(filled(1, 2, 3), lambda _: True)
    until(lambda: tier.num_leading(HASHES[1:4]) == 3)
    assert tier.num_leading(HASHES) == 0
    before = [plane.copy() for plane in memory]
    load = Load(HASHES[1:4], np.array([5, 6, 7], np.int32))
    tier.load(load)
    while not load.is_done:
        tier.wait(1)
    assert (load.num_loaded, load.why) == (3, "")
    for plane, old in zip(memory, before, strict=True):
        assert (plane[5:8] == old[1:4]).all()
        assert (plane[:5] == old[:5]).all()
    assert tier.take_changes() == [TierChange("disk", HASHES[1:4], [])]


def test_what_the_pool_no_longer_holds_is_not_written(tier: FileTier) -> None:
    asked: list[int] = []

    def holds(one: FilledBlock) -> bool:
        """Block 2 is filled again before it is copied, block 3 while it is."""
        asked.append(one.block)
        return asked.count(one.block) < {1: 3, 2: 1, 3: 2}[one.block]

    tier.store(filled(1, 2, 3), holds)
    until(lambda: len(asked) == 5)
    until(lambda: tier.num_leading(HASHES[1:2]) == 1)
    assert tier.num_leading(HASHES[2:3]) == tier.num_leading(HASHES[3:4]) == 0


def test_a_load_ends_where_something_is_missing(tier: FileTier) -> None:
    tier.store(filled(1), lambda _: True)
    until(lambda: tier.num_leading(HASHES[1:2]) == 1)
    load = Load(HASHES[1:3], np.array([5, 6], np.int32))
    tier.load(load)
    until(lambda: load.is_done)
    assert (load.num_loaded, load.why) == (1, "a record is gone")


def test_a_load_that_was_stopped_writes_nothing(tier: FileTier, memory: list[np.ndarray]) -> None:
    tier.store(filled(1), lambda _: True)
    until(lambda: tier.num_leading(HASHES[1:2]) == 1)
    before = [plane.copy() for plane in memory]
    load = Load(HASHES[1:2], np.array([5], np.int32))
    load.stop()
    tier.load(load)
    until(lambda: load.is_done)
    assert load.num_loaded == 0
    assert all((plane == old).all() for plane, old in zip(memory, before, strict=True))


def test_a_closed_tier_lets_go_of_the_pool(tmp_path: Path, memory: list[np.ndarray]) -> None:
    opened = FileTier([Records(tmp_path, "root", 1 << 20)])
    opened.attach(memory)
    opened.store(filled(1, 2), lambda _: True)
    opened.close()
    assert opened.num_leading(HASHES[1:3]) == 2, "what waited was written"
    known = weakref.ref(opened)
    del opened
    until(lambda: gc.collect() >= 0 and known() is None)
    until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("pagoda-tier")])


@pytest.fixture
def levels(tmp_path: Path) -> list[Records]:
    """The first has room for two blocks."""
    sizes = {"host": 2 * (140 + 32), "disk": 1 << 20}
    return [Records(tmp_path / tier, "root", size, tier) for tier, size in sizes.items()]


@pytest.fixture
def two(levels: list[Records], memory: list[np.ndarray]) -> Generator[FileTier]:
    opened = FileTier(levels)
    opened.attach(memory)
    yield opened
    opened.close()


def loaded(tier: FileTier, memory: list[np.ndarray], block: int) -> bool:
    """Whether a block is loaded, which is then what it was."""
    load = Load(HASHES[block : block + 1], np.array([7], np.int32))
    tier.load(load)
    until(lambda: load.is_done)
    assert not load.num_loaded or all((plane[7] == plane[block]).all() for plane in memory)
    return bool(load.num_loaded)


def test_a_block_goes_to_both_folders_and_comes_from_either(
    two: FileTier, levels: list[Records], memory: list[np.ndarray], tmp_path: Path
) -> None:
    host, disk = levels
    two.store(filled(1, 2, 3), lambda _: True)
    until(lambda: len(disk) == 3 and is_idle(two))
    assert [one in host for one in HASHES[1:4]] == [False, True, True]
    assert two.num_leading(HASHES[1:5]) == 3
    host_change, disk_change = two.take_changes()
    assert host_change == TierChange("host", HASHES[2:4], [])
    assert disk_change == TierChange("disk", HASHES[1:4], [])
    assert loaded(two, memory, 1)
    two.store([FilledBlock(7, (0, HASHES[1]))], lambda _: True)  # as the scheduler does with what was loaded
    until(lambda: HASHES[1] in host)
    for path in (tmp_path / "host").glob("*/??/*"):
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert all(loaded(two, memory, block) for block in (1, 2, 3)), "what is damaged in memory is read from the disk"
    for path in (tmp_path / "disk").glob("*/??/*"):
        path.unlink()
    until(lambda: is_idle(two))
    assert [loaded(two, memory, block) for block in (1, 2, 3)] == [one in host for one in HASHES[1:4]]


def test_owners_of_blocks_are_written_with_them(two: FileTier, levels: list[Records], tmp_path: Path) -> None:
    two.store([FilledBlock(1, (0, HASHES[1]), "me"), FilledBlock(2, (0, HASHES[2]))], lambda _: True)
    until(lambda: HASHES[2] in levels[1])
    until(lambda: is_idle(two))
    for tier in ("host", "disk"):
        names = sorted(path.name for path in (tmp_path / tier).glob("*/??/*"))
        assert [name.partition("-")[2] for name in names] == [hashlib.sha256(b"me").hexdigest()[:8], ""]


@pytest.mark.parametrize("full", ["host", "disk"])
def test_a_folder_that_is_full_keeps_nothing_from_the_other(
    two: FileTier, memory: list[np.ndarray], monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    replace = os.replace

    def fail(source: Path, target: Path) -> None:
        if full in target.parts:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail)
    two.store(filled(1, 2), lambda _: True)
    until(lambda: two.num_leading(HASHES[1:3]) == 2)
    assert loaded(two, memory, 2)
    until(lambda: is_idle(two))
    assert {change.tier for change in two.take_changes() if change.stored} == {"host", "disk"} - {full}


def test_what_is_in_memory_does_not_wait_for_the_disk(
    two: FileTier, levels: list[Records], memory: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    two.store(filled(1), lambda _: True)
    until(lambda: HASHES[1] in levels[1])
    monkeypatch.setattr(levels[1], "read", lambda *_: time.sleep(600))
    assert loaded(two, memory, 1)


def test_memory_gets_its_blocks_while_the_disk_hangs(
    two: FileTier, levels: list[Records], memory: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over = threading.Event()
    monkeypatch.setattr(levels[1], "write", lambda *_: is_over.wait(600))
    two.store(filled(1, 2), lambda _: True)
    until(lambda: HASHES[2] in levels[0])
    assert loaded(two, memory, 2)
    is_over.set()


def test_what_is_in_memory_is_loaded_while_the_disk_hangs(
    two: FileTier, levels: list[Records], memory: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over, read = threading.Event(), levels[1].read
    two.store(filled(1, 2, 3), lambda _: True)
    until(lambda: HASHES[3] in levels[1] and is_idle(two))
    assert HASHES[1] not in levels[0]
    monkeypatch.setattr(levels[1], "read", lambda *args: is_over.wait(600) and read(*args))
    slow = Load(HASHES[1:3], np.array([5, 6], np.int32))
    two.load(slow)
    assert loaded(two, memory, 2)
    assert not slow.is_done
    is_over.set()
    until(lambda: slow.is_done)
    assert slow.num_loaded == 2


def test_memory_gets_its_blocks_while_the_disk_hangs_that_had_one_of_them(
    two: FileTier, levels: list[Records], memory: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read from the disk once is not read again to be written to memory."""
    is_over, read, reads = threading.Event(), levels[1].read, list[int]()
    two.store(filled(1, 2, 3), lambda _: True)
    until(lambda: HASHES[3] in levels[1] and is_idle(two))
    assert HASHES[1] not in levels[0]

    def read_once(*args: Any) -> str:
        reads.append(1)
        return read(*args) if len(reads) == 1 or is_over.wait(600) else ""

    monkeypatch.setattr(levels[1], "read", read_once)
    assert loaded(two, memory, 1)
    two.store([FilledBlock(7, (0, HASHES[1])), *filled(4)], lambda _: True)
    until(lambda: HASHES[1] in levels[0] and HASHES[4] in levels[0])
    is_over.set()
