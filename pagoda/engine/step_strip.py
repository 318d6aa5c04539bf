"""StepStrip: the sizes and times of the last steps, noted while somebody looks or a trace is made."""

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from pagoda.core.executor import Executor
from pagoda.core.scheduler_output import ModelRunnerOutput, SchedulerOutput

_MOST_STEPS = 512
LOOK_S = 3.0
"""Steps are noted for so long after somebody has looked, besides the time in long ones."""
_LONG_S = 1.0
"""Looks come more often; what comes during a step is answered when that has ended."""


@dataclass(frozen=True, slots=True)
class StepNote:
    """A step that has ended.   number: counts those that computed something, noted or not.

    began_s, ended_s: on the system's monotonic clock.
    num_prompt_tokens, num_sampled: tokens of prompts that it computed, and tokens that it sampled.
    """

    step: int
    number: int
    began_s: float
    ended_s: float
    num_prompt_tokens: int
    num_sampled: int
    num_preempted: int


class StepStrip:
    """An executor over `inner` that notes its steps.

    on_step: gets each step that has ended, maybe on another thread; without it, steps are noted while somebody looks.
    """

    def __init__(self, inner: Executor, on_step: Callable[[StepNote], object] | None = None) -> None:
        self._inner = inner
        self.start, self.set_pools, self.call, self.shutdown = inner.start, inner.set_pools, inner.call, inner.shutdown
        self._on_step = on_step
        self._prompt_end_of_row = np.zeros(64, np.int64)
        self._notes = deque[StepNote](maxlen=_MOST_STEPS)
        self._until_s = 0.0
        self._num_steps = 0

    def after(self, time_s: float) -> tuple[StepNote, ...]:
        """Return the steps that have ended after a time, the last ones of many; go on noting for a while."""
        self._until_s = time.monotonic() + LOOK_S
        return tuple(note for note in list(self._notes) if note.ended_s > time_s)

    def submit(self, output: SchedulerOutput) -> "Future[ModelRunnerOutput]":
        ends = self._ends_for(output)
        for init in output.admitted:
            ends[init.row] = init.num_prompt_tokens
        for fork in output.forks:
            ends[fork.dst] = ends[fork.src]
        began_s = time.monotonic()
        future = self._inner.submit(output)
        if output.is_empty:
            return future
        number = self._num_steps = self._num_steps + 1
        if self._on_step is not None or began_s < self._until_s:
            computed = np.minimum(output.num_new, ends[output.rows] - output.start)
            num_prompt = int(np.maximum(computed, 0).sum())
            sizes = (num_prompt, len(output.sample_rows), len(output.preempted))
            future.add_done_callback(lambda _: self._end(output.step, number, began_s, *sizes))
        return future

    def _ends_for(self, output: SchedulerOutput) -> np.ndarray:
        """Return the prompts' ends by row, with room for the rows of a step."""
        new = [*(init.row for init in output.admitted), *(fork.dst for fork in output.forks)]
        num_rows = 1 + max(int(output.rows.max(initial=-1)), *new, -1)
        if num_rows > len(self._prompt_end_of_row):
            more = np.zeros(2 * num_rows - len(self._prompt_end_of_row), np.int64)
            self._prompt_end_of_row = np.concatenate((self._prompt_end_of_row, more))
        return self._prompt_end_of_row

    def _end(
        self, step: int, number: int, began_s: float, num_prompt: int, num_sampled: int, num_preempted: int
    ) -> None:
        # With several steps in flight, one computes nothing before the one before it has ended.
        begun_s = max(began_s, self._notes[-1].ended_s) if self._notes else began_s
        note = StepNote(step, number, begun_s, time.monotonic(), num_prompt, num_sampled, num_preempted)
        if (step_s := note.ended_s - begun_s) > _LONG_S:
            self._until_s += step_s
        self._notes.append(note)
        if self._on_step is not None:
            self._on_step(note)
