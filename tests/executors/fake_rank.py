"""A rank without a model, for which request ids say what goes wrong on which rank. `python -m`.

"kill-1": when a request of this id is admitted, rank 1 dies of SIGKILL; also "stop", "exit", "raise", "disagree".
"raise": all ranks raise.   An adapter named "bad" is refused, "bad-N" by rank N alone.
A model named "bad-N" cannot be loaded by rank N, which "slow-N" takes forever to load.
"""

import os
import signal
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from pagoda.base.errors import ConfigError, RequestError
from pagoda.core.executor import Capacity, StepSize
from pagoda.core.request import LoraRef
from pagoda.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from pagoda.executors.fake import FakeExecutor
from pagoda.executors.messages import RankStart
from pagoda.executors.rank import main

MAX_ROWS, MAX_LEN, BLOCK_SIZE, VOCAB_SIZE = 8, 256, 16, 258


class FaultyExecutor:
    def __init__(self, number: int, model: str) -> None:
        self._number = number
        self._model = model
        self._executor = FakeExecutor(MAX_ROWS, MAX_LEN, BLOCK_SIZE, vocab_size=VOCAB_SIZE)

    def load(self) -> None:
        fault, _, number = self._model.partition("-")
        if number == str(self._number):
            if fault == "bad":
                raise ConfigError(f"rank {number} cannot read its weights")
            if fault == "slow":
                time.sleep(3600)

    def measure(self, sizes: Sequence[StepSize]) -> Sequence[Capacity]:
        return (Capacity("host", 1000 + self._number, 10, len(sizes)),)

    def set_pools(self, num_blocks: int, num_host_blocks: int) -> None:
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
        if name == "load_adapter" and isinstance(args[0], LoraRef) and args[0].name in ("bad", f"bad-{self._number}"):
            future.set_exception(RequestError("no such adapter", "lora_request"))
        else:
            future.set_result(None)
        return future


def make(start: RankStart) -> tuple[FaultyExecutor, str]:
    model = start.config.model.model
    return FaultyExecutor(start.place.number, model), "other" if model == f"other-{start.place.number}" else "same"


if __name__ == "__main__":
    main(make)
