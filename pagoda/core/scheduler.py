"""Scheduler: which requests run in the next step, with how many tokens, in which blocks.

    mixed    run running -> resume swapped (unless something was preempted) -> admit waiting
    phased   admit whole prompts (unless something is swapped) -> run running (unless one entered) -> resume swapped
    both     -> advance the counts -> fork and join -> drain notifications and block moves -> build the output

planning.py has these moves; the results are applied by committing.py.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from pagoda.base.clock import Clock
from pagoda.base.config import CacheConfig
from pagoda.core.committing import commit, commit_failure, with_events
from pagoda.core.decision_log import DecisionLog
from pagoda.core.events import Fold
from pagoda.core.kv import KVGroupSpec
from pagoda.core.lifecycle import add_request, finish_all, finish_one
from pagoda.core.planning import admit_waiting, finish_plan, resume_swapped, run_running
from pagoda.core.preemption import preempt_all
from pagoda.core.request import Request, RequestStatus
from pagoda.core.rules import narrow_budgets
from pagoda.core.scheduler_options import SchedulerOptions
from pagoda.core.scheduler_output import EngineCoreOutputs, ModelRunnerOutput, SchedulerOutput
from pagoda.core.state import Preparations, SchedulerState
from pagoda.core.stats import SchedulerStats
from pagoda.core.step_plan import StepPlan
from pagoda.core.view import SchedulerView, view_of


class Scheduler:
    """Plans steps and applies their results. Single-threaded; every call leaves the contract's invariants whole.

    num_blocks: usable device blocks; block 0 is one more, the null block.
    num_host_blocks: blocks of the swap pool, with ids from 0.
    encoder_decoder: a request's encoder input is run in its first step and read through cross-attention tables.
    preparations: of grammars and adapters, for which requests wait. None: no request needs any.
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
    ) -> None:
        self.config = config
        self.max_model_len = max_model_len
        self.max_rows = config.max_rows
        self._state = SchedulerState(
            config, cache, kv_groups, num_blocks, max_model_len, clock, num_host_blocks, encoder_decoder, preparations
        )

    # Requests come and go

    def add_request(self, request: Request) -> None:
        """Add `request` to the waiting queue.

        Raises RequestError for an id that is in use, or what no engine of this size can serve.
        """
        add_request(self._state, request)

    def finish_requests(
        self, request_ids: str | Iterable[str], status: RequestStatus = RequestStatus.FINISHED_ABORTED
    ) -> None:
        """End requests in whatever queue they are; ids that have ended are ignored.

        Blocks are free at once: steps in flight run before any step that could reuse them.
        """
        for request_id in (request_ids,) if isinstance(request_ids, str) else tuple(request_ids):
            request = self._state.requests.get(request_id)
            if request is not None:
                finish_all(self._state, request, status)

    def finish_sequence(
        self, request_id: str, index: int, status: RequestStatus = RequestStatus.FINISHED_STOPPED
    ) -> None:
        """End one sequence (a stop string was found in its text); the others continue. Nothing, if it has ended.

        A beam search ends as a whole.
        """
        request = self._state.requests.get(request_id)
        if request is not None and index < len(request.sequences) and not request.sequences[index].is_finished:
            finish_one(self._state, request.sequences[index], status)

    # Steps

    def schedule(self) -> SchedulerOutput:
        """Plan the next step. Changes state: called again before the result is back, it plans the step after."""
        state, config = self._state, self.config
        state.num_steps += 1
        state.events.step = state.num_steps
        plan = StepPlan(state.num_steps, config.max_num_batched_tokens, config.encoder_budget, state.clock.now())
        if state.preparations is not None:
            for request_id in state.preparations.take_woken():
                state.waiting.wake(request_id)
                state.swapped.wake(request_id)
        narrow_budgets(state, plan)
        if state.is_phased:
            _plan_phased(state, plan)
        else:
            _plan_mixed(state, plan)
        finish_plan(state, plan)
        output = plan.build_output()
        if not output.is_empty:
            state.in_flight.opened(output, plan.now_s if plan.has_prompts else None)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_output: ModelRunnerOutput | None
    ) -> dict[int, EngineCoreOutputs]:
        """Apply the result of a step, in the order of planning. Return what each client gets.

        Of a step with nothing to compute, `model_output` may be None; requests that ended while it was planned are
        still returned.
        """
        if scheduler_output.is_empty:
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
        """Apply that a step raised, in the order of planning. Its sequences end with ERROR and `message`.

        Its events (block moves, rows) must have been applied. Requests that depend on its results in steps that were
        planned after it are computed again.
        """
        if scheduler_output.is_empty:
            return with_events(self._state, {})
        outputs = commit_failure(self._state, scheduler_output, message)
        if self.config.check_invariants:
            self.check()
        return outputs

    def update_draft_token_ids(self, drafts: Mapping[str | tuple[str, int], Sequence[int]]) -> None:
        """Offer draft tokens to verify in the next step, by request id (its first sequence) or (request id, sequence).

        Drafts for a row that is mid-prefill, or whose last token is still in flight, are dropped: they would not fit.
        Those for beams are dropped, too.
        """
        by_row: dict[int, Sequence[int] | np.ndarray] = {}
        for key, tokens in drafts.items():
            request_id, index = (key, 0) if isinstance(key, str) else key
            request = self._state.requests.get(request_id)
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
        """Forget the content of all device blocks. Return False while any is in use.

        preempt_running: preempt all running requests first. Their tokens in flight are dropped when they come back, so
        that the next step may compute them again.
        Swapped requests keep their KV in host memory; its full blocks are cached again when they come back.
        """
        if preempt_running:
            preempt_all(self._state)
        return self._state.kv.reset()

    def start_over(self) -> bool:
        """Forget all that was cached or learnt, so that the next steps are planned as by a new scheduler.

        Return False, with nothing changed, while a request is unfinished or a step in flight. Totals, events and the
        numbers of steps go on.
        """
        if self._state.requests or self._state.in_flight.outputs:
            return False
        self._state.start_over()
        return True

    def subscribe(self, fold: Fold, *, cache: bool = False) -> Callable[[], None]:
        """Give `fold` every event from now on, with `cache` also those of the prefix cache. Return what ends that.

        It is called while a step is planned or applied: it must neither raise, take long, nor call the scheduler.
        """
        return self._state.events.subscribe(fold, cache=cache)

    def make_stats(self) -> SchedulerStats:
        """Return gauges and totals."""
        state = self._state
        loras = [request.spec.lora for request in state.batch.requests.values()]
        return replace(
            state.stats,
            accepted_tokens_per_pos=state.stats.accepted_tokens_per_pos.copy(),
            num_running=len(state.batch.requests),
            num_waiting=len(state.waiting),
            num_swapped=len(state.swapped),
            num_blocks=state.kv.num_blocks,
            num_free_blocks=state.kv.num_free_blocks,
            num_free_host_blocks=state.kv.num_free_host_blocks,
            running_adapters=tuple(sorted({lora.name for lora in loras if lora is not None})),
            waiting_adapters=tuple(sorted(state.waiting.adapter_names() | state.swapped.adapter_names())),
        )

    def view(self) -> SchedulerView:
        """Return what runs now and who has which blocks, for people who look."""
        return view_of(self._state)

    @property
    def explain(self) -> DecisionLog:
        """What happened in the last steps (`decision_log_steps` of them), and why requests wait."""
        return self._state.log

    @property
    def num_free_blocks(self) -> int:
        return self._state.kv.num_free_blocks

    @property
    def num_free_host_blocks(self) -> int:
        return self._state.kv.num_free_host_blocks

    def running_ids(self) -> list[str]:
        """Return ids in order of admission."""
        return list(self._state.batch.requests)

    def waiting_ids(self) -> list[str]:
        """Return ids in queue order."""
        return [request.request_id for request in self._state.waiting]

    def swapped_ids(self) -> list[str]:
        """Return ids in queue order."""
        return [request.request_id for request in self._state.swapped]

    def num_computed_tokens(self, request_id: str) -> list[int]:
        """Return the count of each unfinished sequence that has been started (one entry before the fork)."""
        request = self._state.requests[request_id]
        started = [one for one in request.unfinished if one.row >= 0 or not request.awaiting_fork]
        counts = self._state.table.num_computed
        return [int(counts[one.row]) if one.row >= 0 else one.num_computed for one in started or request.unfinished[:1]]

    def num_blocks_held(self, request_id: str) -> list[int]:
        """Return distinct device blocks that the request references, per KV group, without the null block."""
        return self._state.kv.num_blocks_held(self._state.requests[request_id].rows)

    def check(self) -> None:
        """Check the contract's invariants. Raises InvariantBroken."""
        self._state.check()


def _plan_mixed(state: SchedulerState, plan: StepPlan) -> None:
    if state.batch.requests:
        run_running(state, plan)
    if plan.preempted or (state.swapped and not resume_swapped(state, plan)):
        return
    if state.waiting.peek() and plan.budget > 0:
        admit_waiting(state, plan)


def _plan_phased(state: SchedulerState, plan: StepPlan) -> None:
    if state.waiting.peek() and not state.swapped:
        admit_waiting(state, plan)
    if plan.is_empty:
        if state.batch.requests:
            run_running(state, plan)
        if state.swapped and not plan.preempted:
            resume_swapped(state, plan)
