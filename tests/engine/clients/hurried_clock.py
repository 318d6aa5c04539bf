"""A clock for EngineLink, so that tests of hung engines need no short timeout that a busy machine would exceed."""

import time
from collections.abc import Callable

STEP_TIMEOUT_S = 60.0


class HurriedClock:
    """The time is `ahead_s` later than it is, and 20 s later still at each look while `hurries()`."""

    def __init__(self) -> None:
        self.ahead_s = 0.0
        self.hurries: Callable[[], bool] = lambda: False

    def monotonic(self) -> float:
        if self.hurries():
            self.ahead_s += 20.0
        return time.monotonic() + self.ahead_s
