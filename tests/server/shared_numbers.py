"""A few numbers that two processes share in a mapped file."""

import mmap
import struct
from pathlib import Path

NUM_SLOTS = 8


class SharedNumbers:
    """Numbers by slot; each has one writer."""

    def __init__(self, path: Path, create: bool = False) -> None:
        if create:
            path.write_bytes(bytes(NUM_SLOTS * 8))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), NUM_SLOTS * 8)

    def get(self, slot: int) -> float:
        return float(struct.unpack_from("<d", self._map, slot * 8)[0])

    def set(self, slot: int, value: float) -> None:
        struct.pack_into("<d", self._map, slot * 8, value)
