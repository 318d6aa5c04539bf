"""The commit side: apply the results of a step: append tokens, find ends, free what ended, and group by client.

A step that raised, and a row that failed, are undone in `_fail_rows`, and nowhere else: `without_unscored` only adds
rows to those that failed, and whatever takes results passes over them.
"""

from dataclasses import replace

import numpy as np

from pagoda.core.committing_beams import extend_beams, without_unscored
from pagoda.core.events import Failed
from pagoda.core.in_flight import find_spoiled
from pagoda.core.lifecycle import finish_one, finish_sequence, note_first_output, note_first_outputs
from pagoda.core.preemption import recompute
from pagoda.core.request import RequestState, RequestStatus, Sequence
from pagoda.core.request_table import RequestTable
from pagoda.core.scheduler_output import (
    EngineCoreOutputs,
    LogprobColumns,
    ModelRunnerOutput,
    SchedulerOutput,
    join_outputs,
    only_events,
)
from pagoda.core.state import SchedulerState
from pagoda.core.stops import find_end

NOTHING = only_events(())


def commit(
    state: SchedulerState, output: SchedulerOutput, result: ModelRunnerOutput, *, raised: bool = False
) -> dict[int, EngineCoreOutputs]:
    """Commit the result of a step that computed something. Return what each client gets.

    raised: all rows have failed because the step raised; what earlier steps computed can be trusted.
    """
    state.in_flight.completed(output, result, state.clock)
    state.events.step = output.step
    state.table.complete(output.rows, output.num_new)
    state.costs.observe(output, result)
    may_have_beams = state.table.may_have_beams
    if may_have_beams:
        result = without_unscored(state, output, result)
    if result.failed:
        _fail_rows(state, output, result, raised=raised)
    state.encoder.complete(output.rows)
    rest, texts = extend_beams(state, output, result) if may_have_beams else (result, {})
    commit_tokens = _commit_plain if rest is result and _is_plain(state, output, result) else _commit_any
    by_client = commit_tokens(state, output, rest)
    if state.table.has_pinned_rows:
        for request in state.table.free_pinned_rows(output.step):
            state.waiting.wake(request.key)
    oldest = state.in_flight.outputs[0].step if state.in_flight.outputs else None
    state.kv.transfers.store_filled(state.num_steps, oldest)
    for client, parts in texts.items():
        by_client[client] = join_outputs([by_client[client], *parts] if client in by_client else parts)
    return with_events(state, by_client)


def with_events(state: SchedulerState, by_client: dict[int, EngineCoreOutputs]) -> dict[int, EngineCoreOutputs]:
    """Add to the outputs what has happened since the last ones."""
    for client, events in state.events.take().items():
        by_client[client] = replace(by_client.get(client, NOTHING), events=events)
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
    table.settle_expected(at, output.drafts)
    ends = table.append_each(at, tokens)
    state.stats.generation_tokens += len(at)
    may_end = state.stops.among(tokens) | (ends >= limits)
    outputs = EngineCoreOutputs(handles, indices, counts, tokens, logprobs=result.logprobs)
    by_client = {running.client: outputs} if running.client is not None else _by_client(outputs, table.client[at])
    if state.batch.awaiting_first_output:
        note_first_outputs(state, rows)
    for i in may_end.nonzero()[0].tolist():
        _end_row(state, int(rows[i]), int(tokens[i]))
    return by_client


def _end_row(state: SchedulerState, row: int, token: int) -> None:
    """End the row if `token`, its last, really ends it."""
    sequence = state.table.owner(row)
    spec = sequence.request.spec
    output_len = int(state.table.num_tokens[row]) - 1 - spec.num_prompt_tokens
    end = find_end(spec, output_len, [token], int(state.table.length_limit[row]))
    if end is not None:
        finish_sequence(state, sequence, end.status, end.stop_token)


# Drafts, late results, failures, pooled rows


def _commit_any(
    state: SchedulerState, output: SchedulerOutput, result: ModelRunnerOutput
) -> dict[int, EngineCoreOutputs]:
    """`_commit_plain` for any result: rows with one token as there, the others one by one."""
    table, rows = state.table, output.sample_rows
    one_token = _have_one_token(state, rows, result)
    num_kept = one_token.astype(np.int32)  # tokens of each sample that count
    clients = table.client[rows]
    note_first_outputs(state, rows[result.num_sampled > 0])
    prompt_logprobs = _new_prompt_logprobs(state, output, result)  # before a first token ends its request
    table.settle_expected(rows, output.drafts)
    state.drafts.verify(output, result)
    state.batch.changed(rows=False)  # counts move by more or less than one token
    plain, tokens = rows[one_token], result.sampled[one_token, 0]
    ends = table.append_each(plain, tokens)
    looks_at = ~one_token
    looks_at[one_token] = state.stops.among(tokens) | (ends >= table.length_limit[plain])
    for i in looks_at.nonzero()[0].tolist():
        row = int(rows[i])
        if one_token[i]:
            _end_row(state, row, int(result.sampled[i, 0]))
            continue
        sequence = table.sequence_of[row]
        if sequence is None or sequence.is_finished:
            continue
        tokens = result.sampled[i, : result.num_sampled[i]].tolist()
        if sequence.row < 0 and tokens:
            note_first_output(state, sequence.request)  # its row was forgotten
        num_kept[i] = _append(state, sequence, tokens)
    pooled: dict[int, dict[int, np.ndarray]] = {}
    if result.pooled:
        note_first_outputs(state, np.fromiter(result.pooled, np.int32, len(result.pooled)))
    for row, vector in result.pooled.items():
        sequence = table.sequence_of[row]
        if sequence is None or sequence.is_finished:
            continue
        spec = sequence.request.spec
        note_first_output(state, sequence.request)  # also if it was preempted or swapped out while in flight
        finish_sequence(state, sequence, RequestStatus.FINISHED_STOPPED)
        pooled.setdefault(spec.client_index, {})[spec.handle] = vector
    state.stats.generation_tokens += int(num_kept.sum())
    outputs = _kept_outputs(table, rows, result, num_kept)
    by_client = _by_client(outputs, clients[num_kept > 0])
    for client, by_handle in prompt_logprobs.items():
        by_client[client] = replace(by_client.get(client, NOTHING), prompt_logprobs=by_handle)
    for client, vectors in pooled.items():
        by_client[client] = replace(by_client.get(client, NOTHING), pooled=vectors)
    return by_client


def _have_one_token(state: SchedulerState, rows: np.ndarray, result: ModelRunnerOutput) -> np.ndarray:
    """Return which of the sampled `rows` still have their sequence, and one token for it; bool."""
    return (result.num_sampled == 1) & state.table.is_active[rows]


def _append(state: SchedulerState, sequence: Sequence, tokens: list[int]) -> int:
    """Append to a running sequence, or to one that was preempted or swapped out meanwhile. Return how many count."""
    table, spec, row = state.table, sequence.request.spec, sequence.row
    if row >= 0:
        num_tokens, limit = int(table.num_tokens[row]), int(table.length_limit[row])
    else:
        num_tokens, limit = len(sequence.token_ids), table.limit_of(spec)
    end = find_end(spec, num_tokens - spec.num_prompt_tokens, tokens, limit)
    if end is None:
        table.append_tokens(sequence, tokens)
        return len(tokens)
    table.append_tokens(sequence, tokens[: end.num_kept])
    finish_sequence(state, sequence, end.status, end.stop_token)
    return end.num_kept


def _fail_rows(state: SchedulerState, output: SchedulerOutput, result: ModelRunnerOutput, *, raised: bool) -> None:
    """End the sequences of the rows that failed, and undo what was planned on top of them.

    No block that such a row should have filled stays in the prefix cache. Sequences that read one, or forked from
    such a row, are computed again: their results, which are in flight, are dropped.
    """
    lost_runs = output.encoder_runs if raised else ()
    waiting = state.encoder.cache.holders_of(lost_runs)
    readers = state.encoder.readers_of(lost_runs, state.in_flight.outputs)
    rows, blocks = find_spoiled(result.failed, readers, output, state.in_flight.outputs, state.kv)
    sequences = [state.table.sequence_of[row] for row in rows]
    spoiled: set[RequestState] = set()
    owners = {row: one for row in result.failed if (one := state.table.sequence_of[row]) is not None}
    if not raised:  # before the first one ends: with a beam, all leave their rows
        for sequence in owners.values():
            state.kv.uncache(sequence)  # its numbers may have been wrong before they showed in the logits
    for row, sequence in owners.items():
        if sequence.is_finished:
            continue
        message = result.failed[row]
        request = sequence.request
        state.events.write(Failed, request.spec, message)
        if row in state.batch.leaders and len(request.unfinished) > 1 and not request.spec.is_beam_search:
            spoiled.add(request)  # its siblings, which wait for the row, start again in their turn
            state.batch.release_siblings(row)
        status = RequestStatus.FINISHED_IGNORED if row in result.refused else RequestStatus.FINISHED_ERROR
        finish_one(state, sequence, status, message)
    spoiled.update(one.request for one in sequences if one is not None and not one.is_finished)
    spoiled.update(request for request in waiting if request.key in state.requests)
    for request in sorted(spoiled, key=lambda one: -one.admission):  # so that the queue keeps their order
        state.events.write(Failed, request.spec, None)
        recompute(state, request)
    for run in lost_runs:  # no request holds its output any more
        state.encoder.cache.evict(run.content_hash)
    state.kv.prefix_cache.uncache_blocks(np.array(sorted(blocks), np.int32))


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


def _by_client(outputs: EngineCoreOutputs, clients: np.ndarray) -> dict[int, EngineCoreOutputs]:
    """Group by client. clients: int32, one per entry of `outputs`."""
    return {int(one): outputs.entries(clients == one) for one in np.unique(clients)}


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
