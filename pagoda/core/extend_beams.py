"""Beams: when a step is complete, each request's best beams continue, and searches that are done end.

Nothing is scheduled for a beam's row until it is known which beams continue, so the beams of a request need not be
computed in the same step. Nothing is emitted before the search is done. The number of rows stays the same: a beam with
several continuations keeps its row for the best of them, and the others take the rows of beams that do not continue,
sharing its blocks (copied when they are written to).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from pagoda.core.beam_search import BeamSearch, Candidates, Extension, columns_of, num_beam_candidates
from pagoda.core.lifecycle import finish_all, finish_sequence
from pagoda.core.request import RequestState, RequestStatus, Sequence
from pagoda.core.scheduler_output import EngineCoreOutputs, Finish, LogprobColumns, ModelRunnerOutput, SchedulerOutput
from pagoda.core.state import SchedulerState


@dataclass(slots=True, eq=False)
class BeamResults:
    """What a step gave to beam searches.

    rest: the step's result without the beams' tokens.   outputs, clients: of searches that are done; one part per
    sequence.   finishes: with the client of each.   first: requests that emit for the first time.
    """

    rest: ModelRunnerOutput
    outputs: list[EngineCoreOutputs] = field(default_factory=list)
    clients: list[int] = field(default_factory=list)
    finishes: list[tuple[int, Finish]] = field(default_factory=list)
    first: list[RequestState] = field(default_factory=list)


def extend_beams(state: SchedulerState, output: SchedulerOutput, result: ModelRunnerOutput) -> BeamResults | None:
    """Take the beams' part of a step's result. Return None if the step has none."""
    if not state.table.may_have_beams:
        return None
    is_beam = state.table.is_beam[output.sample_rows]
    if not is_beam.any():
        return None
    results = BeamResults(_without_samples(result, is_beam))
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
            assert result.logprobs is not None, "`without_unscored` has refused these rows"
            _search_of(state, sequence.request).take(sequence.index, _candidates(sequence, result.logprobs, first[i]))
            requests[sequence.request] = None
    for request in requests:
        search = request.beams
        if search is not None and search.is_ready:
            _extend(state, request, search, results)
    return results


def without_unscored(state: SchedulerState, output: SchedulerOutput, result: ModelRunnerOutput) -> ModelRunnerOutput:
    """Refuse the beams of a worker that returns no log-probabilities."""
    if result.logprobs is not None or not state.table.may_have_beams:
        return result
    sampled = output.sample_rows[result.num_sampled > 0]
    rows = sampled[state.table.is_beam[sampled]].tolist()
    message = "this worker does not return log-probabilities, which beam search needs"
    failed = dict.fromkeys(rows, message) | result.failed
    return replace(result, failed=failed, refused=result.refused.union(rows)) if rows else result


def _compute_again(state: SchedulerState, sequence: Sequence) -> None:
    """The sequence left its row while its token was in flight: after a swap, it computes the last token again."""
    if sequence.request.status is RequestStatus.SWAPPED:
        state.table.roll_back(sequence, 1)


def _search_of(state: SchedulerState, request: RequestState) -> BeamSearch:
    if request.beams is None:
        spec = request.spec
        request.beams = BeamSearch(spec, state.table.limit_of(spec) - spec.num_prompt_tokens)
    return request.beams


def _extend(state: SchedulerState, request: RequestState, search: BeamSearch, results: BeamResults) -> None:
    extensions = search.extend()
    if search.is_done:
        _end(state, request, search, results)
        return
    for extension in extensions:
        if extension.source != extension.slot:
            _copy(state, request, extension)
    for extension in extensions:
        sequence, source = request.sequences[extension.slot], request.sequences[extension.source]
        position = int(state.table.num_tokens[sequence.row])
        state.table.append_tokens(sequence, [extension.token_id])
        state.outbox.post_beam(sequence.row, source.row, position, extension.token_id)
    state.batch.changed(rows=False)


def _copy(state: SchedulerState, request: RequestState, extension: Extension) -> None:
    """The beam of one row continues in another one too."""
    source, sequence = request.sequences[extension.source], request.sequences[extension.slot]
    state.kv.free(sequence.row)
    state.kv.remove_sequence(sequence)
    state.table.overwrite(source.row, sequence.row)
    state.kv.fork(source.row, sequence.row, int(state.table.num_computed[source.row]))


def _end(state: SchedulerState, request: RequestState, search: BeamSearch, results: BeamResults) -> None:
    """Emit the hypotheses, best first. If a grammar allows too few, the last sequences end without a token."""
    client = request.spec.client_index
    results.first += state.outbox.take_first_outputs(np.array(request.rows))
    for sequence, hypothesis in zip(request.sequences, search.finished, strict=False):
        token_ids, columns = columns_of(hypothesis)
        results.outputs.append(_output_of(sequence, token_ids, columns))
        results.clients.append(client)
        finish = finish_sequence(state, sequence, hypothesis.status, hypothesis.stop_token)
        results.finishes.append((client, finish))
    for finish in finish_all(state, request, RequestStatus.FINISHED_STOPPED):
        results.finishes.append((client, finish))


def _candidates(sequence: Sequence, logprobs: LogprobColumns, at: int) -> Candidates:
    """Return a copy of the entries that the request asked for, whatever its neighbours in the batch did."""
    spec = sequence.request.spec
    assert spec.sampling is not None
    count = max(num_beam_candidates(spec.sampling, spec.eos_token_ids), spec.sampling.logprobs or 0)
    columns = slice(1, 1 + count)  # the first one is the token that a request without beams would take
    return Candidates(logprobs.token_ids[at, columns].copy(), logprobs.logprobs[at, columns].copy())


def _output_of(sequence: Sequence, token_ids: list[int], columns: LogprobColumns) -> EngineCoreOutputs:
    return EngineCoreOutputs(
        np.array([sequence.request.spec.handle], np.int64),
        np.array([sequence.index], np.int32),
        np.array([len(token_ids)], np.int32),
        np.array(token_ids, np.int32),
        logprobs=columns,
    )


def _without_samples(result: ModelRunnerOutput, mask: np.ndarray) -> ModelRunnerOutput:
    """Return the result with no token for the samples in the mask."""
    logprobs = result.logprobs
    if logprobs is not None:
        kept = ~np.repeat(mask, result.num_sampled)
        logprobs = LogprobColumns(logprobs.token_ids[kept], logprobs.logprobs[kept], logprobs.ranks[kept])
    num_sampled = np.where(mask, 0, result.num_sampled).astype(np.int32)
    return replace(result, num_sampled=num_sampled, logprobs=logprobs)


def join_outputs(parts: Iterable[EngineCoreOutputs]) -> EngineCoreOutputs:
    """Return the outputs of several parts of one step for one client, one after the other."""
    parts = list(parts)
    if len(parts) == 1:
        return parts[0]
    return EngineCoreOutputs(
        np.concatenate([part.handles for part in parts]),
        np.concatenate([part.sequences for part in parts]),
        np.concatenate([part.counts for part in parts]),
        np.concatenate([part.token_ids for part in parts]),
        tuple(finish for part in parts for finish in part.finishes),
        _join_columns(parts),
        {handle: value for part in parts for handle, value in part.prompt_logprobs.items()},
        {handle: value for part in parts for handle, value in part.pooled.items()},
        {handle: value for part in parts for handle, value in part.num_cached_tokens.items()},
        {handle: value for part in parts for handle, value in part.queue_s.items()},
    )


def _join_columns(parts: list[EngineCoreOutputs]) -> LogprobColumns | None:
    """Narrower columns, and tokens without any, are filled up with zeros; readers take what they asked for."""
    width = max((part.logprobs.token_ids.shape[1] for part in parts if part.logprobs is not None), default=0)
    if not width:
        return None
    count = sum(len(part.token_ids) for part in parts)
    ids, values = np.zeros((count, width), np.int32), np.zeros((count, width), np.float32)
    ranks, at = np.zeros(count, np.int32), 0
    for part in parts:
        rows, columns = slice(at, at + len(part.token_ids)), part.logprobs
        if columns is not None:
            filled = columns.token_ids.shape[1]
            ids[rows, :filled], values[rows, :filled], ranks[rows] = columns.token_ids, columns.logprobs, columns.ranks
        at = rows.stop
    return LogprobColumns(ids, values, ranks)
