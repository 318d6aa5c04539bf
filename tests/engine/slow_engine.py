"""An engine process over the fake executor whose steps take 3 ms, so that clients keep up with it.

`python -m tests.engine.slow_engine`; the environment's ENGINE_STEP_S is another duration.
"""

import functools
import os

from pagoda.assembly.engine_process import main
from pagoda.executors import fake

if __name__ == "__main__":
    step_s = float(os.environ.get("ENGINE_STEP_S", "0.003"))
    fake.FakeExecutor = functools.partial(fake.FakeExecutor, step_s=step_s)  # type: ignore[misc,assignment]
    main()
