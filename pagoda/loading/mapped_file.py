"""Files in their own pages: nothing is read before it is needed, and all who map a file share its memory."""

import mmap
from pathlib import Path

import numpy as np


class _Shown:
    """A mapping as numpy and torch take it without a warning: they cannot tell that it must not be written to."""

    def __init__(self, data: mmap.mmap) -> None:
        self._bytes = np.frombuffer(data, np.uint8)
        self.__array_interface__ = {**self._bytes.__array_interface__, "data": (self._bytes.ctypes.data, False)}


def map_file(path: Path) -> mmap.mmap:
    """Map a file, not to be written to. Raises OSError, and ValueError if it is empty."""
    with path.open("rb") as file:
        # Not a private copy: under strict overcommit, that would count as memory.
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def bytes_of(data: mmap.mmap) -> np.ndarray:
    """Return the bytes of a mapping, uint8, as torch takes them. To write to them is a crash."""
    return np.asarray(_Shown(data))
