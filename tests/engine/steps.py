"""How many steps an engine process may compute: a test holds it after any number of them."""

import contextlib
import math
import time
from collections.abc import Iterator
from pathlib import Path

from tests.server.shared_numbers import SharedNumbers

ALLOWED, DONE = range(2)


class Steps:
    """The test's side; without a limit at first. Create it before the process."""

    def __init__(self, path: Path) -> None:
        self._shared = SharedNumbers(path, create=True)
        self.release()

    def hold_after(self, num_steps: int) -> None:
        """Allow so many more steps, and no further one. The engine must be idle or held, or just have been killed."""
        self._shared.set(ALLOWED, self._shared.get(DONE) + num_steps)

    def allow_one_more(self) -> None:
        """Allow a step after those that were computed, if the engine is held."""
        self._shared.set(ALLOWED, self._shared.get(DONE) + 1)

    def hold_next_engine_after(self, num_steps: int) -> None:
        """Allow the engine that will replace a killed one so many steps."""
        self._shared.set(DONE, 0)
        self._shared.set(ALLOWED, num_steps)

    def release(self) -> None:
        self._shared.set(ALLOWED, math.inf)

    @contextlib.contextmanager
    def held_after(self, num_steps: int) -> Iterator[None]:
        """See hold_after; release the engine at the end of the block."""
        self.hold_after(num_steps)
        try:
            yield
        finally:
            self.release()

    @property
    def is_held(self) -> bool:
        """Whether all steps that are allowed were computed."""
        return self._shared.get(DONE) >= self._shared.get(ALLOWED)

    def wait_held(self, timeout_s: float = 60.0) -> None:
        """Wait until all steps that are allowed were computed."""
        end_s = time.monotonic() + timeout_s
        while not self.is_held:
            assert time.monotonic() < end_s, "the engine does not compute the steps that it may"
            time.sleep(0.002)
