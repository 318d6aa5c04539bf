"""A rank without a model, for which request ids say what goes wrong on which rank.

"kill-1": when a request of this id is admitted, rank 1 dies of SIGKILL; also "stop", "exit", "raise", "disagree".
"raise": all ranks raise.   An adapter named "bad" is refused, "bad-N" by rank N alone; with "stop-N", rank N hangs;
"slow" is read for ever, next to steps.
A model named "bad-N" cannot be loaded by rank N; with "slow-N", it takes forever to load it, and with
"stuck-N" to make its pools. "other-N", "old-N": rank N has other files, or kernels.
"""

import os
import signal
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from pagoda.base.errors import ConfigError, RequestError
from pagoda.core.request import LoraRef
from pagoda.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from pagoda.executors.fake import FakeExecutor
from pagoda.executors.messages import Identity, RankStart
from pagoda.executors.rank import run_child
from pagoda.worker.calls import Capacity, StepSize

MAX_ROWS, MAX_LEN, BLOCK_SIZE, VOCAB_SIZE = 8, 256, 16, 258


class FaultyExecutor:
    def __init__(self, number: int, model: str) -> None:
        self._number = number
        self._model = model
        self._executor = FakeExecutor(MAX_ROWS, MAX_LEN, BLOCK_SIZE, vocab_size=VOCAB_SIZE)

    def load(self) -> None:
        if self._model == f"bad-{self._number}":
            raise ConfigError(f"rank {self._number} cannot read its weights")
        self._hang_if("slow")

    def _hang_if(self, fault: str) -> None:
        if self._model == f"{fault}-{self._number}":
            time.sleep(3600)

    def measure(self, sizes: Sequence[StepSize]) -> Sequence[Capacity]:
        return (Capacity("host", 1000 + self._number, (10,), len(sizes)),)

    def set_pools(self, num_blocks: int, num_host_blocks: int, num_states: int = 0, num_host_states: int = 0) -> None:
        self._hang_if("stuck")
        self._executor.start()
        self._executor.set_pools(num_blocks, num_host_blocks)

    def submit(self, output: SchedulerOutput) -> "Future[ModelRunnerOutput]":
        checksum = int((output.start + output.num_new).sum())
        for init in output.admitted:
            fault, _, number = init.request_id.partition("-")
            if number not in ("", str(self._number)):
                continue
            match fault:
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                case "exit":
                    os._exit(3)
                case "raise":
                    future: Future[ModelRunnerOutput] = Future()
                    future.set_exception(ValueError("this step cannot be computed"))
                    return future
                case "disagree":
                    checksum += 1
                case _:
                    pass
        future = Future()
        future.set_result(replace(self._executor.submit(output).result(), checksum=checksum))
        return future

    def call(self, name: str, *args: object) -> "Future[Any]":
        future: Future[Any] = Future()
        adapter = args[0].name if name == "load_adapter" and isinstance(args[0], LoraRef) else ""
        if adapter == f"stop-{self._number}":
            os.kill(os.getpid(), signal.SIGSTOP)
        if adapter in ("bad", f"bad-{self._number}"):
            future.set_exception(RequestError("no such adapter", "lora_request"))
        elif adapter != "slow":
            future.set_result(None)
        return future


def make(start: RankStart) -> tuple[FaultyExecutor, Identity]:
    model, number = start.config.model.model, start.place.number
    identity = Identity("other" if model == f"other-{number}" else "same", "old" if model == f"old-{number}" else "new")
    return FaultyExecutor(number, model), identity


def main() -> None:
    run_child(make)
