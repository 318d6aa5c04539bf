import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from pagoda.base.errors import WorkerDied
from pagoda.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from pagoda.executors.in_process import InProcessExecutor
from pagoda.worker.calls import Capacity, StepSize
from tests.worker.hand_made import step


class Computed:
    """A step that was computed when it was launched."""

    def __init__(self, number: int) -> None:
        self.number = number

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def result(self) -> ModelRunnerOutput:
        return ModelRunnerOutput(self.number, np.empty((0, 1), np.int32), np.empty(0, np.int32))


class StepLog:
    """Writes down what it runs; step 3 fails; waits for `gate` where there is one."""

    def __init__(self, gate: threading.Event | None = None) -> None:
        self.gate = gate
        self.at_the_gate = threading.Event()
        self.events: list[object] = []

    def load(self) -> None:
        self.events.append("load")

    def measure(self, sizes: Sequence[StepSize]) -> Capacity:
        return Capacity("host", 100, (10,), len(sizes))

    def set_pools(self, num_blocks: int, num_host_blocks: int, num_states: int = 0, num_host_states: int = 0) -> None:
        self.events.append(f"{num_blocks} + {num_host_blocks} blocks")

    def launch(self, output: SchedulerOutput) -> "Computed":
        if self.gate is not None:
            self.at_the_gate.set()
            self.gate.wait(5)
        self.events.append(output.step)
        if output.step == 3:
            raise ValueError("three")
        return Computed(output.step)

    def call(self, name: str, args: Sequence[object]) -> object:
        self.events.append((name, *args))
        if name == "later":
            return args[0]
        if name == "fails":
            raise ValueError("no such thing")
        return len(args)

    def shutdown(self) -> None:
        self.events.append("shutdown")


STARTED = ["load", "5 + 2 blocks"]


def started(worker: StepLog, overlap: bool) -> InProcessExecutor:
    executor = InProcessExecutor(worker, overlap)
    assert executor.start([StepSize(1, 1)] * 3) == (Capacity("host", 100, (10,), 3),)
    executor.set_pools(5, 2)
    return executor


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_run_in_order_and_a_failing_one_fails_alone(overlap: bool) -> None:
    log = StepLog()
    executor = started(log, overlap)
    futures = [executor.submit(step(n, [])) for n in range(1, 6)]
    with pytest.raises(ValueError, match="three"):
        futures[2].result(5)
    assert [futures[i].result(5).step for i in (0, 1, 3, 4)] == [1, 2, 4, 5]
    executor.shutdown()
    executor.shutdown()
    assert log.events == [*STARTED, 1, 2, 3, 4, 5, "shutdown"]
    with pytest.raises(WorkerDied):
        executor.submit(step(6, [])).result(5)


def test_overlap_returns_before_the_step_is_done() -> None:
    gate = threading.Event()
    executor = started(StepLog(gate), overlap=True)
    future = executor.submit(step(1, []))
    assert not future.done()
    gate.set()
    assert future.result(5).step == 1
    executor.shutdown()


def test_shutdown_fails_steps_that_have_not_begun() -> None:
    gate = threading.Event()
    log = StepLog(gate)
    executor = started(log, overlap=True)
    running, waiting = executor.submit(step(1, [])), executor.submit(step(2, []))
    assert log.at_the_gate.wait(5)
    threading.Timer(0.1, gate.set).start()
    executor.shutdown()
    assert running.result(0).step == 1
    with pytest.raises(WorkerDied):
        waiting.result(0)
    assert log.events == [*STARTED, 1, "shutdown"]


def test_a_worker_that_does_not_start_gives_the_reason() -> None:
    class Broken(StepLog):
        def load(self) -> None:
            raise MemoryError("no room")

    for overlap in (False, True):
        executor = InProcessExecutor(Broken(), overlap)
        with pytest.raises(MemoryError, match="no room"):
            executor.start()
        executor.shutdown()


class SlowDevice(StepLog):
    """Computes steps when it is let: `computes[n]` is set once step n is computed. Step 4 fails on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.computes = {n: threading.Event() for n in range(1, 9)}
        self.launched = {n: threading.Event() for n in range(1, 9)}

    def launch(self, output: SchedulerOutput) -> Computed:
        device, number = self, output.step

        class Computing(Computed):
            def is_done(self) -> bool:
                return device.computes[number].is_set()

            def wait(self) -> None:
                assert device.computes[number].wait(5)
                if number == 4:
                    raise RuntimeError("device error")

            def result(self) -> ModelRunnerOutput:
                assert threading.current_thread() is device.thread
                self.wait()
                device.events.append(f"result {number}")
                return super().result()

        self.thread = threading.current_thread()
        self.events.append(number)
        self.launched[number].set()
        return Computing(number)


def test_a_step_is_launched_before_the_results_of_the_last_are_there() -> None:
    device = SlowDevice()
    executor = started(device, overlap=True)
    first, second = executor.submit(step(1, [])), executor.submit(step(2, []))
    assert device.launched[2].wait(5)
    assert not first.done()
    device.computes[1].set()
    assert first.result(5).step == 1
    third = executor.submit(step(3, []))
    assert device.launched[3].wait(5)
    assert not second.done()
    device.computes[3].set()
    device.computes[2].set()
    assert (second.result(5).step, third.result(5).step) == (2, 3)
    device.computes[4].set()
    with pytest.raises(RuntimeError, match="device error"):
        executor.submit(step(4, [])).result(5)
    executor.shutdown()
    assert device.events == [*STARTED, 1, 2, "result 1", 3, "result 2", "result 3", 4, "shutdown"]


def test_shutdown_waits_for_what_the_device_computes() -> None:
    device = SlowDevice()
    executor = started(device, overlap=True)
    running = [executor.submit(step(n, [])) for n in (1, 2)]
    assert device.launched[2].wait(5)
    threading.Timer(0.1, lambda: [device.computes[n].set() for n in (1, 2)]).start()
    executor.shutdown()
    assert [future.result(0).step for future in running] == [1, 2]
    assert device.events == [*STARTED, 1, 2, "result 1", "result 2", "shutdown"]


@pytest.mark.parametrize("overlap", [False, True])
def test_calls_run_in_order_with_steps(overlap: bool) -> None:
    log = StepLog()
    executor = started(log, overlap)
    executor.submit(step(1, []))
    call = executor.call("count", "a", "b")
    failing = executor.call("fails")
    assert executor.submit(step(2, [])).result(5).step == 2
    assert call.result(0) == 2
    with pytest.raises(ValueError, match="no such thing"):
        failing.result(0)
    executor.shutdown()
    assert log.events == [*STARTED, 1, ("count", "a", "b"), ("fails",), 2, "shutdown"]
    with pytest.raises(WorkerDied):
        executor.call("count").result(0)


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_do_not_wait_for_what_a_call_does_elsewhere(overlap: bool) -> None:
    executor = started(StepLog(), overlap)
    works: list[Future[Any]] = [Future() for _ in range(3)]
    calls = [executor.call("later", work) for work in works]
    assert executor.submit(step(1, [])).result(5).step == 1
    assert not any(call.done() for call in calls)
    works[0].set_result(7)
    works[1].set_exception(ValueError("seven"))
    assert calls[0].result(5) == 7
    with pytest.raises(ValueError, match="seven"):
        calls[1].result(5)
    executor.shutdown()
    works[2].cancel()  # by the worker, whose threads end
    with pytest.raises(WorkerDied):
        calls[2].result(0)
