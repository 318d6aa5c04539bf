"""An engine process with built-in faults: steps that contain certain requests kill it, or never end.

It is started by ProcessClient in clients/test_process_client.py. The environment's
HANGING_FILE names the file into which a process that hangs writes its process id. Its steps can be limited as those of
stepped_engine.
"""

import os
import time
from concurrent.futures import Future
from pathlib import Path

from pagoda.assembly import engine_process
from pagoda.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from pagoda.engine.executor import Executor
from tests.engine.stepped_engine import limit_steps
from tests.engine.wrapped_executor import wrap_executor


class PoisonedExecutor:
    """Dies on the second step of a request whose id starts with "poison"; hangs on one that starts with "hang"."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self.start, self.set_pools, self.call = inner.start, inner.set_pools, inner.call
        self.shutdown = inner.shutdown
        self._ids: dict[int, str] = {}

    def submit(self, output: SchedulerOutput) -> "Future[ModelRunnerOutput]":
        known = set(self._ids)
        for row in output.rows.tolist():
            name = self._ids.get(row, "")
            if row in known and name.startswith("poison"):
                os._exit(3)
            if row in known and name.startswith("hang"):
                Path(os.environ["HANGING_FILE"]).write_text(str(os.getpid()))
                time.sleep(3600)
        self._ids.update({init.row: init.request_id for init in output.admitted})
        time.sleep(0.002)
        return self._inner.submit(output)


def main() -> None:
    wrap_executor(PoisonedExecutor)
    limit_steps()
    engine_process.main()
