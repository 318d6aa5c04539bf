"""StepStrip: the sizes and times of the last steps, noted after a look or while a trace is made."""

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from pagoda.core.request import AdmitKind
from pagoda.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from pagoda.engine.executor import Executor
from pagoda.engine.flight_recorder import FlightRecorder, packed_key

_MOST_STEPS = 512
LOOK_S = 3.0
"""Steps are noted for this long after a look, besides the time in long steps."""
_LONG_S = 1.0
"""Looks come more often; what comes during a step is answered when that has ended."""


@dataclass(frozen=True, slots=True)
class StepNote:
    """A step that has ended.   number: counts those that computed something, noted or not.

    began_s, ended_s: on the system's monotonic clock.
    num_prompt_tokens, num_sampled, num_drafted: tokens of prompts that it computed, sequences of which it sampled the
    next token, and drafted tokens that it verified next to these.
    replica: of which it is, from 1; 0: there is one engine.
    """

    step: int
    number: int
    began_s: float
    ended_s: float
    num_prompt_tokens: int
    num_sampled: int
    num_preempted: int
    num_drafted: int = 0
    replica: int = 0


class _Rows:
    """What is known of each row that steps compute, from the steps themselves.

    keys: int64, `packed_key` of its request.   prompt_ends: int64, tokens of its prompt.   lengths: int64, tokens with
    which it was admitted; 0 of one that came back from host memory, and lacked only the last that it sampled.
    """

    def __init__(self) -> None:
        self._columns = np.zeros((3, 64), np.int64)

    def follow(self, output: SchedulerOutput) -> None:
        last = max([*(init.row for init in output.admitted), *(fork.dst for fork in output.forks)], default=0)
        if last >= self._columns.shape[1]:
            self._columns = np.pad(self._columns, ((0, 0), (0, last + 1)))
        for init in output.admitted:
            length = len(init.token_ids)
            if init.kind is AdmitKind.SWAPPED_IN and init.num_computed >= max(init.num_prompt_tokens, length - 1):
                length = 0
            self._columns[:, init.row] = packed_key(init.key), init.num_prompt_tokens, length
        for fork in output.forks:
            self._columns[:, fork.dst] = self._columns[:, fork.src]
        self.keys, self.prompt_ends, self.lengths = self._columns


class StepStrip:
    """Submits steps to `executor`, and notes them after a look (`after`), or while `on_step` is set.

    num_steps: that computed something, noted or not.   on_step: gets each step that has ended, maybe on another thread.
    recorder: gets the requests of each step; its reader also gets the steps' tokens, by `take_step_tokens`.
    """

    def __init__(self, executor: Executor, recorder: FlightRecorder | None = None) -> None:
        self.on_step: Callable[[StepNote], object] | None = None
        self._executor = executor
        self._recorder = recorder
        self._rows = _Rows()
        self._step_tokens: list[int] = []
        self._notes = deque[StepNote](maxlen=_MOST_STEPS)
        self._until_s = 0.0
        self.num_steps = 0

    def after(self, time_s: float) -> tuple[StepNote, ...]:
        """Return the steps that have ended after a time, the last ones of many; go on noting for a while."""
        self._until_s = time.monotonic() + LOOK_S
        return tuple(note for note in list(self._notes) if note.ended_s > time_s)

    def submit(self, output: SchedulerOutput) -> "Future[ModelRunnerOutput]":
        self._rows.follow(output)
        if self._recorder is not None:
            self._record(self._recorder, output)
        began_s = time.monotonic()
        future = self._executor.submit(output)
        if (recorder := self._recorder) is not None:
            future.add_done_callback(lambda _: recorder.end_step())
        if output.is_empty:
            return future
        number = self.num_steps = self.num_steps + 1
        if self.on_step is not None or began_s < self._until_s:
            computed = np.minimum(output.num_new, self._rows.prompt_ends[output.rows] - output.start)
            num_prompt = int(np.maximum(computed, 0).sum())
            num_drafted = sum(map(len, output.drafts.values()))
            sizes = (num_prompt, len(output.sample_rows), len(output.preempted), num_drafted)
            future.add_done_callback(lambda _: self._end(output.step, number, began_s, *sizes))
        return future

    def take_step_tokens(self) -> tuple[int, ...]:
        """Return the number of tokens of each step since the last call: of prompts, sampled and drafted ones."""
        taken = tuple(self._step_tokens)
        self._step_tokens.clear()
        return taken

    def _record(self, recorder: FlightRecorder, output: SchedulerOutput) -> None:
        if not output.is_empty:
            # A row that ends its prompt also gets a token, of which nothing is computed before the next step.
            ends = output.start + output.num_new == self._rows.lengths[output.rows]
            num_first = int(np.count_nonzero(ends[output.sample_index]))
            self._step_tokens.append(output.total_num_scheduled_tokens + num_first)
        recorder.begin_step(self._rows.keys[output.rows])

    def _end(self, step: int, number: int, began_s: float, *sizes: int) -> None:
        # With several steps in flight, one computes nothing before the one before it has ended.
        begun_s = max(began_s, self._notes[-1].ended_s) if self._notes else began_s
        note = StepNote(step, number, begun_s, time.monotonic(), *sizes)
        if (step_s := note.ended_s - begun_s) > _LONG_S:
            self._until_s += step_s
        self._notes.append(note)
        if (on_step := self.on_step) is not None:
            on_step(note)
