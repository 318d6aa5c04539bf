"""The commit side: apply the results of a step: append tokens, find ends, free what ended, and group by client.

A step that raised, and a row that failed, are undone in `_fail_rows`, and nowhere else: `_without_unscored` only adds
rows to those that failed, and whatever takes results passes over them.
"""

from dataclasses import replace

import numpy as np

from pagoda.core.beams import BeamSearch, Candidates, columns_of
from pagoda.core.in_flight import find_spoiled
from pagoda.core.lifecycle import finish_all, finish_one, finish_sequence
from pagoda.core.outbox import with_first_output
from pagoda.core.preemption import recompute
from pagoda.core.request import RequestState, RequestStatus, Sequence, num_beam_candidates
from pagoda.core.request_table import RequestTable
from pagoda.core.scheduler_output import (
    EngineCoreOutputs,
    Finish,
    LogprobColumns,
    ModelRunnerOutput,
    SchedulerOutput,
    join_outputs,
    only_finishes,
)
from pagoda.core.state import SchedulerState
from pagoda.core.stops import find_end

NOTHING = only_finishes(())


def commit(
    state: SchedulerState, output: SchedulerOutput, result: ModelRunnerOutput, *, raised: bool = False
) -> dict[int, EngineCoreOutputs]:
    """Commit the result of a step that computed something. Return what each client gets.

    raised: all rows have failed because the step raised; what earlier steps computed can be trusted.
    """
    state.in_flight.completed(output, result, state.clock)
    state.table.complete(output.rows, output.num_new)
    state.costs.observe(output, result)
    may_have_beams = state.table.may_have_beams
    if may_have_beams:
        result = _without_unscored(state, output, result)
    if result.failed:
        _fail_rows(state, output, result, raised=raised)
    state.encoder.complete(output.rows)
    rest = _extend_beams(state, output, result) if may_have_beams else result
    commit_tokens = _commit_plain if rest is result and _is_plain(state, output, result) else _commit_any
    by_client = commit_tokens(state, output, rest)
    if state.table.has_pinned_rows:
        state.table.free_pinned_rows(output.step)
        state.in_flight.stop_waiting_for(output.step)
    if state.outbox.has_deferred:
        for client, deferred in state.outbox.take_deferred().items():
            by_client[client] = join_outputs([by_client[client], deferred]) if client in by_client else deferred
    return by_client


def commit_failure(state: SchedulerState, output: SchedulerOutput, message: str) -> dict[int, EngineCoreOutputs]:
    """Commit that a step raised: every row that it computes or samples has failed."""
    num_samples = len(output.sample_rows)
    failed = ModelRunnerOutput(
        output.step,
        sampled=np.full((num_samples, 1), -1, np.int32),
        num_sampled=np.zeros(num_samples, np.int32),
        failed=dict.fromkeys((*output.rows.tolist(), *output.sample_rows.tolist()), message),  # forks sample, too
    )
    return commit(state, output, failed, raised=True)


def _is_plain(state: SchedulerState, output: SchedulerOutput, result: ModelRunnerOutput) -> bool:
    """Whether each row that sampled has one token, and nothing else came back."""
    return (
        result.sampled.shape[1] == 1
        and not output.drafts
        and not result.failed
        and not result.pooled
        and not result.prompt_logprobs
        and not state.table.has_pinned_rows
    )


# One token per row


def _commit_plain(
    state: SchedulerState, output: SchedulerOutput, result: ModelRunnerOutput
) -> dict[int, EngineCoreOutputs]:
    table, rows, tokens = state.table, output.sample_rows, result.sampled[:, 0]
    if not len(rows):
        return {}
    running = state.batch.running
    if rows is running.rows:
        at, limits = running.at, running.length_limits
        handles, indices, counts = running.handles, running.indices, running.ones
    else:
        at = rows.astype(np.intp)
        handles, indices, counts = table.handle[at], table.index[at], np.ones(len(at), np.int32)
        limits = table.length_limit[at]
    ends = table.append_each(at, tokens)
    state.stats.generation_tokens += len(at)
    may_end = state.stops.among(tokens) | (ends >= limits)
    clients = table.client[at] if running.client is None else None
    outputs = EngineCoreOutputs(handles, indices, counts, tokens, logprobs=result.logprobs)
    first = state.outbox.take_first_outputs(rows) if state.outbox.awaiting_first_output else []
    finishes = _end_rows(state, rows, tokens, may_end) if np.count_nonzero(may_end) else []
    return _by_client(outputs, clients, running.client, finishes, first)


def _end_rows(
    state: SchedulerState, rows: np.ndarray, tokens: np.ndarray, may_end: np.ndarray
) -> list[tuple[int, Finish]]:
    """End those rows that the new token really ends. Return (client, Finish)."""
    finishes: list[tuple[int, Finish]] = []
    for i in np.flatnonzero(may_end).tolist():
        row = int(rows[i])
        sequence = state.table.owner(row)
        spec = sequence.request.spec
        output_len = int(state.table.num_tokens[row]) - 1 - spec.num_prompt_tokens
        end = find_end(spec, output_len, [int(tokens[i])], int(state.table.length_limit[row]))
        if end is not None:
            finishes.append((spec.client_index, finish_sequence(state, sequence, end.status, end.stop_token)))
    return finishes


# Drafts, late results, failures, pooled rows


def _commit_any(
    state: SchedulerState, output: SchedulerOutput, result: ModelRunnerOutput
) -> dict[int, EngineCoreOutputs]:
    """The definition, row by row: `_commit_plain` equals it for its case."""
    table, rows = state.table, output.sample_rows
    finishes: list[tuple[int, Finish]] = []
    num_kept = np.zeros(len(rows), np.int32)  # tokens of each sample that count
    clients = table.client[rows]
    first = state.outbox.take_first_outputs(rows[result.num_sampled > 0])
    prompt_logprobs = _new_prompt_logprobs(state, output, result)  # before a first token ends its request
    table.settle_expected(rows, output.drafts)
    state.batch.changed(rows=False)  # counts move by more or less than one token
    for i, row in enumerate(rows.tolist()):
        sequence = table.sequence_of[row]
        if sequence is None or sequence.is_finished:
            continue
        tokens = result.sampled[i, : result.num_sampled[i]].tolist()
        state.drafts.verified(sequence, row, len(output.drafts.get(row, ())), len(tokens))
        if sequence.row < 0 and tokens and not sequence.request.has_output:
            first.append(state.outbox.note_first_output(sequence.request))  # its row was forgotten
        num_kept[i], finish = _append(state, sequence, tokens)
        if finish is not None:
            finishes.append((int(clients[i]), finish))
    pooled: dict[int, dict[int, np.ndarray]] = {}
    if result.pooled:
        first += state.outbox.take_first_outputs(np.fromiter(result.pooled, np.int32, len(result.pooled)))
    for row, vector in result.pooled.items():
        sequence = table.sequence_of[row]
        if sequence is None or sequence.is_finished:
            continue
        spec = sequence.request.spec
        if not sequence.request.has_output:  # it was preempted or parked while in flight; its vector is complete
            first.append(state.outbox.note_first_output(sequence.request))
        finish = finish_sequence(state, sequence, RequestStatus.FINISHED_STOPPED)
        finishes.append((spec.client_index, finish))
        pooled.setdefault(spec.client_index, {})[spec.handle] = vector
    state.stats.generation_tokens += int(num_kept.sum())
    outputs = _kept_outputs(table, rows, result, num_kept)
    by_client = _by_client(outputs, clients[num_kept > 0], None, finishes, first)
    for client, by_handle in prompt_logprobs.items():
        by_client[client] = replace(by_client.get(client, NOTHING), prompt_logprobs=by_handle)
    for client, vectors in pooled.items():
        by_client[client] = replace(by_client.get(client, NOTHING), pooled=vectors)
    return by_client


def _append(state: SchedulerState, sequence: Sequence, tokens: list[int]) -> tuple[int, Finish | None]:
    """Append to a running sequence, or to one that was preempted or parked meanwhile. Return (kept, its end)."""
    table, spec, row = state.table, sequence.request.spec, sequence.row
    if row >= 0:
        num_tokens, limit = int(table.num_tokens[row]), int(table.length_limit[row])
    else:
        num_tokens, limit = len(sequence.token_ids), table.limit_of(spec)
    end = find_end(spec, num_tokens - spec.num_prompt_tokens, tokens, limit)
    if end is None:
        table.append_tokens(sequence, tokens)
        return len(tokens), None
    table.append_tokens(sequence, tokens[: end.num_kept])
    return end.num_kept, finish_sequence(state, sequence, end.status, end.stop_token)


def _fail_rows(state: SchedulerState, output: SchedulerOutput, result: ModelRunnerOutput, *, raised: bool) -> None:
    """End the sequences of the rows that failed, and undo what was planned on top of them.

    No block that such a row should have filled stays in the prefix cache. Sequences that read one, or forked from
    such a row, are computed again: their results, which are in flight, are dropped.
    """
    lost_runs = output.encoder_runs if raised else ()
    waiting = state.encoder.waiting_for(lost_runs)
    readers = state.encoder.readers_of(lost_runs, state.in_flight.outputs)
    rows, blocks = find_spoiled(result.failed, readers, output, state.in_flight.outputs, state.kv)
    sequences = [state.table.sequence_of[row] for row in rows]
    spoiled: set[RequestState] = set()
    for row, message in result.failed.items():
        sequence = state.table.sequence_of[row]
        if sequence is None:
            continue
        if not raised:
            state.kv.uncache(sequence)  # its numbers may have been wrong before they showed in the logits
        if sequence.is_finished:
            continue
        request = sequence.request
        if row in state.batch.leaders and len(request.unfinished) > 1 and not request.spec.is_beam_search:
            spoiled.add(request)  # its siblings, which wait for the row, start again in their turn
            state.batch.release_siblings(row)
        status = RequestStatus.FINISHED_IGNORED if row in result.refused else RequestStatus.FINISHED_ERROR
        state.outbox.post_finishes(request, finish_one(state, sequence, status, message))
    spoiled.update(one.request for one in sequences if one is not None and not one.is_finished)
    requests = state.requests
    spoiled.update(requests[request_id] for request_id in waiting if request_id in requests)
    for request in sorted(spoiled, key=lambda one: -one.admission):  # so that the queue keeps their order
        recompute(state, request)
    state.encoder.drop_outputs(lost_runs)
    state.kv.uncache_blocks(blocks)


def _new_prompt_logprobs(
    state: SchedulerState, output: SchedulerOutput, result: ModelRunnerOutput
) -> dict[int, dict[int, LogprobColumns]]:
    """Return prompt logprobs by client and handle, without positions that were sent before a preemption."""
    by_client: dict[int, dict[int, LogprobColumns]] = {}
    for row, columns in result.prompt_logprobs.items():
        sequence = state.table.sequence_of[row]
        if sequence is None or sequence.is_finished or row in result.failed:
            continue
        request, count = sequence.request, len(columns.ranks)
        start = int(output.start[output.rows == row][0])
        num_sent = max(request.num_prompt_logprobs_sent - start, 0)
        request.num_prompt_logprobs_sent = max(request.num_prompt_logprobs_sent, start + count)
        if num_sent < count:
            new = columns[np.arange(count) >= num_sent]
            by_client.setdefault(request.spec.client_index, {})[request.spec.handle] = new
    return by_client


def _by_client(
    outputs: EngineCoreOutputs,
    clients: np.ndarray | None,
    client: int | None,
    finishes: list[tuple[int, Finish]],
    first: list[RequestState],
) -> dict[int, EngineCoreOutputs]:
    """Group by client. clients: int32, one per entry of `outputs`, or None if all are of `client`.

    finishes: with the client of each.   first: requests that emit for the first time.
    """
    by_client: dict[int, EngineCoreOutputs]
    if clients is None:
        assert client is not None
        by_client = {client: outputs}
    else:
        by_client = {int(one): _of_client(outputs, clients == one) for one in np.unique(clients)}
    for request in first:
        client_index = request.spec.client_index  # a first token that failed leaves only an end to report
        by_client[client_index] = with_first_output(by_client.get(client_index, NOTHING), request)
    ended: dict[int, list[Finish]] = {}
    for one_client, finish in finishes:
        ended.setdefault(one_client, []).append(finish)
    for one_client, of_client in ended.items():
        one = by_client.get(one_client, NOTHING)
        by_client[one_client] = replace(one, finishes=one.finishes + tuple(of_client))
    return by_client


def _kept_outputs(
    table: RequestTable, rows: np.ndarray, result: ModelRunnerOutput, num_kept: np.ndarray
) -> EngineCoreOutputs:
    """Return the first `num_kept` tokens of each row, with their logprobs."""
    columns = np.arange(result.sampled.shape[1])
    kept, emitted = columns < num_kept[:, None], num_kept > 0
    logprobs = result.logprobs
    if logprobs is not None:
        logprobs = logprobs[kept[columns < result.num_sampled[:, None]]]
    return EngineCoreOutputs(
        table.handle[rows[emitted]],
        table.index[rows[emitted]],
        num_kept[emitted],
        result.sampled[kept],
        logprobs=logprobs,
    )


def _of_client(outputs: EngineCoreOutputs, mine: np.ndarray) -> EngineCoreOutputs:
    """Return the entries of the sequences in the mask."""
    tokens = np.repeat(mine, outputs.counts)
    logprobs = outputs.logprobs[tokens] if outputs.logprobs is not None else None
    return EngineCoreOutputs(
        outputs.handles[mine],
        outputs.sequences[mine],
        outputs.counts[mine],
        outputs.token_ids[tokens],
        logprobs=logprobs,
    )


# Beam search. Nothing is scheduled for a beam's row until it is known which beams continue, so the beams of a request
# need not be computed in the same step. Nothing is emitted before the search is done. The number of rows stays the
# same: a beam with several continuations keeps its row for the best of them, and the others take the rows of beams that
# do not continue, sharing its blocks (copied when they are written to).


def _extend_beams(state: SchedulerState, output: SchedulerOutput, result: ModelRunnerOutput) -> ModelRunnerOutput:
    """Take the beams' part of a step's result. Return the rest: the result itself if the step has none of beams."""
    is_beam = state.table.is_beam[output.sample_rows]
    if not is_beam.any():
        return result
    requests: dict[RequestState, None] = {}
    first = np.cumsum(result.num_sampled) - result.num_sampled
    for i in np.flatnonzero(is_beam & (result.num_sampled > 0)).tolist():
        row = int(output.sample_rows[i])
        sequence = state.table.sequence_of[row]
        if sequence is None or sequence.is_finished or row in result.failed:
            continue
        if sequence.row != row:
            _compute_again(state, sequence)
        else:
            assert result.logprobs is not None, "`_without_unscored` has refused these rows"
            _search_of(state, sequence.request).take(sequence.index, _candidates(sequence, result.logprobs, first[i]))
            requests[sequence.request] = None
    for request in requests:
        search = state.searches.get(request)
        if search is not None and search.is_ready:
            _extend_search(state, request, search)
    return _without_samples(result, is_beam)


def _without_unscored(state: SchedulerState, output: SchedulerOutput, result: ModelRunnerOutput) -> ModelRunnerOutput:
    """Refuse the beams of a worker that returns no log-probabilities."""
    if result.logprobs is not None:
        return result
    sampled = output.sample_rows[result.num_sampled > 0]
    rows = sampled[state.table.is_beam[sampled]].tolist()
    message = "this worker does not return log-probabilities, which beam search needs"
    failed = dict.fromkeys(rows, message) | result.failed
    return replace(result, failed=failed, refused=result.refused.union(rows)) if rows else result


def _without_samples(result: ModelRunnerOutput, mask: np.ndarray) -> ModelRunnerOutput:
    """Return the result with no token for the samples in the mask."""
    logprobs = result.logprobs
    if logprobs is not None:
        logprobs = logprobs[~np.repeat(mask, result.num_sampled)]
    num_sampled = np.where(mask, 0, result.num_sampled).astype(np.int32)
    return replace(result, num_sampled=num_sampled, logprobs=logprobs)


def _compute_again(state: SchedulerState, sequence: Sequence) -> None:
    """The sequence left its row while its token was in flight: after a swap, it computes the last token again."""
    if sequence.request.status is RequestStatus.SWAPPED:
        state.table.roll_back(sequence, 1)


def _search_of(state: SchedulerState, request: RequestState) -> BeamSearch:
    if request not in state.searches:
        spec = request.spec
        state.searches[request] = BeamSearch(spec, state.table.limit_of(spec) - spec.num_prompt_tokens)
    return state.searches[request]


def _candidates(sequence: Sequence, logprobs: LogprobColumns, at: int) -> Candidates:
    """Return a copy of the entries that the request asked for, whatever its neighbours in the batch did."""
    spec = sequence.request.spec
    assert spec.sampling is not None
    count = max(num_beam_candidates(spec.sampling, spec.eos_token_ids), spec.sampling.logprobs or 0)
    columns = slice(1, 1 + count)  # the first one is the token that a request without beams would take
    return Candidates(logprobs.token_ids[at, columns].copy(), logprobs.logprobs[at, columns].copy())


def _extend_search(state: SchedulerState, request: RequestState, search: BeamSearch) -> None:
    beams = search.extend()
    if search.is_done:
        _end_search(state, request, search)
        return
    for beam in beams:
        if beam.source != beam.slot:
            _copy_beam(state, request.sequences[beam.source], request.sequences[beam.slot])
    for beam in beams:
        sequence, source = request.sequences[beam.slot], request.sequences[beam.source]
        position = int(state.table.num_tokens[sequence.row])
        state.table.append_tokens(sequence, [beam.token_id])
        state.outbox.post_beam(sequence.row, source.row, position, beam.token_id)
    state.batch.changed(rows=False)


def _copy_beam(state: SchedulerState, source: Sequence, sequence: Sequence) -> None:
    """The beam of one row continues in another one too."""
    state.kv.free(sequence.row)
    state.kv.remove_sequence(sequence)
    state.table.overwrite(source.row, sequence.row)
    state.kv.fork(source.row, sequence.row, int(state.table.num_computed[source.row]))


def _end_search(state: SchedulerState, request: RequestState, search: BeamSearch) -> None:
    """Emit the hypotheses, best first. If a grammar allows too few, the last sequences end without a token."""
    first = state.outbox.take_first_outputs(np.array(request.rows))
    parts: list[EngineCoreOutputs] = []
    finishes: list[Finish] = []
    for sequence, hypothesis in zip(request.sequences, search.finished, strict=False):
        token_ids, columns = columns_of(hypothesis)
        state.stats.generation_tokens += len(token_ids)
        parts.append(_hypothesis_output(sequence, token_ids, columns))
        finishes.append(finish_sequence(state, sequence, hypothesis.status, hypothesis.stop_token))
    finishes += finish_all(state, request, RequestStatus.FINISHED_STOPPED)
    outputs = join_outputs([*parts, only_finishes(finishes)])
    for one in first:
        outputs = with_first_output(outputs, one)
    state.outbox.post(request, outputs)


def _hypothesis_output(sequence: Sequence, token_ids: list[int], columns: LogprobColumns) -> EngineCoreOutputs:
    return EngineCoreOutputs(
        np.array([sequence.request.spec.handle], np.int64),
        np.array([sequence.index], np.int32),
        np.array([len(token_ids)], np.int32),
        np.array(token_ids, np.int32),
        logprobs=columns,
    )
