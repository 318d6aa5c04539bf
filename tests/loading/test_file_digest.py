"""The hash of a file: of all its bytes, and computed again once the file has changed."""

import hashlib
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pagoda.loading import file_digest
from pagoda.loading.file_digest import digest_of_file

SIZE, PIECE = 50_000, 4_096


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files are as large ones, and any change is long ago."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, value in {"LEAST_KEPT_BYTES": 1_000, "_PIECE_BYTES": PIECE, "_READ_BYTES": 1_024}.items():
        monkeypatch.setattr(file_digest, name, value)
    monkeypatch.setattr(file_digest, "_SETTLED_NS", -(10**9))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(random.Random(0).randbytes(SIZE))
    return path


@pytest.fixture
def num_computed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    computed: list[Path] = []
    compute = file_digest._compute

    def counting(path: Path, num_bytes: int) -> str:
        computed.append(path)
        return compute(path, num_bytes)

    monkeypatch.setattr(file_digest, "_compute", counting)
    return computed


@pytest.mark.parametrize("size", [0, 1, 999, PIECE, PIECE + 1, SIZE])
def test_it_is_of_all_pieces(tmp_path: Path, size: int) -> None:
    data = random.Random(size).randbytes(size)
    (tmp_path / "weights").write_bytes(data)
    pieces = [hashlib.sha256(data[at : at + PIECE]).digest() for at in range(0, size, PIECE)]
    assert digest_of_file(tmp_path / "weights") == hashlib.sha256(b"".join(pieces)).hexdigest()


def test_a_change_is_noticed_wherever_it_is(file: Path) -> None:
    """Also one that leaves size and time of modification as they were."""
    rng, before, digests = random.Random(1), file.stat(), {digest_of_file(file)}
    for number in range(20):
        with file.open("r+b") as opened:
            opened.seek(rng.randrange(SIZE - 1))
            byte = opened.read(1)[0]
            opened.seek(-1, os.SEEK_CUR)
            opened.write(bytes([byte ^ 1 << rng.randrange(8)]))
        while (
            os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns)) or file.stat().st_ctime_ns == before.st_ctime_ns
        ):
            pass
        before = file.stat()
        digests.add(digest_of_file(file))
        assert len(digests) == number + 2


def test_it_is_computed_once(file: Path, num_computed: list[Path]) -> None:
    first = digest_of_file(file)
    assert digest_of_file(file) == first
    assert len(num_computed) == 1
    copy = file.with_name("copy")
    copy.write_bytes(file.read_bytes())
    assert digest_of_file(copy) == first
    assert len(num_computed) == 2


@pytest.mark.parametrize("ago_s", [0, 60])
def test_that_of_a_file_that_was_just_changed_is_not_kept(
    file: Path, num_computed: list[Path], monkeypatch: pytest.MonkeyPatch, ago_s: int
) -> None:
    changed_ns = file.stat().st_ctime_ns
    monkeypatch.setattr(file_digest, "_SETTLED_NS", 2 * 10**9)
    monkeypatch.setattr(file_digest.time, "time_ns", lambda: changed_ns + ago_s * 10**9)
    digests = {digest_of_file(file) for _ in range(2)}
    assert len(digests) == 1
    assert len(num_computed) == (1 if ago_s else 2)


@pytest.mark.parametrize("text", ["", "x", "1 2 3 4 beef", "\xff" * 100])
def test_what_is_kept_may_be_damaged_or_not_writable(
    file: Path, tmp_path: Path, num_computed: list[Path], text: str
) -> None:
    first = digest_of_file(file)
    (kept,) = (tmp_path / "cache" / "pagoda" / "digests").iterdir()
    kept.write_text(text, "latin-1")
    assert digest_of_file(file) == first
    assert len(num_computed) == 2
    kept.unlink()
    kept.parent.rmdir()
    kept.parent.write_text("no folder")
    assert digest_of_file(file) == first


def test_those_that_ask_together_compute_it_once(file: Path, num_computed: list[Path]) -> None:
    with ThreadPoolExecutor(8) as threads:
        assert len({*threads.map(digest_of_file, [file] * 8)}) == 1
    assert num_computed == [file]
