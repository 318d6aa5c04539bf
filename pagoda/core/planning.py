"""The plan side: which rows run in a step, with how many tokens, in which blocks. In the order of a step's outline."""

from collections.abc import Callable
from copy import copy

import numpy as np

from pagoda.base.errors import RequestError
from pagoda.core.cost_model import RowWork
from pagoda.core.events import Admitted
from pagoda.core.kv import CachedPrefix, exceeds
from pagoda.core.lifecycle import finish_all, finish_one, give_row, hold, move_to_running, refuse
from pagoda.core.policy import RequestQueue
from pagoda.core.preemption import next_victim, preempt, preempt_for
from pagoda.core.request import AdmitKind, Reason, RequestState, RequestStatus, Sequence
from pagoda.core.rules import (
    BY_ENCODER,
    MAX_ADAPTER_SKIPS,
    MORE_ROOM,
    block_kinds,
    find_prefix,
    fit_chunk,
    fit_chunks,
    note_limited,
    place_chunk,
    place_chunks,
    why_never,
    why_skipped,
    why_stopped,
)
from pagoda.core.state import SchedulerState
from pagoda.core.step_plan import Chunk, StepPlan

# Running rows


def run_running(state: SchedulerState, plan: StepPlan) -> None:
    """Plan the rows of the running batch, in running order.

    Runs of rows are planned by numpy; a row that lacks blocks, or that needs the encoder, is planned by itself.
    """
    if plan.most_decodes is None and state.batch.plan_steady_step(plan):
        return
    rows = state.batch.running.rows
    while len(rows):
        start = state.table.num_computed[rows]
        num_new, limits = fit_chunks(state, plan, rows, start)
        count = _place_rows(state, plan, rows, start, num_new)
        note_limited(state, rows[:count], limits[:count])
        if count < len(rows):
            _place_row(state, plan, int(rows[count]), int(start[count]), int(num_new[count]), int(limits[count]))
        rows = rows[count + 1 :]
        rows = rows[state.table.is_active[rows]]  # a preemption may have taken some of them out


def _place_rows(state: SchedulerState, plan: StepPlan, rows: np.ndarray, start: np.ndarray, num_new: np.ndarray) -> int:
    """Place the leading rows that need no encoder and find their blocks. Return how many rows that are."""
    count = min(state.encoder.where_media(rows), default=len(rows))
    ends = start + num_new
    is_short = ends > state.kv.tables.reserved_until[rows]
    if state.drafts.offered and state.kv.tables.has_states:
        is_short |= state.drafts.num_offered[rows] > 0
    short = np.flatnonzero((num_new > 0) & is_short)
    short = short[short < count]
    if len(short):
        num_fitting = state.kv.tables.allocate_slots(rows[short], ends[short])
        if num_fitting < len(short):
            count = int(short[num_fitting])
    runs = num_new > 0
    runs[count:] = False
    if not runs.all():
        rows, start, num_new, ends = rows[runs], start[runs], num_new[runs], ends[runs]
    if len(rows):
        place_chunks(state, plan, rows, start, num_new)
        state.drafts.place(plan, rows, ends)
    return count


def _place_row(state: SchedulerState, plan: StepPlan, row: int, start: int, num_new: int, limit: int) -> None:
    """Place one row, after preempting the policy's victim until it fits or is itself preempted."""
    request = state.table.owner(row).request
    chunk = state.encoder.plan_chunk(plan, request, row, start, num_new) if num_new else Chunk(0)
    one = np.array([row], np.int32)
    note_limited(state, one, np.array([limit if chunk.num_new == num_new else BY_ENCODER]))
    if chunk.num_new <= 0:
        return
    end = start + chunk.num_new
    end_of_known = min(end, int(state.table.num_known(row)))
    while not state.kv.tables.allocate_slots(one, np.array([end], np.int32)):
        # It drops its drafts where a preemption would not help, or would cost more: a block of states is a sequence's.
        if end > end_of_known and (len(state.batch.requests) == 1 or state.kv.tables.has_states):
            end = end_of_known
            continue
        if _has_outgrown_pool(state, request, end_of_known):
            if not state.table.num_pending[row]:  # a token in flight still counts: the row ends when that is back
                _end_outgrown(state, plan, state.table.owner(row))
            return
        victim = next_victim(state)
        preempt(state, victim, plan, request)
        if victim is request:
            return
    chunk.num_new = end - start
    place_chunk(state, plan, request, row, start, chunk)
    state.drafts.place(plan, one, np.array([end]))


def _end_outgrown(state: SchedulerState, plan: StepPlan, sequence: Sequence) -> None:
    """End a sequence that the pool cannot hold, with the tokens it has; a beam search ends as a whole."""
    request, rows = sequence.request, set(sequence.request.rows)
    kinds = block_kinds(state.kv.sizing)
    there = " and ".join(f"{count} {kind}" for count, kind in zip(state.kv.num_blocks, kinds, strict=True))
    message = f"the KV cache has {there}: too few for this request to continue; {MORE_ROOM}"
    for other in request.unfinished if request.spec.is_beam_search else [sequence]:
        if other.row >= 0:
            state.encoder.unplan_runs(plan, other)
    finish_one(state, sequence, RequestStatus.FINISHED_LENGTH_CAPPED, message)
    for row in rows.difference(request.rows):
        plan.unplan_row(row)


def _has_outgrown_pool(state: SchedulerState, request: RequestState, end: int) -> bool:
    """No preemption can help: even alone, the row could not continue."""
    if exceeds(state.kv.sizing.blocks_for_request(end, request.spec.encoder_len), state.kv.num_blocks):
        return True
    return len(state.batch.requests) == 1 and len(request.unfinished) > 1 and not state.kv.transfers


def resume_swapped(state: SchedulerState, plan: StepPlan) -> bool:
    """Bring swapped requests back while rules, blocks and budget allow.

    Return False if one of them has to wait: then no waiting request may enter before it.
    """
    return _offer(state, state.swapped, plan, _resume)


def _resume(state: SchedulerState, request: RequestState, plan: StepPlan) -> Reason | None:
    """Bring the request back, or end it if that can never be, or return why it waits."""
    sequences = request.unfinished
    chunks = _divide(state, plan, request)
    if not any(chunk.num_new for chunk in chunks) and any(map(_num_lacking, sequences)):
        return chunks[-1].reason
    ends = [sequence.num_computed + chunk.num_new for sequence, chunk in zip(sequences, chunks, strict=True)]
    running = state.batch.running.rows
    reason = state.kv.why_no_swap_in(sequences, ends, running, plan.ends_of(state.table.num_computed)[running])
    if reason is Reason.NEVER:
        refuse(state, request, "can never come back from host memory")
        return None
    if reason is not None:
        return reason
    kind = move_to_running(state, request)
    for sequence in sequences:
        give_row(state, sequence, sequence.num_computed)
    state.kv.host.swap_in(sequences)
    for sequence, chunk, end in zip(sequences, chunks, ends, strict=True):
        row, start = sequence.row, sequence.num_computed
        plan.entering[row] = kind, start
        state.encoder.add_row(request, row)
        if len(sequence.token_ids) - start > 1:
            state.batch.start_prefill(row)
        if chunk.num_new:
            state.kv.tables.allocate_slots_swapped_in(row, end)
            place_chunk(state, plan, request, row, start, chunk)
    _note_admitted(state, request, kind, None, sum(chunk.num_new for chunk in chunks))
    return None


def _divide(state: SchedulerState, plan: StepPlan, request: RequestState) -> list[Chunk]:
    """Return what each sequence computes in this step of the tokens that it lacks."""
    trial, chunks = copy(plan), list[Chunk]()  # the request may still have to wait
    for sequence in request.unfinished:
        want = min(_num_lacking(sequence), trial.budget)
        chunks.append(fit_chunk(state, trial, request, sequence.num_computed, want))
        trial.spend(chunks[-1].num_new)
    return chunks


def _num_lacking(sequence: Sequence) -> int:
    """Tokens of a sequence without a row that are not computed."""
    return len(sequence.token_ids) - sequence.num_computed


def admit_waiting(state: SchedulerState, plan: StepPlan) -> None:
    """Admit in queue order while rules, blocks and budget allow."""
    _offer(state, state.waiting, plan, _admit)


def _admit(state: SchedulerState, request: RequestState, plan: StepPlan) -> Reason | None:
    """Let the request in, or end it, or return why it waits."""
    prefix = find_prefix(state, request, plan)
    num_lacking = len(request.unfinished[0].token_ids) - prefix.num_tokens
    chunk = fit_chunk(state, plan, request, prefix.num_tokens, num_lacking)
    if chunk.num_new:
        chunk = state.encoder.plan_chunk(plan, request, -1, prefix.num_tokens, chunk.num_new)
    if chunk.num_new == 0:
        state.encoder.cache.drop_all(request)
        return chunk.reason
    reason = state.kv.why_no_blocks(request, prefix, chunk.num_new, others_run=bool(state.batch.requests))
    if reason is None and _waits_for_tier(state, request, prefix, plan):
        reason = Reason.TRANSFER
    if reason is None:
        _enter_with_prefix(state, request, prefix, chunk, plan)
        return None
    state.encoder.cache.drop_all(request)
    if reason is Reason.NEVER:
        refuse(state, request, f"needs more KV blocks than there are; {MORE_ROOM}")
        return None
    return reason


def _waits_for_tier(state: SchedulerState, request: RequestState, prefix: CachedPrefix, plan: StepPlan) -> bool:
    """Begin to load what a tier has of the prompt after `prefix`, if the request then has its first token sooner."""
    transfers = state.kv.transfers
    count = transfers.num_after(request, prefix)
    if not count or state.batch.num_seqs + len(transfers) >= state.config.max_num_seqs:
        return False
    loaded = np.array([[prefix.num_tokens], [count * state.kv.sizing.block_size]])
    compute_s = state.costs.added_s(RowWork(*loaded))
    step_s = state.costs.added_s(RowWork(*plan.arrays()[1:])) if plan.num_scheduled else 0.0
    return transfers.begin(request, prefix, count, compute_s, step_s, plan.now_s)


def _enter_with_prefix(
    state: SchedulerState, request: RequestState, prefix: CachedPrefix, chunk: Chunk, plan: StepPlan
) -> None:
    """All checks passed: take the row and the blocks."""
    start = prefix.num_tokens
    kind = move_to_running(state, request)
    row = give_row(state, request.unfinished[0], start)
    state.kv.tables.allocate_prompt(row, prefix, start + chunk.num_new)
    plan.entering[row] = kind, start
    state.encoder.add_row(request, row)
    place_chunk(state, plan, request, row, start, chunk)
    state.batch.let_siblings_wait(row, request)
    num_cached = None if prefix is state.kv.prefix_cache.nothing else start
    _note_admitted(state, request, kind, num_cached, chunk.num_new)


def _note_admitted(
    state: SchedulerState, request: RequestState, kind: AdmitKind, num_cached: int | None, num_new: int
) -> None:
    """The request entered: what an Admitted event says."""
    entered = [sequence for sequence in request.unfinished if sequence.row >= 0]
    num_tokens = sum([len(sequence.token_ids) for sequence in entered])
    num_computed = sum([int(state.table.num_computed[sequence.row]) for sequence in entered])
    num_blocks = state.kv.tables.num_held(entered[0].row)
    counts = num_tokens, num_cached, num_computed, num_new, num_blocks, state.kv.num_free
    state.events.write(Admitted, request.spec, kind, *counts)


def _offer(
    state: SchedulerState,
    queue: RequestQueue,
    plan: StepPlan,
    offer: Callable[[SchedulerState, RequestState, StepPlan], Reason | None],
) -> bool:
    """Offer the requests of `queue` in order. Return False if one of them has to wait, or no budget is left for it.

    Strict queue order: only requests that `why_skipped` holds back are passed over: with Reason.LORA all of the same
    adapter, for this step; else one, until what it waits for wakes it. So are those whose blocks are being loaded.
    offer: let the request in, or end it, and return None; or return why it waits.
    """
    num_skipped = 0  # adapters
    while (request := queue.peek(num_skipped)) is not None:
        if plan.budget <= 0:
            hold(state, request, queue, Reason.BUDGET)
            return False
        try:
            reason = why_skipped(state, request, queue, plan)
        except RequestError as error:
            finish_all(state, request, RequestStatus.FINISHED_ERROR, str(error))
            continue
        if reason is not None:
            hold(state, request, queue, reason)
            if reason is Reason.LORA:
                num_skipped += 1
                request.num_adapter_skips += 1
                plan.closed_to_adapters |= request.num_adapter_skips > MAX_ADAPTER_SKIPS
            else:
                queue.set_aside(request)
            continue
        may_preempt = queue is state.waiting
        # One that can never run delays no other.
        if may_preempt and not state.table.has_late_results(request):
            never = why_never(state, request)
            if never is not None:
                refuse(state, request, never)
                continue
        reason = why_stopped(state, request, queue, plan) or offer(state, request, plan)
        if reason is Reason.TRANSFER:
            hold(state, request, queue, reason)
            queue.set_aside(request)
            continue
        if reason is not None and not (may_preempt and preempt_for(state, request, plan, reason)):
            hold(state, request, queue, reason)
            return False
    return True
