"""An engine process with a scripted model: one text, as tokens, per seed.

The environment's ENGINE_SCRIPTS names a JSON list of lists of token ids. A
request with seed i gets the tokens of list i, whatever it asks. Or it names an object: the last token of a prompt ->
the list.
"""

import dataclasses
import json
import os
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from pagoda.assembly import engine_process
from pagoda.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from pagoda.engine.executor import Executor
from tests.engine.wrapped_executor import wrap_executor


class ScriptedExecutor:
    """Runs `inner` and replaces what it sampled. For prompts that are not preempted, without drafts."""

    def __init__(self, inner: Executor, scripts: list[list[int]] | dict[str, list[int]]) -> None:
        self._inner = inner
        self.start, self.set_pools, self.call = inner.start, inner.set_pools, inner.call
        self.shutdown = inner.shutdown
        self._scripts = scripts
        self._rest: dict[int, list[int]] = {}

    def submit(self, output: SchedulerOutput) -> "Future[ModelRunnerOutput]":
        for init in output.admitted:
            if init.sampling is None:
                continue
            scripts = self._scripts
            if isinstance(scripts, dict):
                self._rest[init.row] = list(scripts[str(init.token_ids[-1])])
            else:
                self._rest[init.row] = list(scripts[init.seed % len(scripts)])
        result = self._inner.submit(output).result()
        says = [self._rest[row].pop(0) for row in output.sample_rows.tolist()]
        future: Future[ModelRunnerOutput] = Future()
        future.set_result(dataclasses.replace(result, sampled=np.array(says, np.int32).reshape(-1, 1)))
        return future


def main() -> None:
    scripts = json.loads(Path(os.environ["ENGINE_SCRIPTS"]).read_text())
    wrap_executor(lambda inner: ScriptedExecutor(inner, scripts))
    engine_process.main()
