"""StepTimes: time spent in each part of a step, summed over steps."""

import time


class StepTimes:
    """Seconds by part, summed over steps. Reading the clock takes about 0.05 us, so it is always on."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.num_steps = 0
        self._at_s = 0.0

    def begin(self) -> None:
        """Start timing a step."""
        self.num_steps += 1
        self._at_s = time.perf_counter()

    def resume(self) -> None:
        """Leave out the time since the last call."""
        self._at_s = time.perf_counter()

    def lap(self, part: str) -> None:
        """Add the time since the last call to `part`."""
        now_s = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now_s - self._at_s
        self._at_s = now_s

    def clear(self) -> None:
        self.seconds.clear()
        self.num_steps = 0
