"""InProcessExecutor: run steps in this process, on the calling thread or on one of its own."""

from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from pagoda.base.errors import WorkerDied
from pagoda.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from pagoda.worker.calls import Capacity, StepSize

T = TypeVar("T")


class StepHandle(Protocol):
    """A step that was launched. `result` is called on the thread that launched it, in the order of the launches."""

    def is_done(self) -> bool:
        """Return whether `result` would return at once."""
        ...

    def wait(self) -> None:
        """Return when the device has computed the step, or failed. Any thread may wait."""
        ...

    def result(self) -> ModelRunnerOutput: ...


class RankWorker(Protocol):
    """One rank's part of what an executor does: worker.Worker, or a fake. Called by one thread."""

    def load(self) -> None:
        """Load the weights."""
        ...

    def measure(self, sizes: Sequence[StepSize]) -> Capacity:
        """Return what is left for KV pools, when all ranks have loaded: see Executor.start."""
        ...

    def set_pools(
        self, num_blocks: int, num_host_blocks: int, num_states: int = 0, num_host_states: int = 0
    ) -> None: ...

    def launch(self, output: SchedulerOutput) -> StepHandle:
        """Submit a step to the device."""
        ...

    def call(self, name: str, args: Sequence[object]) -> object:
        """Return the result of one of CALLS, or its future if that is there later."""
        ...

    def shutdown(self) -> None: ...


class InProcessExecutor:
    """See engine.executor.Executor: one rank, in this process.

    overlap: run steps on a separate thread, in order, so that the caller can schedule the next step meanwhile. If the
        device computes on its own, that thread launches the next step before it has the results of this one; another
        thread waits for them. Otherwise, `submit` returns when the step is done, which saves two thread switches.
    """

    def __init__(self, worker: RankWorker, overlap: bool = False) -> None:
        self.worker = worker
        self._thread: ThreadPoolExecutor | None = None
        self._waiting: ThreadPoolExecutor | None = None
        if overlap:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="pagoda-worker")
            self._waiting = ThreadPoolExecutor(1, thread_name_prefix="pagoda-results")
        self._has_begun = self._alive = False

    def start(self, sizes: Sequence[StepSize] = ()) -> Sequence[Capacity]:
        self.load()
        return self.measure(sizes)

    def load(self) -> None:
        """The first half of `start`; all ranks do it before any of them measures."""
        self._has_begun = True
        self._on_thread(self.worker.load)

    def measure(self, sizes: Sequence[StepSize]) -> Sequence[Capacity]:
        """The second half of `start`."""
        return (self._on_thread(self.worker.measure, sizes),)

    def set_pools(self, num_blocks: int, num_host_blocks: int, num_states: int = 0, num_host_states: int = 0) -> None:
        self._on_thread(self.worker.set_pools, num_blocks, num_host_blocks, num_states, num_host_states)
        self._alive = True

    def _on_thread(self, run: Callable[..., T], *args: Any) -> T:
        """Run it where steps run, because thread settings of math libraries apply to the calling thread."""
        return run(*args) if self._thread is None else self._thread.submit(run, *args).result()

    def submit(self, output: SchedulerOutput) -> "Future[ModelRunnerOutput]":
        future: Future[ModelRunnerOutput] = Future()
        if not self._alive:
            future.set_exception(WorkerDied("the executor is not running"))
        elif self._thread is not None:
            self._hand_over(self._thread, future, self._launch, output, future)
        else:
            self._finish(self._launched(output), future)
        return future

    def call(self, name: str, *args: object) -> "Future[Any]":
        future: Future[Any] = Future()
        if not self._alive:
            future.set_exception(WorkerDied("the executor is not running"))
        elif self._thread is not None:
            self._hand_over(self._thread, future, self._call, future, name, args)
        else:
            self._call(future, name, args)
        return future

    def _call(self, future: "Future[Any]", name: str, args: Sequence[object]) -> None:
        try:
            result = self.worker.call(name, args)
        except Exception as error:  # the future passes it to the caller
            future.set_exception(error)
            return
        if isinstance(result, Future):
            result.add_done_callback(lambda done: _copy(done, future))
        else:
            future.set_result(result)

    def shutdown(self) -> None:
        if not self._has_begun:
            return
        self._has_begun = self._alive = False
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
        self, thread: ThreadPoolExecutor, future: "Future[Any]", call: Callable[..., None], *args: object
    ) -> None:
        """Run `call` on a thread; fail what waits for it if the thread has ended."""
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


def _copy(done: "Future[Any]", future: "Future[Any]") -> None:
    """Pass on how a call has ended."""
    try:
        error = done.exception()
    except CancelledError:
        error = WorkerDied("the executor was shut down before this call was done")
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(done.result())


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
