import threading

import numpy as np
import pytest

from pagoda.base.errors import WorkerDied
from pagoda.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from pagoda.executors.in_process import InProcessExecutor
from tests.worker.hand_made import step


class StepLog:
    """Writes down what it runs; step 3 fails; waits for `gate` where there is one."""

    def __init__(self, gate: threading.Event | None = None) -> None:
        self.gate = gate
        self.at_the_gate = threading.Event()
        self.events: list[object] = []

    def start(self) -> None:
        self.events.append("start")

    def run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        if self.gate is not None:
            self.at_the_gate.set()
            self.gate.wait(5)
        self.events.append(output.step)
        if output.step == 3:
            raise ValueError("three")
        return ModelRunnerOutput(output.step, np.empty((0, 1), np.int32), np.empty(0, np.int32))

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
