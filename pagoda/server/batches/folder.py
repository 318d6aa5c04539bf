"""TemporaryFolder: a folder of one process, which the next one removes if it was killed."""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "pagoda-files-"
_LOCK = "lock"  # a file in the folder, locked as long as the process lives


class TemporaryFolder:
    """A new folder, which only this user can read, until it is closed."""

    def __init__(self) -> None:
        """Raises OSError if there can be none."""
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
            lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if _is_taken(lock) and self.path.exists():
                self._lock = lock
                return
            os.close(lock)  # another process has taken it for one that was left behind

    def close(self) -> None:
        """Remove the folder. Idempotent."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def remove_left_behind() -> None:
    """Remove the folders of processes that have ended without doing so. Those of other users stay."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            if os.fstat(lock).st_uid == os.geteuid() and _is_taken(lock):
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)


def _is_taken(lock: int) -> bool:
    """Return whether this process has the lock now; not if another has it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
