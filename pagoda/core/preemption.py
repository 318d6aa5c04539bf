"""Preemption: which request leaves the running batch when blocks run out, and whether its KV is dropped or swapped."""

from collections.abc import Callable

from pagoda.base.config import PreemptionMode
from pagoda.core.cost_model import CostModel, RowWork
from pagoda.core.kv import exceeds
from pagoda.core.lifecycle import lost_with, requeue, swap_out
from pagoda.core.request import Reason, RequestState, RequestStatus
from pagoda.core.rules import find_prefix
from pagoda.core.state import SchedulerState
from pagoda.core.step_plan import StepPlan

_NO_ROOM = (Reason.NUM_SEQS, Reason.BLOCKS, Reason.WATERMARK)
"""What a preemption can mend."""

PreemptionRule = Callable[[RequestState, RowWork, int, CostModel], bool]
"""(request, work to compute again without a swap, blocks to swap, costs) -> whether to swap, if the host has room."""

PREEMPTION_RULES: dict[PreemptionMode, PreemptionRule] = {
    # While more than one sequence is unfinished: recomputing would compute each of them.
    PreemptionMode.AUTO: lambda request, lost, num_blocks, costs: len(request.unfinished) > 1,
    PreemptionMode.RECOMPUTE: lambda request, lost, num_blocks, costs: False,
    PreemptionMode.SWAP: lambda request, lost, num_blocks, costs: True,
    PreemptionMode.COST: lambda request, lost, num_blocks, costs: costs.swap_is_cheaper(lost, num_blocks),
}


def next_victim(state: SchedulerState) -> RequestState:
    """Return the running request to preempt next."""
    return state.policy.victim(state.batch.requests.values())


def preempt(state: SchedulerState, victim: RequestState, plan: StepPlan, for_request: RequestState) -> None:
    """Take `victim` out of the batch and out of the step; its KV is dropped or swapped out."""
    for sequence in [sequence for sequence in victim.sequences if sequence.row >= 0]:
        plan.unplan_row(sequence.row)
        state.encoder.unplan_runs(plan, sequence)
        state.kv.prefix_cache.uncache_uncomputed(sequence.row)
    leave = swap_out if _swaps(state, victim) else requeue
    leave(state, victim, for_request)
    plan.preempted.append(victim)


def _swaps(state: SchedulerState, victim: RequestState) -> bool:
    """Whether to swap. Not what would lose encoder outputs, nor a request whose sequences do not all have rows.

    Nor beams with states: one that is swapped while in flight computes its last token again, and states do not go back.
    """
    rows, is_search = victim.rows, victim.spec.is_beam_search
    if (
        any(row in state.batch.leaders for row in rows)
        or (is_search and victim not in state.searches)  # its rows may share the slot they write
        or (is_search and state.kv.sizing.has_states)
        or any(state.encoder.has_media_ahead(row) for row in rows)
        or not state.kv.sizing.groups
    ):
        return False
    num_blocks = state.kv.host.blocks_to_swap_out(rows)
    prefers_swap = PREEMPTION_RULES[state.config.preemption_mode]
    has_room = not exceeds(num_blocks, state.kv.host.pools.num_free)
    return has_room and prefers_swap(victim, _computed_again(state, victim), sum(num_blocks), state.costs)


def _computed_again(state: SchedulerState, victim: RequestState) -> RowWork:
    """Return what it would have to compute: what it loses, but for leading blocks that others keep in the cache."""
    lost, start = lost_with(state, victim), 0
    if victim.spec.reads_prefix_cache:
        start = state.kv.num_kept_without(victim.rows)
    first, end = lost.start.copy(), int(lost.num_new[0])
    first[0] = start
    num_encoded = state.encoder.num_not_cached(victim.spec, start, end)
    return RowWork(first, lost.start + lost.num_new - first, num_encoded)


def preempt_for(state: SchedulerState, head: RequestState, plan: StepPlan, reason: Reason) -> bool:
    """Preempt the policy's victim if `head`, held back for `reason`, outranks it. Return whether it was done.

    Preempt nothing if `head` would not fit even without every request it outranks.
    """
    if not state.config.evict_for_priority or plan.entering or not state.batch.requests:
        return False  # a request that entered in this step may use blocks that a running row fills in it
    if reason not in _NO_ROOM:
        return False
    worst = next_victim(state)
    if not state.policy.outranks(head, worst):
        return False  # most heads, in every step in which they wait: what else runs is not looked at
    outranked = [request for request in state.batch.requests.values() if state.policy.outranks(head, request)]
    if not _has_room_without(state, outranked, head, plan):
        return False
    preempt(state, worst, plan, head)
    return True


def _has_room_without(state: SchedulerState, leaving: list[RequestState], head: RequestState, plan: StepPlan) -> bool:
    """Whether `head` would find sequences and blocks, for one token at least, if these requests did not run."""
    num_left = state.batch.num_seqs - sum(len(request.unfinished) for request in leaving)
    if num_left + len(head.unfinished) > state.config.max_num_seqs:
        return False
    prefix = find_prefix(state, head, plan)
    freed = state.kv.num_freed_with([row for request in leaving for row in request.rows], prefix)
    others_run = len(leaving) < len(state.batch.requests)
    return state.kv.why_no_blocks(head, prefix, 1, others_run=others_run, num_freed=freed) is None


def preempt_all(state: SchedulerState) -> None:
    """Take all running requests out, newest first, so that the queue keeps their order. Tokens in flight are lost.

    Blocks that are being loaded are given up, too.
    """
    for request in reversed(list(state.batch.requests.values())):
        recompute(state, request)
    for key in list(state.kv.transfers.keys()):
        state.kv.transfers.forget(key)
        state.waiting.wake(key)


def recompute(state: SchedulerState, request: RequestState) -> None:
    """Take the request out with all its KV, wherever that is. Its tokens in flight are lost."""
    if request.status in (RequestStatus.RUNNING, RequestStatus.SWAPPED):
        requeue(state, request)
    state.table.drop_late_results(request)
    state.waiting.wake(request.key)
