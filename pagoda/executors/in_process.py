"""InProcessExecutor: run steps in this process, on the calling thread or on one of its own."""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol

from pagoda.base.errors import WorkerDied
from pagoda.core.request import LoraRef
from pagoda.core.scheduler_output import ModelRunnerOutput, SchedulerOutput

logger = logging.getLogger("pagoda")


class StepHandle(Protocol):
    """A step that was launched. `result` is called on the thread that launched it, in the order of the launches."""

    def is_done(self) -> bool:
        """Return whether `result` would return at once."""
        ...

    def wait(self) -> None:
        """Return when the device has computed the step, or failed. Any thread may wait."""
        ...

    def result(self) -> ModelRunnerOutput: ...


class StepRunner(Protocol):
    """Executes steps: worker.Worker, or a fake."""

    def start(self) -> None: ...

    def launch(self, output: SchedulerOutput) -> StepHandle:
        """Submit a step to the device."""
        ...

    def load_adapter(self, lora: LoraRef) -> None: ...

    def unload_adapter(self, lora: LoraRef) -> None: ...

    def shutdown(self) -> None: ...


class InProcessExecutor:
    """See core.executor.Executor and AdapterLoader.

    overlap: run steps on a separate thread, in order, so that the caller can schedule the next step meanwhile. If the
        device computes on its own, that thread launches the next step before it has the results of this one; another
        thread waits for them. Otherwise, `submit` returns when the step is done, which saves two thread switches.
    """

    def __init__(self, worker: StepRunner, overlap: bool = False) -> None:
        self.worker = worker
        self._overlap = overlap
        self._thread: ThreadPoolExecutor | None = None
        self._waiting: ThreadPoolExecutor | None = None
        self._alive = False

    def start(self) -> None:
        if self._overlap:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="pagoda-worker")
            self._waiting = ThreadPoolExecutor(1, thread_name_prefix="pagoda-results")
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
        future: Future[ModelRunnerOutput] = Future()
        if not self._alive:
            future.set_exception(WorkerDied("the executor is not running"))
        elif self._thread is not None:
            self._hand_over(self._thread, future, self._launch, output, future)
        else:
            self._finish(self._launched(output), future)
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
        if self._thread is not None and self._waiting is not None:
            # Steps that were launched are waited for, because they use the worker's memory; later ones fail.
            with suppress(RuntimeError):  # the program ends, and has ended the thread
                self._thread.submit(lambda: None).result()
            self._waiting.shutdown(wait=True)
            self._thread.shutdown(wait=True)
        self.worker.shutdown()

    def _launch(self, output: SchedulerOutput, future: "Future[ModelRunnerOutput]") -> None:
        step = self._launched(output)
        assert self._waiting is not None
        if step.is_done():
            self._finish(step, future)
        else:
            self._hand_over(self._waiting, future, self._wait, step, future)

    def _wait(self, step: StepHandle, future: "Future[ModelRunnerOutput]") -> None:
        """On the waiting thread: hand the step back to the worker's when the device has computed it."""
        with suppress(Exception):  # `result` raises it
            step.wait()
        assert self._thread is not None
        self._hand_over(self._thread, future, self._finish, step, future)

    def _hand_over(
        self, thread: ThreadPoolExecutor, future: "Future[ModelRunnerOutput]", call: Callable[..., None], *args: object
    ) -> None:
        """Run `call` on a thread; fail the step if the thread has ended."""
        try:
            thread.submit(call, *args)
        except RuntimeError:  # the end of a program ends such threads, before anyone can shut this executor down
            future.set_exception(WorkerDied("the program ends, or the executor was shut down"))

    def _launched(self, output: SchedulerOutput) -> StepHandle:
        if not self._alive:
            return _Failed(WorkerDied("the executor was shut down before this step began"))
        try:
            return self.worker.launch(output)
        except Exception as error:  # the future passes it to the caller
            return _Failed(error)

    def _finish(self, step: StepHandle, future: "Future[ModelRunnerOutput]") -> None:
        try:
            future.set_result(step.result())
        except Exception as error:
            future.set_exception(error)


class _Failed:
    """A step that could not be launched."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def result(self) -> ModelRunnerOutput:
        raise self._error
