"""Chunk limits: what shortens the chunk that a row computes in a step. To add one, write a class and list it in
make_chunk_limits."""

from collections.abc import Sized
from dataclasses import dataclass

import numpy as np

from pagoda.base.config import SchedulingMode
from pagoda.core.decision_log import Reason
from pagoda.core.drafts import Drafts
from pagoda.core.request import RequestStatus
from pagoda.core.request_state import RequestState
from pagoda.core.request_table import RequestTable
from pagoda.core.running_batch import RunningBatch
from pagoda.core.scheduler_options import SchedulerOptions
from pagoda.core.step_plan import StepPlan


class ChunkLimit:
    """Shortens chunks: `narrow` once per step, then `fit` for one chunk, or `fit_rows` for all running rows at once.

    This one shortens nothing; a limit overrides the methods that it needs.
    reason: why a request waits if `fit` leaves it no token.
    """

    reason = Reason.BUDGET

    @property
    def must_plan_by_row(self) -> bool:
        """Whether running rows must be planned one by one now: `fit_rows` cannot say what `fit` would."""
        return False

    def narrow(self, plan: StepPlan) -> None:
        """A step is opened: lower its budget, or what its rows may take."""

    def fit(self, plan: StepPlan, request: RequestState, row: int, start: int, num_new: int) -> int:
        """Return how many of `num_new` tokens from `start` may be computed. row: -1 for a request that would enter."""
        return num_new

    def fit_rows(self, plan: StepPlan, rows: np.ndarray, num_new: np.ndarray) -> np.ndarray:
        """`fit` for all running rows, in running order, of which none is placed yet; int32 [num_rows]."""
        return num_new

    def commit(self, plan: StepPlan, request: RequestState, row: int) -> None:
        """The chunk that `fit` was asked for is placed."""

    def commit_rows(self, plan: StepPlan, rows: np.ndarray, num_new: np.ndarray) -> None:
        """The chunks of running rows that `fit_rows` was asked for are placed."""

    def release(self, request: RequestState) -> None:
        """The chunk is not placed after all, or the request left the running batch."""

    def enter(self, request: RequestState, row: int) -> None:
        """The request has a row of its own now, and what it lacks will be computed there."""


@dataclass(frozen=True, slots=True, eq=False)
class LongPromptCap(ChunkLimit):
    """`long_prefill_token_threshold` tokens per row. A request that is alone delays no other, and is not capped.

    Drafts are not prompt tokens: a row gets all of them. whole_items: compute media items above the threshold whole.
    """

    threshold: int
    requests: Sized
    drafts: Drafts
    whole_items: bool

    def narrow(self, plan: StepPlan) -> None:
        plan.row_cap = self.threshold if len(self.requests) > 1 else 0

    def fit(self, plan: StepPlan, request: RequestState, row: int, start: int, num_new: int) -> int:
        if num_new <= plan.row_cap or not plan.row_cap:
            return num_new
        num_drafts = int(self.drafts.num_offered[row]) if row >= 0 else 0
        media = request.facts.media if self.whole_items else ()
        longest_item = max((item.length for item in media if item.offset + item.length > start), default=0)
        return min(num_new, max(plan.row_cap, 1 + num_drafts, longest_item))

    def fit_rows(self, plan: StepPlan, rows: np.ndarray, num_new: np.ndarray) -> np.ndarray:
        if not plan.row_cap:
            return num_new
        return np.minimum(num_new, np.maximum(plan.row_cap, 1 + self.drafts.num_offered[rows]))


@dataclass(frozen=True, slots=True, eq=False)
class PrefillBesideDecodes(ChunkLimit):
    """At most `share` tokens of prompts, all together, in a step in which anything decodes."""

    share: int
    batch: RunningBatch
    drafts: Drafts

    def narrow(self, plan: StepPlan) -> None:
        num_decodes = len(self.batch.running.rows) - len(self.batch.prefilling)
        if num_decodes:
            num_drafts = int(self.drafts.num_offered.sum())
            plan.budget = min(plan.budget, num_decodes + num_drafts + self.share)
            plan.prompt_budget = self.share

    def fit(self, plan: StepPlan, request: RequestState, row: int, start: int, num_new: int) -> int:
        return num_new if self._decodes(plan, row) else min(num_new, plan.prompt_budget or 0)

    def fit_rows(self, plan: StepPlan, rows: np.ndarray, num_new: np.ndarray) -> np.ndarray:
        if plan.prompt_budget is None:
            return num_new
        num_new, prompt_budget = num_new.copy(), plan.prompt_budget
        for i in self._prompts(rows):
            num_new[i] = min(int(num_new[i]), prompt_budget)
            prompt_budget -= int(num_new[i])
        return num_new

    def commit(self, plan: StepPlan, request: RequestState, row: int) -> None:
        if not self._decodes(plan, row):
            plan.take_prompt_tokens(row, plan.placed[row][1])

    def commit_rows(self, plan: StepPlan, rows: np.ndarray, num_new: np.ndarray) -> None:
        if plan.prompt_budget is not None:
            for i in self._prompts(rows):
                plan.take_prompt_tokens(int(rows[i]), int(num_new[i]))

    def _prompts(self, rows: np.ndarray) -> list[int]:
        """Return where prompts are in `rows`."""
        prefilling = self.batch.prefilling
        return np.flatnonzero(np.isin(rows, list(prefilling))).tolist() if prefilling else []

    def _decodes(self, plan: StepPlan, row: int) -> bool:
        """Whether nothing is bounded, or the row was running and lacked its last token only."""
        return plan.prompt_budget is None or (
            row >= 0 and row not in self.batch.prefilling and row not in plan.entering
        )


@dataclass(frozen=True, slots=True, eq=False)
class Budget(ChunkLimit):
    """What is left of the step's tokens. A prompt that must not be cut gets all it needs, or nothing.

    A running prompt leaves one token for each decoding row after it that has siblings, so that they run together.
    """

    config: SchedulerOptions
    table: RequestTable
    batch: RunningBatch
    drafts: Drafts

    def fit(self, plan: StepPlan, request: RequestState, row: int, start: int, num_new: int) -> int:
        budget = plan.budget
        if row >= 0 and row in self.batch.prefilling:
            rows = self.batch.running.rows
            num_wanted = self.drafts.num_wanted(rows, self.table.num_computed[rows])
            budget -= int(self._kept(rows, num_wanted)[int(np.flatnonzero(rows == row)[0]) :].sum())
        if num_new <= budget:
            return num_new
        return budget if self._may_cut(request, start + num_new) else 0

    def fit_rows(self, plan: StepPlan, rows: np.ndarray, num_new: np.ndarray) -> np.ndarray:
        if num_new.sum() <= plan.budget:
            return num_new
        if self.batch.prefilling:
            num_new = self._leave_room(plan.budget, rows, num_new)
        # Earlier rows get what they want; the last one served gets the rest.
        return np.clip(plan.budget - (np.cumsum(num_new) - num_new), 0, num_new)

    def _leave_room(self, budget: int, rows: np.ndarray, num_new: np.ndarray) -> np.ndarray:
        """Cut the chunks of prompts so that later rows with siblings decode."""
        kept = self._kept(rows, num_new)
        kept_after, cut = kept.sum() - np.cumsum(kept), num_new.copy()
        for i in np.flatnonzero(np.isin(rows, list(self.batch.prefilling))).tolist():
            room = budget - int(cut[:i].sum()) - int(kept_after[i])
            cut[i] = min(max(room, 0), int(num_new[i]))
        return cut

    def _kept(self, rows: np.ndarray, num_wanted: np.ndarray) -> np.ndarray:
        """Return the running `rows` for which prompts leave a token; bool [num_rows]."""
        return self.table.have_siblings(rows) & ~np.isin(rows, list(self.batch.prefilling)) & (num_wanted > 0)

    def _may_cut(self, request: RequestState, num_tokens: int) -> bool:
        """Prompts are cut in mixed mode only; but a phased engine must cut what has outgrown a step with its output."""
        if request.status is RequestStatus.RUNNING:
            return True
        if self.config.scheduling_mode is SchedulingMode.MIXED:
            return self.config.enable_chunked_prefill
        return num_tokens > self.config.max_num_batched_tokens


class ChunkLimits:
    """All chunk limits, in the order in which they are asked.

    last_reason: why the last `fit` that left nothing did so.
    """

    def __init__(self, limits: list[ChunkLimit]) -> None:
        self._limits = limits
        self._narrowing = [limit for limit in limits if type(limit).narrow is not ChunkLimit.narrow]  # asked every step
        self.last_reason = Reason.BUDGET

    @property
    def must_plan_by_row(self) -> bool:
        """Whether running rows must be planned one by one."""
        return any(limit.must_plan_by_row for limit in self._limits)

    def narrow(self, plan: StepPlan) -> None:
        for limit in self._narrowing:
            limit.narrow(plan)

    def fit(self, plan: StepPlan, request: RequestState, row: int, start: int, num_new: int) -> int:
        """Return how many of `num_new` tokens may be computed. If none, `last_reason` says why."""
        for limit in self._limits:
            num_new = limit.fit(plan, request, row, start, num_new)
            if num_new <= 0:
                self.last_reason = limit.reason
                return 0
        return num_new

    def fit_rows(self, plan: StepPlan, rows: np.ndarray, num_new: np.ndarray) -> np.ndarray:
        """Return how many of the tokens that each running row lacks may be computed."""
        for limit in self._limits:
            num_new = limit.fit_rows(plan, rows, num_new)
        return num_new

    def place(self, plan: StepPlan, request: RequestState, row: int, start: int, num_new: int) -> None:
        """The row computes the chunk that `fit` was asked for."""
        plan.place(row, start, num_new)
        for limit in self._limits:
            limit.commit(plan, request, row)

    def place_rows(self, plan: StepPlan, rows: np.ndarray, start: np.ndarray, num_new: np.ndarray) -> None:
        """`place` for the running rows that `fit_rows` was asked for."""
        plan.place_bulk(rows, start, num_new, int(num_new.sum()))
        for limit in self._limits:
            limit.commit_rows(plan, rows, num_new)

    def release(self, request: RequestState) -> None:
        for limit in self._limits:
            limit.release(request)

    def enter(self, request: RequestState, row: int) -> None:
        for limit in self._limits:
            limit.enter(request, row)


def make_chunk_limits(
    config: SchedulerOptions,
    requests: Sized,
    batch: RunningBatch,
    drafts: Drafts,
    table: RequestTable,
    encoder: ChunkLimit,
    *,
    whole_items: bool,
) -> ChunkLimits:
    """Return the limits that the settings call for.

    requests: all that have not ended.   whole_items: media items are never split.
    """
    limits: list[ChunkLimit] = []
    cuts_prompts = config.scheduling_mode is SchedulingMode.MIXED and config.enable_chunked_prefill
    if cuts_prompts and config.long_prefill_token_threshold:
        limits.append(LongPromptCap(config.long_prefill_token_threshold, requests, drafts, whole_items))
    if cuts_prompts and config.prefill_beside_decodes:
        limits.append(PrefillBesideDecodes(config.prefill_beside_decodes, batch, drafts))
    return ChunkLimits([*limits, Budget(config, table, batch, drafts), encoder])
