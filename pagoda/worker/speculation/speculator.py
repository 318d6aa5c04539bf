"""Speculator: makes the drafts of the next step, with a drafter, a controller and a clock."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from pagoda.core.scheduler_output import SchedulerOutput
from pagoda.worker.device_table import DeviceTable
from pagoda.worker.drafters.drafter import Drafter
from pagoda.worker.speculation.controller import DraftController

_SAME_BUSY_PERIOD = 0.25  # of a step's duration: after a longer pause the engine was idle in between
_PATIENCE = 4  # steps in a row without a draft, after which the next ones are promised to have none either

NEVER_DRAFTS = 2**62
"""`no_drafts_until` of a worker that drafts nothing any more."""


@dataclass(slots=True)
class _Step:
    """When the current step began, and what came before it.   gap_s, draft_s: since, and in, the last `finish_step`."""

    begin_s: float = 0.0
    gap_s: float = 0.0
    draft_s: float = 0.0
    end_s: float = 0.0


class Speculator:
    """The executor calls `begin_step`, `apply` and, once the step's tokens are in the table, `finish_step`.

    no_drafts_until: the last step that is certain to propose no drafts. With asynchronous scheduling, steps after it
        are scheduled while it runs; otherwise the engine waits for its drafts.
    """

    def __init__(
        self,
        drafter: Drafter,
        controller: DraftController | None,
        max_drafts: int,
        max_model_len: int,
        max_rows: int,
        now: Callable[[], float],
        num_steps_ahead: int = 0,
    ) -> None:
        """controller: None drafts `max_drafts` tokens for every row in every step.   now: a clock in seconds.

        num_steps_ahead: steps that may be scheduled before the result of the current one is back.
        """
        self._drafter = drafter
        self._controller = controller
        self._max_drafts = max_drafts
        self._max_model_len = max_model_len
        self._length_limit = np.zeros(max_rows, np.int32)  # num_tokens at which a row ends
        self._may_draft = np.zeros(max_rows, np.bool_)
        self._grades: dict[int, int] = {}  # of the drafts offered last, by row
        self._now = now
        self._step = _Step()
        self._num_steps_ahead = num_steps_ahead
        self._num_fruitless = 0  # steps in a row without a draft
        self.no_drafts_until = 0

    def begin_step(self) -> None:
        """Start timing a step."""
        step = self._step
        step.begin_s = self._now()
        step.gap_s = step.begin_s - step.end_s

    def apply(self, output: SchedulerOutput, table: DeviceTable) -> None:
        """Note the step's events; call it before they are applied to `table`."""
        self._drafter.apply(output, table)
        for init in output.admitted:
            row, params = init.row, init.sampling
            max_tokens = None if params is None else params.max_tokens
            limit = self._max_model_len if max_tokens is None else init.num_prompt_tokens + max_tokens
            self._length_limit[row] = min(limit, self._max_model_len)
            self._may_draft[row] = params is not None and params.beam_search is None
            if self._controller is not None:
                self._controller.forget(row)
        for fork in output.forks:
            self._length_limit[fork.dst] = self._length_limit[fork.src]
            self._may_draft[fork.dst] = self._may_draft[fork.src]
            if self._controller is not None:
                self._controller.copy(fork.src, fork.dst)

    def finish_step(
        self, output: SchedulerOutput, table: DeviceTable, num_sampled: np.ndarray, failed: Mapping[int, str]
    ) -> dict[int, np.ndarray]:
        """Learn from the step's results and return the drafts for the next one, by row: int32 [k], k at least 1.

        num_sampled: int32 [num_samples], tokens of each sample row, which are in `table`.   failed: rows without token.
        """
        step, now_s = self._step, self._now()
        self._learn(output, num_sampled, now_s - step.begin_s)
        rows = output.sample_rows
        goes_on = self._may_draft[rows] & (num_sampled > 0)
        rows = rows[goes_on & (table.num_tokens[rows] < self._length_limit[rows])]
        if failed:
            rows = rows[~np.isin(rows, np.fromiter(failed, np.int32, len(failed)))]
        if output.step > self.no_drafts_until:
            drafts = self._draft(table, rows) if rows.size else {}
            has_drafts = bool(drafts)
        else:
            drafts, has_drafts = {}, rows.size > 0 and self._would_draft(table, rows)
        self._num_fruitless = 0 if has_drafts else self._num_fruitless + 1
        if self._num_fruitless >= _PATIENCE:
            self.no_drafts_until = output.step + self._num_steps_ahead
        step.end_s = self._now()
        step.draft_s = step.end_s - now_s
        return drafts

    def _learn(self, output: SchedulerOutput, num_sampled: np.ndarray, duration_s: float) -> None:
        controller, drafts, step = self._controller, output.drafts, self._step
        if controller is None:
            return
        if drafts:
            for row, emitted in zip(output.sample_rows.tolist(), num_sampled.tolist(), strict=True):
                if row in drafts and emitted:
                    grade = self._grades.get(row, 0)
                    controller.observe_draft(row, grade, len(drafts[row]), min(emitted - 1, len(drafts[row])))
        num_rows = len(output.rows)
        num_drafts = sum(len(tokens) for tokens in drafts.values())
        decodes_only = len(num_sampled) == num_rows and output.total_num_scheduled_tokens == num_rows + num_drafts
        if not decodes_only or output.admitted:
            return
        is_busy = step.gap_s < _SAME_BUSY_PERIOD * duration_s
        before_s = step.draft_s + step.gap_s if is_busy else step.draft_s
        controller.observe_step(num_rows, num_drafts, int(num_sampled.sum()), duration_s + before_s, step.draft_s)

    def _would_draft(self, table: DeviceTable, rows: np.ndarray) -> bool:
        """Return whether there would be drafts after this step, which was promised to have none.

        A drafter that runs a model finds some whenever it is asked.
        """
        most = self._most_drafts(table, rows)
        asked = np.flatnonzero(most > 0)
        if not asked.size or self._drafter.runs_model:
            return asked.size > 0
        return any(len(draft.tokens) for draft in self._drafter.propose(table, rows[asked], most[asked]))

    def _most_drafts(self, table: DeviceTable, rows: np.ndarray) -> np.ndarray:
        """Return how many tokens to draft for each of `rows`, int32 [num_rows]."""
        # A step with k drafts samples up to k + 1 tokens.
        room = np.maximum(self._length_limit[rows] - table.num_tokens[rows] - 1, 0).astype(np.int32)
        if self._controller is None:
            return np.minimum(room, self._max_drafts)
        return self._controller.plan(rows, room)

    def _draft(self, table: DeviceTable, rows: np.ndarray) -> dict[int, np.ndarray]:
        controller = self._controller
        most = self._most_drafts(table, rows)
        asked = np.flatnonzero(most > 0)
        if not asked.size:
            return {}
        begin_s = self._now()
        found = self._drafter.propose(table, rows[asked], most[asked])
        lengths = np.array([len(draft.tokens) for draft in found], np.int32)
        if controller is not None:
            controller.observe_drafting(int(lengths.sum()), self._now() - begin_s)
            of_all, grades = np.zeros(len(rows), np.int32), np.zeros(len(rows), np.int32)
            of_all[asked] = lengths
            grades[asked] = [draft.grade for draft in found]
            lengths = controller.trim(rows, of_all, grades)[asked]
        self._grades.clear()
        drafts: dict[int, np.ndarray] = {}
        for row, draft, length in zip(rows[asked].tolist(), found, lengths.tolist(), strict=True):
            if length:
                drafts[row] = draft.tokens[:length]
                self._grades[row] = draft.grade
        return drafts
