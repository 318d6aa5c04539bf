"""InProcessExecutor: run steps in this process, on the calling thread or on a separate one."""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from pagoda.base.errors import WorkerDied
from pagoda.core.request import LoraRef
from pagoda.core.scheduler_output import ModelRunnerOutput, SchedulerOutput

logger = logging.getLogger("pagoda")


class StepRunner(Protocol):
    """Executes steps: worker.Worker, or a fake."""

    def start(self) -> None: ...

    def run(self, output: SchedulerOutput) -> ModelRunnerOutput: ...

    def load_adapter(self, lora: LoraRef) -> None: ...

    def unload_adapter(self, lora: LoraRef) -> None: ...

    def shutdown(self) -> None: ...


class InProcessExecutor:
    """See core.executor.Executor and AdapterLoader.

    overlap: run steps on a separate thread, in order, so that the caller can schedule the next step meanwhile.
        Otherwise, `submit` returns when the step is done, which saves two thread switches per step.
    """

    def __init__(self, worker: StepRunner, overlap: bool = False) -> None:
        self.worker = worker
        self._overlap = overlap
        self._thread: ThreadPoolExecutor | None = None
        self._alive = False

    def start(self) -> None:
        if self._overlap:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="pagoda-worker")
            try:
                # On that thread, because thread settings of math libraries apply to the calling thread.
                self._thread.submit(self.worker.start).result()
            except BaseException:
                self._thread.shutdown()
                raise
        else:
            self.worker.start()
        self._alive = True

    def submit(self, output: SchedulerOutput) -> "Future[ModelRunnerOutput]":
        if not self._alive:
            return _failed(WorkerDied("the executor is not running"))
        if self._thread is not None:
            return self._thread.submit(self._run, output)
        future: Future[ModelRunnerOutput] = Future()
        try:
            future.set_result(self._run(output))
        except Exception as error:  # the future passes it to the caller
            future.set_exception(error)
        return future

    def load_adapter(self, lora: LoraRef) -> None:
        self._between_steps(self.worker.load_adapter, lora)

    def unload_adapter(self, lora: LoraRef) -> None:
        self._between_steps(self.worker.unload_adapter, lora)

    def _between_steps(self, call: Callable[[LoraRef], None], lora: LoraRef) -> None:
        if not self._alive:
            raise WorkerDied("the executor is not running")
        if self._thread is not None:
            self._thread.submit(call, lora).result()
        else:
            call(lora)

    def shutdown(self) -> None:
        if not self._alive:
            return
        self._alive = False
        if self._thread is not None:
            # Wait for the current step, because it uses the worker's memory; later ones fail in `_run`.
            self._thread.shutdown(wait=True)
        self.worker.shutdown()

    def _run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        if not self._alive:
            raise WorkerDied("the executor was shut down before this step began")
        return self.worker.run(output)


def _failed(error: Exception) -> "Future[ModelRunnerOutput]":
    future: Future[ModelRunnerOutput] = Future()
    future.set_exception(error)
    return future
