import threading

import numpy as np
import pytest

from pagoda.base.errors import WorkerDied
from pagoda.core.request import LoraRef
from pagoda.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from pagoda.executors.in_process import InProcessExecutor
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

    def start(self) -> None:
        self.events.append("start")

    def launch(self, output: SchedulerOutput) -> "Computed":
        if self.gate is not None:
            self.at_the_gate.set()
            self.gate.wait(5)
        self.events.append(output.step)
        if output.step == 3:
            raise ValueError("three")
        return Computed(output.step)

    def load_adapter(self, lora: LoraRef) -> None:
        raise NotImplementedError

    unload_adapter = load_adapter

    def shutdown(self) -> None:
        self.events.append("shutdown")


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_run_in_order_and_a_failing_one_fails_alone(overlap: bool) -> None:
    log = StepLog()
    executor = InProcessExecutor(log, overlap)
    executor.start()
    futures = [executor.submit(step(n, [])) for n in range(1, 6)]
    with pytest.raises(ValueError, match="three"):
        futures[2].result(5)
    assert [futures[i].result(5).step for i in (0, 1, 3, 4)] == [1, 2, 4, 5]
    executor.shutdown()
    executor.shutdown()
    assert log.events == ["start", 1, 2, 3, 4, 5, "shutdown"]
    with pytest.raises(WorkerDied):
        executor.submit(step(6, [])).result(5)


def test_overlap_returns_before_the_step_is_done() -> None:
    gate = threading.Event()
    executor = InProcessExecutor(StepLog(gate), overlap=True)
    executor.start()
    future = executor.submit(step(1, []))
    assert not future.done()
    gate.set()
    assert future.result(5).step == 1
    executor.shutdown()


def test_shutdown_fails_steps_that_have_not_begun() -> None:
    gate = threading.Event()
    log = StepLog(gate)
    executor = InProcessExecutor(log, overlap=True)
    executor.start()
    running, waiting = executor.submit(step(1, [])), executor.submit(step(2, []))
    assert log.at_the_gate.wait(5)
    threading.Timer(0.1, gate.set).start()
    executor.shutdown()
    assert running.result(0).step == 1
    with pytest.raises(WorkerDied):
        waiting.result(0)
    assert log.events == ["start", 1, "shutdown"]


def test_a_worker_that_does_not_start_gives_the_reason() -> None:
    class Broken(StepLog):
        def start(self) -> None:
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
    executor = InProcessExecutor(device, overlap=True)
    executor.start()
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
    assert device.events == ["start", 1, 2, "result 1", 3, "result 2", "result 3", 4, "shutdown"]


def test_shutdown_waits_for_what_the_device_computes() -> None:
    device = SlowDevice()
    executor = InProcessExecutor(device, overlap=True)
    executor.start()
    running = [executor.submit(step(n, [])) for n in (1, 2)]
    assert device.launched[2].wait(5)
    threading.Timer(0.1, lambda: [device.computes[n].set() for n in (1, 2)]).start()
    executor.shutdown()
    assert [future.result(0).step for future in running] == [1, 2]
    assert device.events == ["start", 1, 2, "result 1", "result 2", "shutdown"]
