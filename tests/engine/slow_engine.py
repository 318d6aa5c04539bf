"""An engine process over the fake executor whose steps take 3 ms, so that clients keep up with it.

The environment's ENGINE_STEP_S is another duration.
"""

import functools
import os

from pagoda.assembly import engine_process
from pagoda.executors import fake


def main() -> None:
    step_s = float(os.environ.get("ENGINE_STEP_S", "0.003"))
    fake.FakeExecutor = functools.partial(fake.FakeExecutor, step_s=step_s)  # type: ignore[misc,assignment]
    engine_process.main()
