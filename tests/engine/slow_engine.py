"""An engine process over the fake executor whose steps take 3 ms, so that clients keep up with it.

`python -m tests.engine.slow_engine`
"""

import functools

import pagoda.assemble
from pagoda.engine_process import main
from pagoda.executors.fake import FakeExecutor

if __name__ == "__main__":
    pagoda.assemble.FakeExecutor = functools.partial(FakeExecutor, step_s=0.003)  # type: ignore[misc,assignment]
    main()
