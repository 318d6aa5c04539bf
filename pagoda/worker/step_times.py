"""StepTimes: where the time of steps goes, by the part of the step."""

import time


class StepTimes:
    """Seconds by part, summed over steps. Reading the clock costs a twentieth of a microsecond, so it is always on."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.num_steps = 0
        self._at_s = 0.0

    def begin(self) -> None:
        """A step begins."""
        self.num_steps += 1
        self._at_s = time.perf_counter()

    def lap(self, part: str) -> None:
        """What has passed since the last call belongs to `part`."""
        now_s = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now_s - self._at_s
        self._at_s = now_s

    def clear(self) -> None:
        self.seconds.clear()
        self.num_steps = 0
