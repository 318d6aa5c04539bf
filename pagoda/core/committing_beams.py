"""The commit side of beam search: give a step's results to each BeamSearch, and move rows and blocks after it."""

from dataclasses import replace

import numpy as np

from pagoda.core.beams import BeamSearch, Candidates, columns_of
from pagoda.core.lifecycle import finish_all, finish_sequence, note_first_outputs
from pagoda.core.request import RequestState, RequestStatus, Sequence, num_beam_candidates
from pagoda.core.scheduler_output import (
    EngineCoreOutputs,
    LogprobColumns,
    ModelRunnerOutput,
    SchedulerOutput,
)
from pagoda.core.state import SchedulerState


def extend_beams(
    state: SchedulerState, output: SchedulerOutput, result: ModelRunnerOutput
) -> tuple[ModelRunnerOutput, dict[int, list[EngineCoreOutputs]]]:
    """Take the beams' part of a step's result. Return the rest, and by client the texts of searches that are done.

    The rest is the result itself if the step has none of beams.
    """
    is_beam = state.table.is_beam[output.sample_rows]
    if not is_beam.any():
        return result, {}
    requests: dict[RequestState, None] = {}
    first = np.cumsum(result.num_sampled) - result.num_sampled
    for i in np.flatnonzero(is_beam & (result.num_sampled > 0)).tolist():
        row = int(output.sample_rows[i])
        sequence = state.table.sequence_of[row]
        if sequence is None or sequence.is_finished or row in result.failed:
            continue
        if sequence.row != row:  # it left its row: after a swap, it computes the last token again
            if sequence.request.status is RequestStatus.SWAPPED:
                state.table.roll_back(sequence, 1)
        else:
            assert result.logprobs is not None, "`without_unscored` has refused these rows"
            _search_of(state, sequence.request).take(sequence.index, _candidates(sequence, result.logprobs, first[i]))
            requests[sequence.request] = None
    texts: dict[int, list[EngineCoreOutputs]] = {}
    for request in requests:
        search = state.searches.get(request)
        if search is not None and search.is_ready and (ended := _extend_search(state, request, search)):
            texts.setdefault(request.spec.client_index, []).extend(ended)
    return _without_samples(result, is_beam), texts


def without_unscored(state: SchedulerState, output: SchedulerOutput, result: ModelRunnerOutput) -> ModelRunnerOutput:
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


def _extend_search(state: SchedulerState, request: RequestState, search: BeamSearch) -> list[EngineCoreOutputs]:
    """Let the beams continue; if the search is done, return its texts."""
    beams = search.extend()
    if search.is_done:
        return _end_search(state, request, search)
    for beam in beams:
        if beam.source != beam.slot:
            _copy_beam(state, request.sequences[beam.source], request.sequences[beam.slot])
    chosen = state.new_beams[request] = []
    for beam in beams:
        sequence, source = request.sequences[beam.slot], request.sequences[beam.source]
        position = int(state.table.num_tokens[sequence.row])
        state.table.append_tokens(sequence, [beam.token_id])
        chosen.append((sequence.row, source.row, position, beam.token_id))
    state.batch.changed(rows=False)
    return []


def _copy_beam(state: SchedulerState, source: Sequence, sequence: Sequence) -> None:
    """The beam of one row continues in another one too."""
    state.kv.free(sequence.row, pins=False)  # dropped beams are never looked up again
    state.kv.remove_sequence(sequence)
    state.table.overwrite(source.row, sequence.row)
    state.kv.tables.fork(source.row, sequence.row, int(state.table.num_computed[source.row]))


def _end_search(state: SchedulerState, request: RequestState, search: BeamSearch) -> list[EngineCoreOutputs]:
    """Return the hypotheses, best first. If a grammar allows too few, the last sequences end without a token."""
    note_first_outputs(state, np.array(request.rows))
    parts: list[EngineCoreOutputs] = []
    for sequence, hypothesis in zip(request.sequences, search.finished, strict=False):
        ids, columns = columns_of(hypothesis)
        state.stats.generation_tokens += len(ids)
        handle, index = np.array([request.spec.handle], np.int64), np.array([sequence.index], np.int32)
        parts.append(EngineCoreOutputs(handle, index, np.array([len(ids)], np.int32), ids, logprobs=columns))
        finish_sequence(state, sequence, hypothesis.status, hypothesis.stop_token)
    finish_all(state, request, RequestStatus.FINISHED_STOPPED)
    return parts
