"""FlightRecorder: record what an engine process is doing, so that its supervisor can read it after a crash.

A small file mapped by both processes. Before each step, the engine writes which requests are in it; after it, that the
step has completed. The supervisor reads it to tell a hung step from a busy engine, and to find the suspects of a crash.
"""

import hashlib
import mmap
import struct
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_HEADER = struct.Struct("<qqqq")  # steps begun, steps ended, begin time of the last (ns), number of keys
_KEYS_AT = 64


def request_key(request_id: str) -> int:
    """Return the 64-bit hash that identifies a request in the recorder."""
    digest = hashlib.blake2b(request_id.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


@dataclass(frozen=True, slots=True)
class FlightRecord:
    """A snapshot of the recorder.

    steps_begun - steps_ended: steps in flight.   begun_at_s: start of the last step (time.monotonic).
    keys: int64, `request_key` of every request in the last step that began.
    """

    steps_begun: int
    steps_ended: int
    begun_at_s: float
    keys: np.ndarray

    def in_flight_for_s(self, now_s: float) -> float:
        """Return for how many seconds the current step has been running; 0 between steps."""
        return now_s - self.begun_at_s if self.steps_begun > self.steps_ended else 0.0


class FlightRecorder:
    """The mapped file, for one writer (the engine) and one reader (the supervisor). max_rows: most rows per step."""

    def __init__(self, path: Path, max_rows: int, create: bool = False) -> None:
        size = _KEYS_AT + 8 * max_rows
        if create:
            path.write_bytes(bytes(size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), size)
        self._keys = np.frombuffer(self._map, np.int64, max_rows, _KEYS_AT)
        self._begun = 0
        self._ended = 0
        self._begun_at_ns = 0

    def begin_step(self, keys: np.ndarray) -> None:
        """Record that a step begins. keys: int64 [num_rows], may contain duplicates."""
        self._begun += 1
        self._begun_at_ns = time.monotonic_ns()
        count = min(len(keys), len(self._keys))
        self._keys[:count] = keys[:count]
        _HEADER.pack_into(self._map, 0, self._begun, self._ended, self._begun_at_ns, count)

    def end_step(self) -> None:
        self._ended += 1
        struct.pack_into("<q", self._map, 8, self._ended)

    def read(self) -> FlightRecord:
        """Return a snapshot: exact once the writer is dead, possibly torn while it runs (fine for a watchdog)."""
        begun, ended, at_ns, count = _HEADER.unpack_from(self._map, 0)
        return FlightRecord(begun, ended, at_ns / 1e9, np.unique(self._keys[:count]))

    def close(self) -> None:
        del self._keys
        self._map.close()
