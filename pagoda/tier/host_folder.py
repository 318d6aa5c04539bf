"""A folder of files in memory: of one user, and removed by the last engine that uses it."""

import contextlib
import fcntl
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

from pagoda.base.abbreviate import human_bytes
from pagoda.base.errors import ConfigError


def hold(folder: Path, max_bytes: int) -> Callable[[], None]:
    """Use a folder, which is made if necessary. Return what ends that; the last to end it removes the folder.

    What an engine that was killed leaves is found by the next one.
    Raises ConfigError if it cannot be used, others have access to it, or its file system is smaller than `max_bytes`.
    """
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        facts, space = folder.lstat(), os.statvfs(folder)
        if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o077:
            raise ConfigError(f"kv_tier: others have access to {folder}: remove it, or have its owner do so")
        lock = os.open(folder / "in-use", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and folder.parent.is_dir():  # the last one removed it just now
            return hold(folder, max_bytes)
        raise ConfigError(f"kv_tier: {folder} cannot be used for host=SIZE ({error}): take disk=FOLDER:SIZE") from error
    if (size := space.f_blocks * space.f_frsize) < max_bytes:
        raise ConfigError(
            f"kv_tier: {folder.parent} has room for {human_bytes(size)}, and host=SIZE asks for "
            f"{human_bytes(max_bytes)}: mount it larger (docker run --shm-size), or ask for less"
        )
    fcntl.flock(lock, fcntl.LOCK_SH)
    if not os.fstat(lock).st_nlink:  # the last one removed it meanwhile
        os.close(lock)
        return hold(folder, max_bytes)

    def end() -> None:
        with contextlib.suppress(BlockingIOError):  # another engine uses it
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)

    return end


def bytes_in(folder: Path) -> int:
    """Return the bytes of the files in a folder; 0 if there is none."""
    num_bytes = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # one that is gone meanwhile
            num_bytes += path.stat().st_blocks * 512
    return num_bytes
