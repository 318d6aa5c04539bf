"""Records: whatever happens to the files, what is read is what was written, or nothing."""

import errno
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pagoda.base.errors import ConfigError
from pagoda.tier import read_seed
from pagoda.tier import records as module
from pagoda.tier.records import Records

SIZE = 1000
RECORD = 32 + SIZE


def named(number: int) -> bytes:
    return number.to_bytes(32, "big")


def content_of(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, SIZE, np.uint8)


def opened(folder: Path, num_records: int = 100, root: str = "root") -> Records:
    records = Records(folder, root, num_records * RECORD)
    records.scan()
    return records


def read(records: Records, number: int) -> bool:
    """Whether it is read, which is then what was written."""
    content = np.zeros(SIZE, np.uint8)
    if why := records.read(named(number), content):
        assert named(number) not in records, why
        return False
    assert (content == content_of(number)).all()
    return True


def write(records: Records, *numbers: int) -> None:
    for number in numbers:
        records.write(named(number), content_of(number))


def path_of(folder: Path, number: int, root: str = "root") -> Path:
    digits = named(number).hex()
    return folder / root / digits[:2] / digits[2:]


def test_records_outlive_those_who_wrote_them(tmp_path: Path) -> None:
    write(opened(tmp_path), 1, 2)
    again = opened(tmp_path)
    assert again.take_changes() == ([named(1), named(2)], [])
    assert read(again, 1)
    assert read(again, 2)
    assert not read(again, 3)
    assert path_of(tmp_path, 1).stat().st_mode & 0o777 == 0o600
    assert path_of(tmp_path, 1).parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("at", [0, 31, 32, RECORD // 2, RECORD - 1])
def test_a_flipped_bit_is_noticed(tmp_path: Path, at: int) -> None:
    records = opened(tmp_path)
    write(records, 1)
    data = bytearray(path_of(tmp_path, 1).read_bytes())
    data[at] ^= 1 << random.Random(at).randrange(8)
    path_of(tmp_path, 1).write_bytes(data)
    assert not read(records, 1)
    assert not path_of(tmp_path, 1).exists()
    assert records.take_changes() == ([], [])
    write(records, 1)
    assert read(records, 1)


@pytest.mark.parametrize("length", [0, 20, 32, RECORD - 1])
def test_a_torn_record_is_noticed(tmp_path: Path, length: int) -> None:
    write(opened(tmp_path), 1)
    os.truncate(path_of(tmp_path, 1), length)
    assert not read(opened(tmp_path), 1)


def test_a_record_of_another_block_is_noticed(tmp_path: Path) -> None:
    write(opened(tmp_path), 1, 2)
    path_of(tmp_path, 2).replace(path_of(tmp_path, 1))
    assert not read(opened(tmp_path), 1)


def test_other_roots_have_records_of_their_own(tmp_path: Path) -> None:
    write(opened(tmp_path), 1)
    other = opened(tmp_path, root="other")
    assert named(1) not in other
    other_folder = path_of(tmp_path, 1, "other").parent
    other_folder.mkdir(parents=True, exist_ok=True)
    path_of(tmp_path, 1).rename(path_of(tmp_path, 1, "other"))
    assert not read(opened(tmp_path, root="other"), 1), "the checksum names the root"


def test_a_record_that_is_gone_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    records = opened(tmp_path)
    write(records, 1, 2)
    path_of(tmp_path, 1).unlink()
    path_of(tmp_path, 2).unlink()
    with caplog.at_level(logging.WARNING):
        assert not read(records, 1)
        assert not read(records, 2)
    assert len(caplog.messages) == 1
    assert "kv_tier: a record is gone" in caplog.messages[0]
    assert "its tokens are computed again" in caplog.messages[0]


def test_a_full_disk_is_left_alone_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    records = opened(tmp_path)
    write(records, 1)
    calls: list[int] = []

    def full(source: object, target: object) -> None:
        calls.append(1)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(module.os, "replace", full)
        write(records, 2, 3)
    assert len(calls) == len(caplog.messages) == 1
    assert "No space left on device" in caplog.messages[0]
    assert not list((tmp_path / "root").glob("writing-*"))
    assert read(records, 1)
    records._paused_until_s = 0.0
    write(records, 2)
    assert read(records, 2)


def test_a_folder_that_is_gone_is_made_again(tmp_path: Path) -> None:
    records = opened(tmp_path)
    write(records, 1)
    for path in sorted((tmp_path / "root").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (tmp_path / "root").rmdir()
    assert not read(records, 1)
    write(records, 1)
    assert read(records, 1)


def test_those_used_least_recently_make_room(tmp_path: Path) -> None:
    records = opened(tmp_path, 3)
    write(records, 1, 2, 3)
    assert read(records, 1)
    write(records, 4)
    assert [number for number in range(1, 5) if named(number) in records] == [1, 3, 4]
    assert records.num_bytes == 3 * RECORD == sum(one.stat().st_size for one in tmp_path.rglob("*") if one.is_file())
    stored, lost = records.take_changes()
    assert stored == [*map(named, (1, 3, 4))]
    assert not lost
    smaller = opened(tmp_path, 2)
    write(smaller, 5)
    assert [number for number in range(1, 6) if named(number) in smaller] == [1, 5] or named(4) in smaller
    assert smaller.num_bytes <= 2 * RECORD


def test_changes_are_what_is_different_since_the_last_call(tmp_path: Path) -> None:
    """Not how often: an idle engine asks for none for hours, while others write."""
    records = opened(tmp_path, 3)
    write(records, 1, 2, 3)
    assert records.take_changes() == ([*map(named, (1, 2, 3))], [])
    write(records, 4, 5, 1)
    assert records.take_changes() == ([named(4), named(5)], [named(2), named(3)])
    for _ in range(3):
        write(records, 1, 2, 3, 4, 5, 6)
    assert records.take_changes() == ([named(6)], [named(1)])


def test_the_order_of_use_outlives_the_engine(tmp_path: Path) -> None:
    records = opened(tmp_path, 3)
    write(records, 1, 2, 3)
    for number, at_s in ((1, 300), (2, 100), (3, 200)):
        os.utime(path_of(tmp_path, number), (at_s, at_s))
    again = opened(tmp_path, 3)
    write(again, 4)
    assert named(2) not in again
    write(again, 5)
    assert named(3) not in again
    assert named(1) in again


def test_records_of_other_roots_make_room_too(tmp_path: Path) -> None:
    write(opened(tmp_path, 3, "old"), 1, 2)
    os.utime(path_of(tmp_path, 1, "old"), (1, 1))
    records = opened(tmp_path, 3)
    write(records, 1, 2)
    assert not path_of(tmp_path, 1, "old").exists()
    assert path_of(tmp_path, 2, "old").exists()
    assert records.take_changes() == ([named(1), named(2)], [])


def test_records_that_others_write_under_other_roots_count_too(tmp_path: Path) -> None:
    """Servers of two models share a folder, and its size."""
    mine, theirs = opened(tmp_path, 4), opened(tmp_path, 4, "other")
    for numbers in ((1,), (2, 3)):
        for records in (mine, theirs):
            write(records, *numbers)
        for records in (mine, theirs):
            records.scan()
    assert mine.num_bytes <= 4 * RECORD
    assert len([*tmp_path.glob("*/??/*")]) <= 4


def test_owners_without_records_are_forgotten(tmp_path: Path) -> None:
    records = opened(tmp_path, 2)
    for number in range(9):
        records.write(named(number), content_of(number), f"{number:08}")
    assert len(records._bytes_of) == 2


def test_kept_records_go_last(tmp_path: Path) -> None:
    records = opened(tmp_path, 3)
    write(records, 1, 2, 3)
    records.keep([named(1), named(9)], int(time.time()) + 100)
    assert read(records, 1)
    records.keep([named(3)], int(time.time()) - 1)
    for again in (records, opened(tmp_path, 3)):
        write(again, 4, 5, 6)
        assert named(1) in again
        assert read(again, 1)
    records.keep([*map(named, (4, 5, 6))], int(time.time()) + 100)
    write(records, 7)
    assert len(records) == 3, "if all are kept, the oldest goes"
    assert named(7) in records


@pytest.mark.parametrize("is_again", [False, True])
def test_an_owner_with_more_than_its_share_makes_room(tmp_path: Path, is_again: bool) -> None:
    records = opened(tmp_path, 8)
    for owner, numbers in (("0" * 8, (1, 2)), ("", range(3, 9))):
        for number in numbers:
            records.write(named(number), content_of(number), owner)
    records.keep([named(8)], int(time.time()) + 100)
    if is_again:
        records = opened(tmp_path, 8)
    for number in range(10, 14):
        records.write(named(number), content_of(number), "1" * 8)
    there = [number for number in range(1, 14) if named(number) in records]
    assert there == [1, 2, 7, 8, 10, 11, 12, 13], "the two oldest, of one who has no more than a fourth, stay"
    for number in range(14, 18):
        records.write(named(number), content_of(number), "1" * 8)
    there = [number for number in range(1, 18) if named(number) in records]
    assert there == [1, 2, 7, 8, 14, 15, 16, 17], "now it is its own"
    assert all(read(records, number) for number in there)
    records.keep(list(map(named, range(14, 18))), int(time.time()) + 100)
    write(records, 18)
    assert named(14) not in records, "pins hold for what is within the share"


def test_one_that_is_too_large_is_not_written(tmp_path: Path) -> None:
    records = Records(tmp_path, "root", SIZE)
    write(records, 1)
    assert named(1) not in records


def test_engines_find_what_others_have_written(tmp_path: Path) -> None:
    mine, theirs = opened(tmp_path, 2), opened(tmp_path, 2)
    write(theirs, 1, 2)
    assert named(1) not in mine
    mine.scan()
    assert read(mine, 1)
    write(theirs, 3)  # they removed the first: they do not know that it was read
    assert not read(mine, 1)
    write(mine, 4)
    assert mine.num_bytes <= 2 * RECORD
    theirs.scan()
    assert [number for number in range(1, 5) if read(theirs, number)] == [3, 4]


def test_what_a_dead_process_was_writing_is_removed(tmp_path: Path) -> None:
    roots = "root", "0123" * 8
    for root in roots:
        write(opened(tmp_path, root=root), 1)
        (tmp_path / root / f"writing-{os.getpid()}-00000000").write_bytes(b"half")
    assert read(opened(tmp_path), 1)
    assert not list(tmp_path.glob("*/writing-*"))


def test_what_a_process_of_another_container_is_writing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number may be unknown here, or another process's."""
    monkeypatch.setattr(module.os, "getpid", lambda: 999999999)
    mine, replace = opened(tmp_path), os.replace

    def open_another_first(source: Path, target: Path) -> None:
        opened(tmp_path)
        replace(source, target)

    monkeypatch.setattr(module.os, "replace", open_another_first)
    write(mine, 1)
    monkeypatch.undo()
    assert read(opened(tmp_path), 1)


def test_a_file_system_without_locks_keeps_records_and_leftovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(module.fcntl, "flock", refuse)
    records, unfinished = opened(tmp_path), tmp_path / "root" / "writing-0123456789abcdef"
    unfinished.write_bytes(b"half")
    write(records, 1)
    assert read(opened(tmp_path), 1)
    assert unfinished.exists()


def test_folders_of_other_roots_without_records_are_removed(tmp_path: Path) -> None:
    """But none that may be anything else, such as lost+found."""
    old, other = "0123" * 8, "4567" * 8
    write(opened(tmp_path, root=old), 1)
    write(opened(tmp_path, root=other), 2)
    path_of(tmp_path, 1, old).unlink()
    (tmp_path / "lost+found").mkdir()
    opened(tmp_path)
    assert {one.name for one in tmp_path.iterdir()} == {other, "root", "lost+found"}


def test_writers_with_the_same_number_do_not_write_to_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In two containers, or of two engines of one process."""
    mine, theirs, replace = opened(tmp_path), opened(tmp_path), os.replace

    def write_theirs_first(source: Path, target: Path) -> None:
        monkeypatch.setattr(module.os, "replace", replace)
        write(theirs, 2)
        replace(source, target)

    monkeypatch.setattr(module.os, "replace", write_theirs_first)
    write(mine, 1)
    again = opened(tmp_path)
    assert read(again, 1)
    assert read(again, 2)


def test_a_folder_that_the_last_engine_has_removed_is_not_made_again(tmp_path: Path) -> None:
    """By a writer that comes late, with a mode with which the next engine would refuse it."""
    records = opened(tmp_path / "host")
    shutil.rmtree(tmp_path / "host")
    write(records, 1)
    assert not (tmp_path / "host").exists()


WRITER = """
import sys
from pathlib import Path
from tests.tier.test_records import opened, write
records = opened(Path(sys.argv[1]), 20)
for number in range(10**6):
    write(records, number % 50)
    if number == 30:
        print(flush=True)
"""


def test_a_kill_loses_at_most_what_was_being_written(tmp_path: Path) -> None:
    rng, num_read = random.Random(0), 0
    for _ in range(3):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(rng.random() / 10)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        records = opened(tmp_path, 20)
        there = [number for number in range(50) if named(number) in records]
        assert all(read(records, number) for number in there), "all that is found is whole"
        num_read += len(there)
    assert num_read


def test_the_seed_is_drawn_once_and_is_secret(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "tier"
    with caplog.at_level(logging.DEBUG):
        seed = read_seed(folder)
    assert seed == read_seed(folder)
    assert seed != read_seed(tmp_path / "other")
    assert not caplog.messages
    assert [one.name for one in folder.iterdir()] == ["seed"]
    assert (folder / "seed").stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700


def break_mode(folder: Path) -> None:
    (folder / "seed").chmod(0o644)


def break_text(folder: Path) -> None:
    (folder / "seed").write_text("no number")


def break_folder(folder: Path) -> None:
    (folder / "seed").unlink()
    folder.rmdir()
    folder.write_text("a file")


def break_link(folder: Path) -> None:
    (folder / "seed").unlink()
    (folder / "seed").symlink_to(folder / "nothing")


def test_a_folder_that_cannot_be_made_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        read_seed(Path("/proc/tier"))


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (break_mode, "chmod 600"),
        (break_text, "is not a seed"),
        (break_folder, "cannot be used"),
        (break_link, "cannot be used"),
    ],
)
def test_a_seed_that_cannot_be_used_is_refused(tmp_path: Path, break_it: Callable[[Path], None], message: str) -> None:
    folder = tmp_path / "tier"
    read_seed(folder)
    break_it(folder)
    with pytest.raises(ConfigError, match=message):
        read_seed(folder)
