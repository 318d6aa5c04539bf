"""Clock: passed to everything that needs the time, so that tests and the simulator can control it."""

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Return seconds on a monotonic scale; only differences are meaningful."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.perf_counter()


class VirtualClock:
    """A clock that only moves when `advance` is called."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward. Raises ValueError for a negative step."""
        if seconds < 0:
            raise ValueError(f"a clock only moves forward, got advance({seconds})")
        self._now_s += seconds
