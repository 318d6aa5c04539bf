"""Requests are added, and move between waiting, running, swapped and ended.

The only place that takes a sequence from its row.
"""

import logging

import numpy as np

from pagoda.base.abbreviate import shown_id
from pagoda.base.errors import RequestError
from pagoda.core.cost_model import RowWork
from pagoda.core.events import Ended, FirstToken, Held, Preempted, Queued
from pagoda.core.policy import RequestQueue
from pagoda.core.request import AdmitKind, Progress, Reason, Request, RequestState, RequestStatus, Sequence
from pagoda.core.state import SchedulerState
from pagoda.core.stops import find_end

logger = logging.getLogger("pagoda")


def add_request(state: SchedulerState, request: Request, progress: Progress) -> None:
    """Let a new request wait. Raises RequestError for a key that is in use, or what could never be served."""
    if request.key in state.requests:
        raise RequestError(
            f"client {request.client_index} has a request with handle {request.handle} already", "handle"
        )
    _check(state, request)
    added = RequestState(request, state.policy.key(request), awaiting_fork=not request.prior_output)
    added.admission, added.has_output = 0 if progress.was_admitted else -1, progress.has_output
    prompt = np.ascontiguousarray(request.prompt_token_ids, np.int32)
    for index in range(request.num_seqs):
        prior = request.prior_output[index] if request.prior_output else ()
        tokens = np.concatenate((prompt, np.array(prior, np.int32))) if prior else prompt
        end = progress.ended.get(index) or _end_after(state, request, prior)
        added.sequences.append(Sequence(added, index, tokens, end=end))
    added.unfinished = [sequence for sequence in added.sequences if sequence.end is None]
    if not added.unfinished:
        raise RequestError("every sequence of prior_output has ended already", "prior_output")
    state.kv.hash_prompt(added)
    state.requests[added.key] = added
    state.stops.add(request)
    position = state.waiting.push(added)
    state.events.write(Queued, request, request.request_id, request.num_prompt_tokens, request.num_seqs, position)


def _check(state: SchedulerState, request: Request) -> None:
    num_tokens, longest = request.num_prompt_tokens, state.table.max_model_len
    if num_tokens == 0:
        raise RequestError("the prompt is empty", "prompt")
    if (request.sampling is None) == (request.pooling is None):
        raise RequestError("exactly one of sampling and pooling parameters must be given", "sampling")
    if num_tokens + request.wants_output > longest:
        room = "with at least one output token " if request.wants_output else ""
        raise RequestError(f"the prompt has {num_tokens} tokens; {room}max_model_len is {longest}", "prompt")
    if request.prior_output and len(request.prior_output) != request.num_seqs:
        raise RequestError(
            f"prior_output must have one entry per sequence ({request.num_seqs}), not {len(request.prior_output)}",
            "prior_output",
        )
    if request.pin is not None and request.pin.ttl_s < 1:
        raise RequestError(f"pin.ttl_s must be at least 1 second (got {request.pin.ttl_s})", "pin")
    limit, most = state.encoder.largest_item, state.config.max_num_batched_tokens
    for item in request.media:
        if item.length > limit:
            raise RequestError(f"a media item has {item.length} tokens; the encoder takes {limit}", "media")
        if state.encoder.whole_items and item.length > most:
            raise RequestError(f"a media item has {item.length} tokens; a step takes {most} of it whole", "media")


def _end_after(state: SchedulerState, request: Request, prior: tuple[int, ...]) -> RequestStatus | None:
    """Return how a sequence had ended before the engine died, if it had."""
    end = find_end(request, 0, list(prior), state.table.limit_of(request)) if prior else None
    return None if end is None else end.status


def hold(state: SchedulerState, request: RequestState, queue: RequestQueue, reason: Reason) -> None:
    """The request was considered and did not enter."""
    queue.note_held(request, state.num_steps)
    _note_reason(state, request, queue, reason)


def end_reasons(state: SchedulerState) -> None:
    """The step is planned: requests that were held or woken before, and not considered in it, get Reason.TURN."""
    for queue in (state.swapped, state.waiting):
        for request in queue.take_passed_over(state.num_steps):
            lora = request.spec.lora
            if request.held_for is Reason.LORA and lora is not None and not state.batch.has_room_for_adapter(lora):
                queue.note_held(request, state.num_steps)  # that is true still
            else:
                _note_reason(state, request, queue, Reason.TURN)


def _note_reason(state: SchedulerState, request: RequestState, queue: RequestQueue, reason: Reason) -> None:
    if request.held_for is reason:
        return
    request.held_for = reason
    num_blocks, num_free, position = sum(state.kv.most_blocks(request)), state.kv.num_free, queue.position(request)
    state.events.write(Held, request.spec, reason, position, num_blocks, num_free)


def move_to_running(state: SchedulerState, request: RequestState) -> AdmitKind:
    """The request joins the running batch; the caller gives rows to its sequences. Return what it is to workers."""
    queue, kind = state.waiting, AdmitKind.RESUMED
    if request.status is RequestStatus.SWAPPED:
        queue, kind = state.swapped, AdmitKind.SWAPPED_IN
    elif request.admission < 0:
        kind = AdmitKind.NEW
    queue.remove(request)
    state.kv.transfers.forget(request.key)
    request.held_for, request.num_adapter_skips = None, 0
    state.num_admissions += 1
    request.admission = state.num_admissions
    request.status = RequestStatus.RUNNING
    state.batch.add(request)
    if state.preparations is not None:
        state.preparations.pin(request.spec)
    return kind


def give_row(state: SchedulerState, sequence: Sequence, num_computed: int, source: int = -1) -> int:
    """The sequence gets a row, without blocks. Return the row.   source: the row of a sibling that it equals."""
    row = state.table.admit(sequence, num_computed) if source < 0 else state.table.fork(source, sequence)
    state.batch.add_row(row, sequence.request)
    return row


def note_first_outputs(state: SchedulerState, rows: np.ndarray) -> None:
    """`rows` emit a token, which is the first one of some requests."""
    for row in state.batch.take_awaiting(rows):
        note_first_output(state, state.table.owner(row).request)


def note_first_output(state: SchedulerState, request: RequestState) -> None:
    """The request emits a token or its vector, unless another sequence has: its first one."""
    if not request.has_output:
        request.has_output = True
        state.events.write(FirstToken, request.spec, request.spec.num_prompt_tokens)


# Out of the running batch


def requeue(state: SchedulerState, request: RequestState, cause: RequestState | None = None) -> None:
    """The request loses all KV, wherever that is, and waits again. Tokens are kept.

    cause: the request that it makes room for.
    """
    was_swapped = request.status is RequestStatus.SWAPPED
    num_lost, free_before = lost_with(state, request).num_tokens, state.kv.num_free
    for sequence in request.sequences:
        if sequence.row >= 0:
            _free_row(state, sequence)
        if not sequence.is_finished:
            state.kv.host.drop(sequence)
            state.table.roll_back(sequence, sequence.num_computed)
    if request.spec.is_beam_search:
        _restart_search(state, request)
    if was_swapped:
        state.swapped.remove(request)
    else:
        _leave(state, request)
    request.status, request.held_for = RequestStatus.PREEMPTED, None
    request.sort_key = state.policy.key_on_return(request)
    state.waiting.push(request)
    _note_preempted(state, request, cause, "recompute", num_lost, free_before)


def queue_all_anew(state: SchedulerState) -> list[RequestState]:
    """Let all requests wait, without KV and as if they had just been added. Return them in queue order.

    No step may be in flight.
    """
    for request in reversed([*state.batch.requests.values(), *state.swapped]):
        requeue(state, request)
    requests = list(state.waiting)
    for request in requests:
        state.waiting.remove(request)
        request.held_for, request.num_adapter_skips = None, 0
        state.waiting.push(request)
    return requests


def _restart_search(state: SchedulerState, request: RequestState) -> None:
    """Begin the beam search again, with the same result: without the blocks that its beams shared, they might no
    longer fit. What it loses was sent to no client.

    A step in flight may show that its numbers are wrong, when these tokens are not known any more: what they fill does
    not stay findable.
    """
    has_late_results = state.table.has_late_results(request)
    for sequence in request.sequences:
        if has_late_results:
            state.kv.prefix_cache.uncache(sequence, after=request.spec.num_prompt_tokens)
        state.table.restart(sequence)
        state.kv.remove_sequence(sequence)
    state.searches.pop(request, None)
    request.awaiting_fork = True
    state.kv.hash_prompt(request)


def swap_out(state: SchedulerState, request: RequestState, cause: RequestState) -> None:
    """The request's KV moves to host memory; it waits there with all that it has computed.   cause: see `requeue`."""
    free_before = state.kv.num_free
    sequences = [sequence for sequence in request.sequences if sequence.row >= 0]
    state.kv.swap_out(sequences)
    for sequence in sequences:
        _leave_row(state, sequence)
    _leave(state, request)
    request.status = RequestStatus.SWAPPED
    state.swapped.push(request)
    _note_preempted(state, request, cause, "swap", 0, free_before)


def lost_with(state: SchedulerState, request: RequestState) -> RowWork:
    """Return what is lost with its KV, by row. Full prompt blocks, which its sequences share, are computed once."""
    rows = [int(state.table.num_computed[row]) for row in request.rows]
    counts = np.array(rows or [sequence.num_computed for sequence in request.unfinished], np.int32)
    size = state.kv.sizing.block_size
    shared = min([request.spec.num_prompt_tokens, *counts.tolist()]) // size * size
    start = np.full(len(counts), shared, np.int32)
    start[:1] = 0
    return RowWork(start, counts - start)


def _note_preempted(
    state: SchedulerState, request: RequestState, cause: RequestState | None, mode: str, num_lost: int, free_before: int
) -> None:
    """Workers and readers of the events get to know it."""
    state.preempted.append(request.key)
    who = (None, None) if cause is None else cause.spec.key
    num_freed = state.kv.num_free - free_before
    state.events.write(Preempted, request.spec, *who, mode, num_lost, num_freed)


def _leave(state: SchedulerState, request: RequestState) -> None:
    state.new_beams.pop(request, None)
    state.batch.remove(request)
    if state.preparations is not None:
        state.preparations.unpin(request.spec)
    state.encoder.cache.drop_all(request)


def _free_row(state: SchedulerState, sequence: Sequence) -> None:
    """The sequence leaves its row and all its blocks."""
    state.kv.free(sequence.row)
    _leave_row(state, sequence)


def _leave_row(state: SchedulerState, sequence: Sequence) -> None:
    """The sequence leaves its row, which has no blocks any more."""
    row = sequence.row
    state.table.release(sequence, state.in_flight.last_step_with(row))
    for owner in (state.kv.tables, state.drafts, state.batch, state.encoder):
        owner.remove_row(row)


# The end


def finish_sequence(
    state: SchedulerState,
    sequence: Sequence,
    status: RequestStatus,
    stop_reason: int | None = None,
    message: str | None = None,
) -> None:
    """The sequence has ended, and with the last one the request. What it held is free at once."""
    request = sequence.request
    state.batch.sequence_ended(request)
    sequence.end = status
    request.unfinished = [other for other in request.unfinished if other is not sequence]
    if sequence.row >= 0:
        _free_row(state, sequence)
    state.kv.remove_sequence(sequence)
    is_last = not request.unfinished
    if is_last:
        _remove(state, request, status)
    spec = request.spec
    state.events.write(Ended, spec, spec.request_id, sequence.index, status, stop_reason, message, is_last)


def _remove(state: SchedulerState, request: RequestState, status: RequestStatus) -> None:
    """No queue keeps anything of the request."""
    if request.key in state.batch.requests:
        _leave(state, request)
    elif request.key in state.swapped:
        state.swapped.remove(request)
    elif request.key in state.waiting:
        state.waiting.remove(request)
    state.kv.transfers.forget(request.key)
    if state.preparations is not None:
        state.preparations.forget(request.spec)
    request.status = status
    del state.requests[request.key]
    state.searches.pop(request, None)
    state.stops.remove(request.spec)
    state.finished.append(request.key)


def finish_one(state: SchedulerState, sequence: Sequence, status: RequestStatus, message: str | None = None) -> None:
    """`finish_sequence` for one sequence of several. If others wait for its row, the request starts again without it.

    Of a beam search, all sequences end: none of them has a result of its own.
    """
    request = sequence.request
    if request.spec.is_beam_search:
        finish_all(state, request, status, message)
        return
    if sequence.row in state.batch.leaders and len(request.unfinished) > 1:
        requeue(state, request)
    finish_sequence(state, sequence, status, message=message)


def finish_all(state: SchedulerState, request: RequestState, status: RequestStatus, message: str | None = None) -> None:
    """All unfinished sequences of the request end together."""
    for sequence in request.unfinished:
        finish_sequence(state, sequence, status, message=message)


def refuse(state: SchedulerState, request: RequestState, why: str) -> None:
    """The request ends without being served. If it has output already, that is its result: it ends for its length."""
    num_prompt = request.spec.num_prompt_tokens
    has_output = any(len(sequence.token_ids) > num_prompt for sequence in request.sequences)
    message = f"request {shown_id(request.spec.request_id)} {why}"
    logger.warning("%s: it %s", message, "ends with the output it has" if has_output else "is ignored")
    status = RequestStatus.FINISHED_LENGTH_CAPPED if has_output else RequestStatus.FINISHED_IGNORED
    finish_all(state, request, status, message)
