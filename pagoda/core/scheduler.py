"""Scheduler: which requests run in the next step, with how many tokens, in which blocks.

    mixed    run running -> resume swapped (unless something was preempted) -> admit waiting
    phased   admit whole prompts (unless something is swapped) -> run running (unless one entered) -> resume swapped
    both     -> advance the counts -> fork and join -> build the output, with block moves and notices

planning.py and finishing.py have these moves; the results are applied by committing.py.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from pagoda.base.clock import Clock
from pagoda.base.config import CacheConfig
from pagoda.core.committing import commit, commit_failure, with_events
from pagoda.core.decision_log import DecisionLog
from pagoda.core.events import Fold
from pagoda.core.finishing import finish_plan
from pagoda.core.kv import KVGroupSpec, KVTier
from pagoda.core.lifecycle import add_request, end_reasons, finish_all, finish_one, queue_all_anew
from pagoda.core.planning import admit_waiting, resume_swapped, run_running
from pagoda.core.preemption import preempt_all
from pagoda.core.request import NEW, Progress, Request, RequestKey, RequestState, RequestStatus
from pagoda.core.rules import narrow_budgets
from pagoda.core.scheduler_interface import SchedulerInterface
from pagoda.core.scheduler_options import SchedulerOptions
from pagoda.core.scheduler_output import EngineCoreOutputs, ModelRunnerOutput, SchedulerOutput
from pagoda.core.state import Preparations, SchedulerState
from pagoda.core.stats import SchedulerStats
from pagoda.core.step_plan import StepPlan
from pagoda.core.view import SchedulerView, view_of


class Scheduler(SchedulerInterface):
    """Plans steps and applies their results. Single-threaded; every call leaves the contract's invariants whole.

    num_blocks: usable device blocks; block 0 is one more, the null block.
    num_host_blocks: blocks of the swap pool, with ids from 0.
    encoder_decoder: a request's encoder input is run in its first step and read through cross-attention tables.
    preparations: of grammars and adapters, for which requests wait. None: no request needs any.
    tier: keeps full blocks outside of the pool; None: nothing does.
    max_rows: capacity of the row table; workers size theirs by it.
    """

    def __init__(
        self,
        config: SchedulerOptions,
        cache: CacheConfig,
        kv_groups: tuple[KVGroupSpec, ...],
        num_blocks: int,
        max_model_len: int,
        clock: Clock,
        num_host_blocks: int = 0,
        encoder_decoder: bool = False,
        preparations: Preparations | None = None,
        tier: KVTier | None = None,
    ) -> None:
        self.config = config
        self.max_model_len = max_model_len
        self.max_rows = config.max_rows
        sizes = num_blocks, max_model_len, clock, num_host_blocks
        self._state = SchedulerState(config, cache, kv_groups, *sizes, encoder_decoder, preparations, tier)

    # Requests come and go

    def add_request(self, request: Request, progress: Progress = NEW) -> None:
        add_request(self._state, request, progress)

    def finish_requests(
        self, keys: Iterable[RequestKey], status: RequestStatus = RequestStatus.FINISHED_ABORTED
    ) -> None:
        for key in tuple(keys):
            request = self._state.requests.get(key)
            if request is not None:
                finish_all(self._state, request, status)

    def finish_sequence(
        self, key: RequestKey, index: int, status: RequestStatus = RequestStatus.FINISHED_STOPPED
    ) -> None:
        request = self._state.requests.get(key)
        if request is not None and index < len(request.sequences) and not request.sequences[index].is_finished:
            finish_one(self._state, request.sequences[index], status)

    # Steps

    def schedule(self) -> SchedulerOutput:
        state, config = self._state, self.config
        state.num_steps += 1
        state.events.step = state.num_steps
        plan = StepPlan(state.num_steps, config.max_num_batched_tokens, config.encoder_budget, state.clock.now())
        if state.preparations is not None:
            for key in state.preparations.take_woken():
                state.waiting.wake(key)
                state.swapped.wake(key)
        for key in state.kv.transfers.take_woken(plan.now_s):
            state.waiting.wake(key)
        state.kv.pools.end_pins(plan.now_s)
        narrow_budgets(state, plan)
        if state.is_phased:
            _plan_phased(state, plan)
        else:
            _plan_mixed(state, plan)
        end_reasons(state)
        output = finish_plan(state, plan)
        if not output.is_empty:
            state.in_flight.opened(output, plan.now_s if plan.has_prompts else None)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_output: ModelRunnerOutput | None
    ) -> dict[int, EngineCoreOutputs]:
        if scheduler_output.is_empty:
            if model_output is not None:  # it may have copied blocks
                self._state.costs.observe(scheduler_output, model_output)
            return with_events(self._state, {})
        if model_output is None:
            raise ValueError(
                f"step {scheduler_output.step} computes {scheduler_output.total_num_scheduled_tokens} tokens: "
                "update_from_output needs its ModelRunnerOutput, not None"
            )
        outputs = commit(self._state, scheduler_output, model_output)
        if model_output.drafts:
            self._offer_drafts(model_output.drafts)
        if self.config.check_invariants:
            self.check()
        return outputs

    def fail_step(self, scheduler_output: SchedulerOutput, message: str) -> dict[int, EngineCoreOutputs]:
        if scheduler_output.is_empty:
            return with_events(self._state, {})
        outputs = commit_failure(self._state, scheduler_output, message)
        if self.config.check_invariants:
            self.check()
        return outputs

    def update_draft_token_ids(self, drafts: Mapping[tuple[RequestKey, int], Sequence[int]]) -> None:
        """Offer draft tokens to verify in the next step, by request and sequence.

        Drafts for a row that is mid-prefill, or whose last token is still in flight, are dropped: they would not fit.
        Those for beams are dropped, too.
        """
        by_row: dict[int, Sequence[int] | np.ndarray] = {}
        for (key, index), tokens in drafts.items():
            request = self._state.requests.get(key)
            if request is not None:
                by_row[request.sequences[index].row] = tokens
        self._offer_drafts(by_row)

    def _offer_drafts(self, drafts: Mapping[int, Sequence[int] | np.ndarray]) -> None:
        """`update_draft_token_ids` by row; rows without a running sequence are ignored."""
        for row, tokens in drafts.items():
            sequence = self._state.table.sequence_of[row] if row >= 0 else None
            if sequence is not None and sequence.row == row:
                self._state.drafts.offer(row, () if row in self._state.batch.prefilling else tokens)
        self._state.batch.changed(rows=False)

    # Questions

    def has_unfinished_requests(self) -> bool:
        return bool(self._state.requests)

    def get_request_counts(self) -> tuple[int, int]:
        """Return (running, waiting); swapped requests count as waiting."""
        return len(self._state.batch.requests), len(self._state.waiting) + len(self._state.swapped)

    def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        if preempt_running:
            preempt_all(self._state)
        return self._state.kv.prefix_cache.reset()

    def start_over(self, *, requeue: bool = False) -> list[RequestState] | None:
        if self._state.in_flight.outputs or self._state.kv.transfers or (self._state.requests and not requeue):
            return None
        requests = queue_all_anew(self._state)
        self._state.start_over()
        self._state.events.step = self._state.num_steps  # the last result that was applied may be of one before
        return requests

    def subscribe(self, fold: Fold, *, cache: bool = False) -> Callable[[], None]:
        return self._state.events.subscribe(fold, cache=cache)

    def make_stats(self) -> SchedulerStats:
        state = self._state
        loras = [request.spec.lora for request in state.batch.requests.values()]
        return replace(
            state.stats,
            accepted_tokens_per_pos=state.stats.accepted_tokens_per_pos.copy(),
            num_running=len(state.batch.requests),
            num_waiting=len(state.waiting),
            num_deferred=state.waiting.num_deferred(state.batch.has_room_for_adapter),
            num_swapped=len(state.swapped),
            num_blocks=state.kv.num_blocks[0],
            num_free_blocks=state.kv.pools.num_free[0],
            num_states=sum(state.kv.num_blocks[1:]),
            num_free_states=sum(state.kv.pools.num_free[1:]),
            num_free_host_blocks=state.kv.host.pools.num_free[0],
            running_adapters=tuple(sorted({lora.name for lora in loras if lora is not None})),
            num_tier_stored=state.kv.transfers.num_stored,
            num_tier_lost=state.kv.transfers.num_lost,
            waiting_adapters=tuple(sorted(state.waiting.adapter_names() | state.swapped.adapter_names())),
        )

    def view(self) -> SchedulerView:
        return view_of(self._state)

    @property
    def explain(self) -> DecisionLog:
        return self._state.log

    def running_ids(self) -> list[str]:
        """Return ids in order of admission."""
        return [request.spec.request_id for request in self._state.batch.requests.values()]

    def waiting_ids(self) -> list[str]:
        """Return ids in queue order."""
        return [request.spec.request_id for request in self._state.waiting]

    def swapped_ids(self) -> list[str]:
        """Return ids in queue order."""
        return [request.spec.request_id for request in self._state.swapped]

    def num_computed_tokens(self, key: RequestKey) -> list[int]:
        """Return the count of each unfinished sequence that has been started (one entry before the fork)."""
        request = self._state.requests[key]
        started = [one for one in request.unfinished if one.row >= 0 or not request.awaiting_fork]
        counts = self._state.table.num_computed
        return [int(counts[one.row]) if one.row >= 0 else one.num_computed for one in started or request.unfinished[:1]]

    def num_blocks_held(self, key: RequestKey) -> list[int]:
        """Return distinct device blocks that the request references, per KV group, without the null block."""
        return self._state.kv.num_blocks_held(self._state.requests[key].rows)

    def check(self) -> None:
        """Check the contract's invariants. Raises InvariantBroken."""
        self._state.check()


def _plan_mixed(state: SchedulerState, plan: StepPlan) -> None:
    if state.batch.requests:
        run_running(state, plan)
    if plan.preempted or (state.swapped and not resume_swapped(state, plan)):
        return
    if state.waiting.peek():
        admit_waiting(state, plan)


def _plan_phased(state: SchedulerState, plan: StepPlan) -> None:
    if state.waiting.peek() and not state.swapped:
        admit_waiting(state, plan)
    if not plan.num_scheduled:
        if state.batch.requests:
            run_running(state, plan)
        if state.swapped and not plan.preempted:
            resume_swapped(state, plan)
