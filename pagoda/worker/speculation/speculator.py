"""Speculator: makes the drafts of the next step, with a drafter, a controller and a clock."""

import logging
import time
from collections.abc import Callable, Mapping

import numpy as np

from pagoda.core.scheduler_output import SchedulerOutput
from pagoda.worker.grammar_rows import GrammarRows
from pagoda.worker.speculation.controller import DraftController
from pagoda.worker.speculation.drafter import GRADE_OF_MODEL, Drafter
from pagoda.worker.speculation.setup import DraftSetup
from pagoda.worker.table_mirror import TableMirror

logger = logging.getLogger("pagoda")

_SAME_BUSY_PERIOD = 0.25  # of a step's duration: after a longer pause the engine was idle in between
_PATIENCE = 4  # steps in a row without a draft, after which the next ones are promised to have none either

_PROFILED = (1, 4, 2, 8, 16, 3, 6)  # tokens per step, measured at start in this order, as far as the time allows
_PROFILED_AT = 512  # position: attention takes part of the time
_PROFILE_ROUNDS = 3
_PROFILE_S = 0.5

NEVER_DRAFTS = 2**62
"""`no_drafts_until` of a worker that drafts nothing any more."""


class Speculator:
    """Of each step are called `begin_step`, `apply` and, once the step's tokens are in the table, `finish_step`.

    is_on: there may be drafts; an error in making them ends that.
    no_drafts_until: the last step that is certain to propose no drafts. With asynchronous scheduling, steps after it
        are scheduled while it runs; otherwise the engine waits for its drafts.
    """

    def __init__(
        self,
        setup: DraftSetup,
        drafter: Drafter,
        max_model_len: int,
        max_rows: int,
        grammars: GrammarRows | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """max_rows: of the executor.   now: a clock in seconds.

        grammars: None if no request may have a grammar; otherwise, they shorten drafts that they forbid.
        """
        self.is_on = True
        self._grammars = grammars
        self._drafter = drafter
        # None: `max_drafts` tokens for every row in every step.
        self._controller = DraftController(max_rows, setup.max_drafts) if setup.config.adaptive else None
        self._max_drafts = setup.max_drafts
        self._max_model_len = max_model_len
        self._length_limit = np.zeros(max_rows, np.int32)  # num_tokens at which a row ends; 0: it may not draft
        self._grades: dict[int, int] = {}  # of the drafts offered last, by row
        self._now = now
        self._begin_s = self._end_s = 0.0  # of the current step, and of the last `finish_step`
        self._gap_s = self._draft_s = 0.0  # since, and in, the last `finish_step`
        self._num_steps_ahead = setup.num_steps_ahead
        self._num_fruitless = 0  # steps in a row without a draft
        self.no_drafts_until = 0

    def measure_steps(
        self, run: Callable[[int, int, int], None], max_rows: int, max_len: int, num_warm_up: int = 0
    ) -> None:
        """Measure steps before the first request, if the lengths of drafts depend on their cost.

        It takes about 0.5 s after the warm-up.
        run: see DryRuns.run_tokens.   max_rows: of a step.   max_len: of a row, in tokens.
        num_warm_up: steps of each size that come first and are not measured.
        """
        if self._controller is None:
            return
        seconds: dict[int, float] = {}
        start, per_row = min(max_len // 2, _PROFILED_AT), self._max_drafts + 1
        sizes = [n for n in _PROFILED if start + min(n, per_row) <= max_len and n <= per_row * max_rows]
        for count in sizes * num_warm_up:
            run(count, per_row, start)
        begin_s = self._now()
        for count in sizes * _PROFILE_ROUNDS:
            if len(seconds) > 1 and self._now() - begin_s > _PROFILE_S:
                continue
            step_s = self._now()
            run(count, per_row, start)
            seconds[count] = min(self._now() - step_s, seconds.get(count, float("inf")))
        if len(seconds) > 1:
            self._controller.set_profile(seconds)

    def begin_step(self) -> None:
        """Start timing a step."""
        self._begin_s = self._now()
        self._gap_s = self._begin_s - self._end_s

    def apply(self, output: SchedulerOutput, table: TableMirror) -> None:
        """Note the step's events; call it before they are applied to `table`."""
        if not self.is_on:
            return
        self._drafter.apply(output, table)
        for init in output.admitted:
            row, params = init.row, init.sampling
            max_tokens = None if params is None else params.max_tokens
            limit = self._max_model_len if max_tokens is None else init.num_prompt_tokens + max_tokens
            may_draft = params is not None and params.beam_search is None
            self._length_limit[row] = min(limit, self._max_model_len) if may_draft else 0
            if self._controller is not None:
                self._controller.forget(row)
        for fork in output.forks:
            self._length_limit[fork.dst] = self._length_limit[fork.src]
            if self._controller is not None:
                self._controller.copy(fork.src, fork.dst)

    def finish_step(
        self, output: SchedulerOutput, table: TableMirror, num_sampled: np.ndarray, failed: Mapping[int, str]
    ) -> dict[int, np.ndarray]:
        """Learn from the step's results and return the drafts for the next one, by row: int32 [k], k at least 1.

        `output` must not be empty.
        num_sampled: int32 [num_samples], tokens of each sample row, which are in `table`.   failed: rows without token.
        Since the tokens are in the table, an error costs no more than drafts: it is logged, and none follow.
        """
        if not self.is_on:
            return {}
        try:
            drafts = self._finish_step(output, table, num_sampled, failed)
            if self._grammars is not None and drafts:
                drafts = self._grammars.allowed_drafts(table, drafts)
        except Exception:
            logger.exception("drafting failed; this worker continues without speculation")
            self.is_on, self.no_drafts_until = False, NEVER_DRAFTS
            return {}
        return drafts

    def _finish_step(
        self, output: SchedulerOutput, table: TableMirror, num_sampled: np.ndarray, failed: Mapping[int, str]
    ) -> dict[int, np.ndarray]:
        # A step without drafts should lose next to nothing here: arrays of one element are slow, right after a forward.
        now_s = self._now()
        if self._controller is not None:
            self._learn(self._controller, output, table, num_sampled, now_s - self._begin_s)
        rows = output.sample_rows
        # A step with k drafts samples up to k + 1 tokens.
        room = self._length_limit[rows] - table.num_tokens[rows] - 1
        if failed or room.min(initial=1) < 1 or num_sampled.min(initial=1) < 1:
            goes_on = (room > 0) & (num_sampled > 0) & ~np.isin(rows, np.fromiter(failed, np.int32, len(failed)))
            rows, room = rows[goes_on], room[goes_on]
        if output.step > self.no_drafts_until:
            drafts = self._draft(table, rows, room) if rows.size else {}
            has_drafts = bool(drafts)
        else:
            drafts, has_drafts = {}, rows.size > 0 and self._would_draft(table, rows, room)
        self._num_fruitless = 0 if has_drafts else self._num_fruitless + 1
        if self._num_fruitless >= _PATIENCE:
            self.no_drafts_until = output.step + self._num_steps_ahead
        self._end_s = self._now()
        self._draft_s = self._end_s - now_s
        return drafts

    def _learn(
        self,
        controller: DraftController,
        output: SchedulerOutput,
        table: TableMirror,
        num_sampled: np.ndarray,
        duration_s: float,
    ) -> None:
        drafts = output.drafts
        num_rows, num_drafts, num_emitted = len(output.rows), 0, len(num_sampled)
        if drafts:
            for row, emitted in zip(output.sample_rows.tolist(), num_sampled.tolist(), strict=True):
                if row in drafts and emitted:
                    grade = self._grades.get(row, 0)
                    controller.observe_draft(row, grade, len(drafts[row]), min(emitted - 1, len(drafts[row])))
            num_drafts, num_emitted = sum(map(len, drafts.values())), int(num_sampled.sum())
        decodes_only = len(num_sampled) == num_rows and output.total_num_scheduled_tokens == num_rows + num_drafts
        if drafts and table.state_groups and len(num_sampled) == num_rows:
            # Right drafts before a wrong one are computed again, which is part of what drafts cost.
            decodes_only = bool((output.start >= table.num_prompt[output.rows]).all())
        if not decodes_only or output.admitted:
            return
        is_busy = self._gap_s < _SAME_BUSY_PERIOD * duration_s
        before_s = self._draft_s + self._gap_s if is_busy else self._draft_s
        controller.observe_step(num_rows, num_drafts, num_emitted, duration_s + before_s)

    def _would_draft(self, table: TableMirror, rows: np.ndarray, room: np.ndarray) -> bool:
        """Return whether there would be drafts after this step, which was promised to have none.

        A drafter that runs a model mostly finds some, and is not asked: that takes forward passes.
        """
        rows, most = self._asked(rows, room)
        if not rows.size or self._drafter.runs_model:
            return rows.size > 0
        return any(len(draft.tokens) for draft in self._drafter.propose(table, rows, most))

    def _asked(self, rows: np.ndarray, room: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return which of `rows` to draft for, and how many tokens at most: int32.

        room: most tokens that each could still emit, at least 1.
        """
        most = np.minimum(room, self._max_drafts)
        controller = self._controller
        if controller is None:
            return rows, most
        if not controller.begin_choice(len(rows)):
            return rows[:0], most[:0]
        if self._drafter.runs_model:  # which costs more than to verify what it drafts
            grades = [GRADE_OF_MODEL] * len(rows)
            most = np.array(controller.choose(len(rows), rows, most.tolist(), grades), np.int32)
        return rows[most > 0], most[most > 0]

    def _draft(self, table: TableMirror, rows: np.ndarray, room: np.ndarray) -> dict[int, np.ndarray]:
        controller = self._controller
        asked, most = self._asked(rows, room)
        if not asked.size:
            return {}
        found = self._drafter.propose(table, asked, most)
        lengths = [len(draft.tokens) for draft in found]
        if not any(lengths):
            return {}
        if controller is not None and not self._drafter.runs_model:
            lengths = controller.choose(len(rows), asked, lengths, [draft.grade for draft in found])
        self._grades.clear()
        drafts: dict[int, np.ndarray] = {}
        for row, draft, length in zip(asked.tolist(), found, lengths, strict=True):
            if length:
                drafts[row] = draft.tokens[:length]
                self._grades[row] = draft.grade
        return drafts
