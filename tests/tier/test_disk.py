"""DiskTier: it writes what the pool still holds, and loads in order until it is stopped or cannot go on."""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Generator
from pathlib import Path

import numpy as np
import pytest

from pagoda.core.kv import FilledBlock, Load
from pagoda.tier import DiskTier, Records

HASHES = [bytes([number]) * 32 for number in range(6)]


@pytest.fixture
def memory() -> list[np.ndarray]:
    """Two planes of 8 blocks."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (8, size), np.uint8) for size in (100, 40)]


@pytest.fixture
def tier(tmp_path: Path, memory: list[np.ndarray]) -> Generator[DiskTier]:
    opened = DiskTier(Records(tmp_path, "root", 1 << 20))
    opened.attach(memory)
    yield opened
    opened.close()


def until(is_true: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < end_s
        time.sleep(0.005)


def filled(*blocks: int) -> list[FilledBlock]:
    return [FilledBlock(block, (0, HASHES[block])) for block in blocks]


def test_blocks_are_loaded_as_they_were_stored(tier: DiskTier, memory: list[np.ndarray]) -> None:
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
    assert tier.take_changes() == (HASHES[1:4], [])


def test_what_the_pool_no_longer_holds_is_not_written(tier: DiskTier) -> None:
    asked: list[int] = []

    def holds(one: FilledBlock) -> bool:
        """Block 2 is filled again before it is copied, block 3 while it is."""
        asked.append(one.block)
        return asked.count(one.block) < {1: 3, 2: 1, 3: 2}[one.block]

    tier.store(filled(1, 2, 3), holds)
    until(lambda: len(asked) == 5)
    until(lambda: tier.num_leading(HASHES[1:2]) == 1)
    assert tier.num_leading(HASHES[2:3]) == tier.num_leading(HASHES[3:4]) == 0


def test_a_load_ends_where_something_is_missing(tier: DiskTier) -> None:
    tier.store(filled(1), lambda _: True)
    until(lambda: tier.num_leading(HASHES[1:2]) == 1)
    load = Load(HASHES[1:3], np.array([5, 6], np.int32))
    tier.load(load)
    until(lambda: load.is_done)
    assert (load.num_loaded, load.why) == (1, "a record is gone")


def test_a_load_that_was_stopped_writes_nothing(tier: DiskTier, memory: list[np.ndarray]) -> None:
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
    opened = DiskTier(Records(tmp_path, "root", 1 << 20))
    opened.attach(memory)
    opened.store(filled(1, 2), lambda _: True)
    opened.close()
    assert opened.num_leading(HASHES[1:3]) == 2, "what waited was written"
    known = weakref.ref(opened)
    del opened
    until(lambda: gc.collect() >= 0 and known() is None)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("pagoda-tier")]
