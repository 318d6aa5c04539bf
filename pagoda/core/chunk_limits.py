"""Chunk limits: what shortens the chunk that a row computes in a step. To add one, write a class and list it in
make_chunk_limits."""

from collections.abc import Sized
from dataclasses import dataclass

from pagoda.base.config import SchedulerConfig, SchedulingMode
from pagoda.core.decision_log import Reason
from pagoda.core.request import RequestState, RequestStatus
from pagoda.core.request_table import RequestTable
from pagoda.core.running_batch import RunningBatch
from pagoda.core.step_plan import StepPlan


class ChunkLimit:
    """Shortens chunks: `narrow` once per step, for all rows; `fit` for one chunk. This one shortens nothing.

    reason: why a request waits of which `fit` leaves nothing.
    """

    reason = Reason.BUDGET

    @property
    def acts_on_rows(self) -> bool:
        """Whether `fit` must be asked for running rows one by one. The budget and the cap need not: numpy does it."""
        return False

    def narrow(self, plan: StepPlan) -> None:
        """Lower the step's budget, or the cap of each row."""

    def fit(self, plan: StepPlan, request: RequestState, row: int, start: int, num_new: int) -> int:
        """Return how many of `num_new` tokens from `start` may be computed. row: -1 for a request that would enter."""
        return num_new

    def commit(self, plan: StepPlan, request: RequestState, row: int) -> None:
        """The chunk that `fit` was asked for is placed. A limit that keeps track overrides this, `release`, `enter`."""

    def release(self, request: RequestState) -> None:
        """The chunk is not placed after all, or the request left the running batch."""

    def enter(self, request: RequestState, row: int) -> None:
        """The request computes its prompt in `row`."""


@dataclass(frozen=True, slots=True, eq=False)
class LongPromptCap(ChunkLimit):
    """`long_prefill_token_threshold` tokens per row. A request that is alone delays no other, and is not capped."""

    threshold: int
    requests: Sized

    def narrow(self, plan: StepPlan) -> None:
        if len(self.requests) > 1:
            plan.row_cap = self.threshold


@dataclass(frozen=True, slots=True, eq=False)
class PrefillBesideDecodes(ChunkLimit):
    """At most `share` tokens of prompts, all together, in a step in which anything decodes."""

    share: int
    num_speculative_tokens: int
    batch: RunningBatch
    table: RequestTable

    def narrow(self, plan: StepPlan) -> None:
        num_decodes = len(self.batch.running.rows) - len(self.batch.prefilling)
        if not num_decodes:
            return
        # Decodes take what they want of this budget wherever they are in the running order: the cap keeps prompts
        # before them from it.
        num_drafts = sum(len(drafts) for drafts in self.table.drafts.values())
        plan.budget = min(plan.budget, num_decodes + num_drafts + self.share)
        plan.row_cap = min(plan.row_cap or self.share, max(self.share, 1 + self.num_speculative_tokens))


class RowCap(ChunkLimit):
    """What `narrow` left for each row."""

    def fit(self, plan: StepPlan, request: RequestState, row: int, start: int, num_new: int) -> int:
        return min(num_new, plan.row_cap) if plan.row_cap else num_new


@dataclass(frozen=True, slots=True, eq=False)
class Budget(ChunkLimit):
    """What is left of the step's tokens. A prompt that must not be cut gets all it needs, or nothing."""

    config: SchedulerConfig

    def fit(self, plan: StepPlan, request: RequestState, row: int, start: int, num_new: int) -> int:
        if num_new <= plan.budget:
            return num_new
        return plan.budget if self._may_cut(request, start + num_new) else 0

    def _may_cut(self, request: RequestState, num_tokens: int) -> bool:
        """Prompts are cut in mixed mode only; but a phased engine must cut what outgrew a step before a preemption."""
        if request.status is RequestStatus.RUNNING:
            return True
        if self.config.scheduling_mode is SchedulingMode.MIXED:
            return self.config.enable_chunked_prefill
        return request.num_preemptions > 0 and num_tokens > self.config.max_num_batched_tokens


class ChunkLimits:
    """All chunk limits, in the order in which they are asked."""

    def __init__(self, limits: list[ChunkLimit]) -> None:
        self._limits = limits
        self._narrowing = [limit for limit in limits if type(limit).narrow is not ChunkLimit.narrow]
        self._on_rows = [limit for limit in limits if type(limit).acts_on_rows is not ChunkLimit.acts_on_rows]
        self._following = [limit for limit in limits if type(limit).commit is not ChunkLimit.commit]
        self.last_reason = Reason.BUDGET

    @property
    def act_on_rows(self) -> bool:
        """Whether running rows must be planned one by one."""
        return any(limit.acts_on_rows for limit in self._on_rows)

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

    def commit(self, plan: StepPlan, request: RequestState, row: int) -> None:
        for limit in self._following:
            limit.commit(plan, request, row)

    def release(self, request: RequestState) -> None:
        for limit in self._following:
            limit.release(request)

    def enter(self, request: RequestState, row: int) -> None:
        for limit in self._following:
            limit.enter(request, row)


def make_chunk_limits(
    config: SchedulerConfig, requests: Sized, batch: RunningBatch, table: RequestTable, encoder: ChunkLimit
) -> ChunkLimits:
    """Return the limits that the settings call for. requests: all that have not ended."""
    limits: list[ChunkLimit] = []
    mixed = config.scheduling_mode is SchedulingMode.MIXED  # phased prompts are never cut
    if mixed and config.long_prefill_token_threshold:
        limits.append(LongPromptCap(config.long_prefill_token_threshold, requests))
    if mixed and config.prefill_beside_decodes:
        limits.append(PrefillBesideDecodes(config.prefill_beside_decodes, config.num_speculative_tokens, batch, table))
    return ChunkLimits([*limits, RowCap(), Budget(config), encoder])
