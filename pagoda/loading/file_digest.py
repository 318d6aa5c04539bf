"""The hash of a file's whole content, which for a large one is computed once for as long as the file stays as it is."""

import contextlib
import fcntl
import hashlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from pagoda.base.cache_home import cache_home

LEAST_KEPT_BYTES = 16 << 20
"""Bytes of a file from which on its hash is kept; a smaller one takes a hundredth of a second."""
_PIECE_BYTES, _READ_BYTES = 64 << 20, 1 << 20
_SETTLED_NS = 2_000_000_000
"""A file that was changed more recently may change again without a new time: clocks of file systems are coarse."""


def digest_of_file(path: Path) -> str:
    """Return a hash of all bytes of a file, as 64 digits: the same for a copy, wherever that is.

    That of a large file is kept in the user's cache, with what changes when the file does: its number, size and times.
    Raises OSError if it cannot be read.
    """
    before = path.stat()
    if before.st_size < LEAST_KEPT_BYTES:
        return _compute(path, before.st_size)
    facts = _facts(before)
    kept = cache_home() / "digests" / hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]
    if (digest := _read(kept, facts)) is not None:
        return digest
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):  # ranks that start together wait for one of them
            kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fcntl.flock(held.enter_context(kept.open("a")), fcntl.LOCK_EX)
        if (digest := _read(kept, facts)) is None:
            digest = _compute(path, before.st_size)
            is_settled = 0 < before.st_ctime_ns < time.time_ns() - _SETTLED_NS  # 0: a file system without times
            if is_settled and _facts(path.stat()) == facts:
                with contextlib.suppress(OSError):  # it is computed again
                    kept.write_text(f"{facts} {digest}")
    return digest


def _read(kept: Path, facts: str) -> str | None:
    """Return the hash that was kept of a file with these facts."""
    with contextlib.suppress(OSError, ValueError):
        known, digest = kept.read_text().rsplit(" ", 1)
        if known == facts and len(digest) == 64:
            return digest
    return None


def _facts(state: os.stat_result) -> str:
    return f"{state.st_ino} {state.st_size} {state.st_mtime_ns} {state.st_ctime_ns}"


def _compute(path: Path, num_bytes: int) -> str:
    """Return a hash of the hashes of the pieces, each of which a thread computes."""
    with path.open("rb", buffering=0) as file:
        piece_of = partial(_digest_of_piece, file.fileno())
        begins = range(0, num_bytes, _PIECE_BYTES)
        if len(begins) <= 1:
            digests = [piece_of(begin) for begin in begins]
        else:
            with ThreadPoolExecutor(min(len(begins), len(os.sched_getaffinity(0)))) as threads:
                digests = list(threads.map(piece_of, begins))
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _digest_of_piece(file: int, begin: int) -> bytes:
    digest = hashlib.sha256()
    for at in range(begin, begin + _PIECE_BYTES, _READ_BYTES):
        digest.update(os.pread(file, _READ_BYTES, at))
    return digest.digest()
