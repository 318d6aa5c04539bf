"""Time as an argument: whoever needs the time is given a Clock, so that tests and the simulator own it."""

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds on a monotonic scale; only differences mean something."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.perf_counter()


class VirtualClock:
    """A clock that moves only when told to."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward; a negative step is refused with ValueError."""
        if seconds < 0:
            raise ValueError(f"a clock only moves forward, got advance({seconds})")
        self._now_s += seconds
