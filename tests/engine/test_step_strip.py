"""Steps are noted while somebody looks: none is lost because a step took long, and none is noted for nobody."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pagoda.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from pagoda.engine import step_strip
from pagoda.engine.step_strip import LOOK_S, StepStrip


class Executed:
    """An executor whose steps take as long as the test says."""

    start = set_pools = call = shutdown = None

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.step_s = 0.0
        monkeypatch.setattr(step_strip, "time", SimpleNamespace(monotonic=lambda: self.now_s))

    def submit(self, output: SchedulerOutput) -> "Future[Any]":
        future: Future[ModelRunnerOutput | None] = Future()
        self.now_s += self.step_s
        future.set_result(None)
        return future

    def run(self, strip: StepStrip, step: int, step_s: float, num_rows: int = 1) -> None:
        rows = np.zeros(num_rows, np.int32)
        self.step_s = step_s
        strip.submit(SchedulerOutput(step, rows, rows, rows + 1, rows, rows, num_rows))


def test_long_steps_use_up_nothing_of_the_time_for_which_steps_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = Executed(monkeypatch)
    strip = StepStrip(executor)  # type: ignore[arg-type]
    executor.run(strip, 1, 0.1)  # nobody has looked
    strip.after(0.0)
    for step, step_s in enumerate((0.1, 1.5 * LOOK_S, 0.1, 0.9 * LOOK_S, 0.9 * LOOK_S, 0.1), start=2):
        executor.run(strip, step, step_s)
    assert [note.step for note in strip.after(0.0)] == [2, 3, 4, 5, 6, 7]


def test_steps_are_no_longer_noted_when_nobody_looks_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = Executed(monkeypatch)
    strip = StepStrip(executor)  # type: ignore[arg-type]
    strip.after(0.0)
    for step in range(1, 101):
        executor.run(strip, step, 0.1, num_rows=step % 2)
    noted = strip.after(0.0)
    assert [(note.step, note.number) for note in noted][:3] == [(1, 1), (3, 2), (5, 3)]  # of no rows: none, not counted
    assert 10 < len(noted) < 20
