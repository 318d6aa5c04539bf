"""FlightRecorder: record what an engine process is doing, so that its supervisor can read it after a crash.

A small file mapped by both processes. When a step is submitted, the engine writes which requests are in it; when it has
completed, that it has. The supervisor reads it to tell a hung step from a busy engine, and to find the suspects of a
crash.
"""

import itertools
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pagoda.core.request import RequestKey

_HEADER = struct.Struct("<qq")  # steps begun, steps ended
_SLOTS_AT = _HEADER.size  # of each slot: the number of its keys; then the keys of each


def packed_key(key: RequestKey) -> int:
    """Return the number of a request in the recorder."""
    client_index, handle = key
    return client_index << 40 | handle


@dataclass(frozen=True, slots=True)
class FlightRecord:
    """A snapshot of the recorder.

    steps_begun - steps_ended: steps in flight.
    keys: `packed_key` of every request in the steps that may be running: with one stage the oldest in flight. If there
        is none, of every request in the last step.
    """

    steps_begun: int
    steps_ended: int
    keys: frozenset[int]


class FlightRecorder:
    """The mapped file, for one writer (the engine) and one reader (the supervisor). Both give the same sizes.

    max_rows: most rows per step.   num_slots: most steps in flight; of more, the requests of the oldest are lost.
    num_stages: most steps that run at once, each in another pipeline stage: the oldest in flight.
    Steps may be submitted while others are in flight; they end in order. `end_step` may be called by another thread.
    """

    def __init__(self, path: Path, max_rows: int, num_slots: int, num_stages: int = 1, create: bool = False) -> None:
        size = _SLOTS_AT + 8 * num_slots * (1 + max_rows)
        if create:
            path.write_bytes(bytes(size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), size)
        self._counts = np.frombuffer(self._map, np.int64, num_slots, _SLOTS_AT)
        keys = np.frombuffer(self._map, np.int64, max_rows * num_slots, _SLOTS_AT + self._counts.nbytes)
        self._keys = keys.reshape(num_slots, max_rows)
        self._num_slots, self._num_stages = num_slots, num_stages
        self._begun = 0
        self._ended = 0

    def begin_step(self, keys: np.ndarray) -> None:
        """Record that a step begins. keys: int64 [num_rows], may contain duplicates."""
        slot = self._begun % self._num_slots
        count = min(len(keys), self._keys.shape[1])
        self._keys[slot, :count] = keys[:count]
        self._counts[slot] = count
        self._begun += 1
        struct.pack_into("<q", self._map, 0, self._begun)

    def end_step(self) -> None:
        self._ended += 1
        struct.pack_into("<q", self._map, 8, self._ended)

    def read(self) -> FlightRecord:
        """Return a snapshot: exact once the writer is dead, possibly torn while it runs (fine for a watchdog)."""
        begun, ended = _HEADER.unpack_from(self._map, 0)
        first = max(min(max(ended, begun - self._num_slots), begun - 1), 0)
        slots = [step % self._num_slots for step in range(first, max(min(first + self._num_stages, begun), 1))]
        keys = [self._keys[slot, : self._counts[slot]].tolist() for slot in slots]
        return FlightRecord(begun, ended, frozenset(itertools.chain.from_iterable(keys)))

    def close(self) -> None:
        del self._keys, self._counts
        self._map.close()
