"""An engine process that computes as many steps as the test allows.

The environment's ENGINE_STEPS names the file that Steps (steps.py) shares with the test.
"""

import math
import os
import time
from concurrent.futures import Future
from pathlib import Path

from pagoda.assembly import engine_process
from pagoda.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from pagoda.engine.executor import Executor
from tests.engine.steps import ALLOWED, DONE
from tests.engine.wrapped_executor import wrap_executor
from tests.server.shared_numbers import SharedNumbers

_STEP_S = 0.01
"""The duration of a step while their number is limited: of 30 steps some are reported, as reports are 0.1 s apart."""


class SteppedExecutor:
    """Runs `inner`, and waits before each step until it is allowed."""

    def __init__(self, inner: Executor, shared: SharedNumbers) -> None:
        self._inner = inner
        self.start, self.set_pools, self.call = inner.start, inner.set_pools, inner.call
        self.shutdown = inner.shutdown
        self._shared = shared
        self._num_steps = 0
        shared.set(DONE, 0)

    def submit(self, output: SchedulerOutput) -> "Future[ModelRunnerOutput]":
        if not output.is_empty:
            while self._num_steps >= self._shared.get(ALLOWED):
                time.sleep(0.002)
            if self._shared.get(ALLOWED) < math.inf:
                time.sleep(_STEP_S)
            self._num_steps += 1
            self._shared.set(DONE, self._num_steps)
        return self._inner.submit(output)


def limit_steps() -> None:
    """Let the test limit the steps of the engine that this process will run, if it shares Steps with it."""
    if (path := os.environ.get("ENGINE_STEPS")) is not None:
        wrap_executor(lambda inner: SteppedExecutor(inner, SharedNumbers(Path(path))))


def main() -> None:
    limit_steps()
    engine_process.main()
