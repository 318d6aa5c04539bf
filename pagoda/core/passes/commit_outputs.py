"""CommitOutputs: apply the results of a step: append tokens, find ends, free what ended, and group by client."""

from dataclasses import dataclass, replace

import numpy as np

from pagoda.base.clock import Clock
from pagoda.core.drafts import Drafts
from pagoda.core.encoder import EncoderInputs
from pagoda.core.failures import find_spoiled
from pagoda.core.in_flight import StepsInFlight
from pagoda.core.kv import KVCacheManager
from pagoda.core.lifecycle import Lifecycle
from pagoda.core.outbox import Outbox, only_finishes
from pagoda.core.passes.extend_beams import BeamResults, ExtendBeams, join_outputs
from pagoda.core.preemption import CostModel, Preemption
from pagoda.core.request import RequestStatus
from pagoda.core.request_state import RequestState, Sequence
from pagoda.core.request_table import RequestTable
from pagoda.core.running_batch import RunningBatch
from pagoda.core.scheduler_output import EngineCoreOutputs, Finish, LogprobColumns, ModelRunnerOutput, SchedulerOutput
from pagoda.core.stats import Counters
from pagoda.core.stops import StopTokens, find_end

NOTHING = only_finishes(())


@dataclass(frozen=True, slots=True, eq=False)
class CommitOutputs:
    """Takes results in the order of planning."""

    table: RequestTable
    kv: KVCacheManager
    drafts: Drafts
    batch: RunningBatch
    in_flight: StepsInFlight
    outbox: Outbox
    lifecycle: Lifecycle
    preemption: Preemption
    encoder: EncoderInputs
    extend_beams: ExtendBeams
    stops: StopTokens
    costs: CostModel
    counters: Counters
    clock: Clock

    def run(
        self, output: SchedulerOutput, result: ModelRunnerOutput, *, raised: bool = False
    ) -> dict[int, EngineCoreOutputs]:
        """Commit the result of a step that computed something. Return what each client gets.

        raised: all rows have failed because the step raised; what earlier steps computed can be trusted.
        """
        self.in_flight.completed(output, result, self.clock)
        self.table.complete(output.rows, output.num_new)
        self.costs.observe(output, result)
        result = self.extend_beams.without_unscored(output, result)
        failures = self._fail_rows(output, result, raised=raised) if result.failed else []
        self.encoder.complete(output.rows)
        beams = self.extend_beams.run(output, result)
        if beams is not None:
            by_client = self._add_beams(self._commit_any(output, beams.rest), beams)
        else:
            commit = self._commit_plain if self._is_plain(output, result) else self._commit_any
            by_client = commit(output, result)
        for client, finish in failures:
            by_client[client] = _with_finishes(by_client.get(client, NOTHING), (finish,))
        if self.table.has_pinned_rows:
            self.table.unpin(output.step)
            self.in_flight.unpin(output.step)
        if self.outbox.has_deferred:
            for client, deferred in self.outbox.take_deferred().items():
                by_client[client] = _with_finishes(by_client.get(client, NOTHING), deferred.finishes)
        return by_client

    def _is_plain(self, output: SchedulerOutput, result: ModelRunnerOutput) -> bool:
        """Whether each row that sampled has one token, and nothing else came back."""
        return (
            result.sampled.shape[1] == 1
            and not output.drafts
            and not result.failed
            and not result.pooled
            and not result.prompt_logprobs
            and not self.table.has_pinned_rows
        )

    # One token per row

    def _commit_plain(self, output: SchedulerOutput, result: ModelRunnerOutput) -> dict[int, EngineCoreOutputs]:
        table, rows, tokens = self.table, output.sample_rows, result.sampled[:, 0]
        if not len(rows):
            return {}
        running = self.batch.running
        if rows is running.rows:
            at, limits = running.at, running.length_limits
            handles, indices, counts = running.handles, running.indices, running.ones
        else:
            at = rows.astype(np.intp)
            handles, indices, counts = table.handle[at], table.index[at], np.ones(len(at), np.int32)
            limits = table.length_limit[at]
        ends = table.commit(at, tokens)
        self.counters.generation_tokens += len(at)
        may_end = self.stops.among(tokens) | (ends >= limits)
        clients = table.client[at] if running.client is None else None
        outputs = EngineCoreOutputs(handles, indices, counts, tokens, logprobs=result.logprobs)
        first = self.outbox.take_first_outputs(rows) if self.outbox.awaiting_first_output else []
        finishes = self._end_rows(rows, tokens, may_end) if np.count_nonzero(may_end) else []
        return self._by_client(outputs, clients, running.client, finishes, first)

    def _end_rows(self, rows: np.ndarray, tokens: np.ndarray, may_end: np.ndarray) -> list[tuple[int, Finish]]:
        """End those rows that the new token really ends. Return (client, Finish)."""
        finishes: list[tuple[int, Finish]] = []
        for i in np.flatnonzero(may_end).tolist():
            row = int(rows[i])
            sequence = self.table.owner(row)
            facts = sequence.request.facts
            output_len = int(self.table.num_tokens[row]) - 1 - facts.num_prompt_tokens
            end = find_end(facts, output_len, [int(tokens[i])], int(self.table.length_limit[row]))
            if end is not None:
                finishes.append((facts.client_index, self.lifecycle.finish(sequence, end.status, end.stop_token)))
        return finishes

    # Drafts, late results, failures, pooled rows

    def _commit_any(self, output: SchedulerOutput, result: ModelRunnerOutput) -> dict[int, EngineCoreOutputs]:
        """The definition, row by row: `_commit_plain` equals it for its case."""
        table, rows = self.table, output.sample_rows
        finishes: list[tuple[int, Finish]] = []
        num_kept = np.zeros(len(rows), np.int32)  # tokens of each sample that count
        clients = table.client[rows]
        first = self.outbox.take_first_outputs(rows[result.num_sampled > 0])
        prompt_logprobs = self._new_prompt_logprobs(output, result)  # before a first token ends its request
        table.settle_expected(rows, output.drafts)
        self.batch.changed(rows=False)  # counts move by more or less than one token
        for i, row in enumerate(rows.tolist()):
            sequence = table.sequence_of[row]
            if sequence is None or sequence.is_finished:
                continue
            tokens = result.sampled[i, : result.num_sampled[i]].tolist()
            self.drafts.verified(sequence, row, len(output.drafts.get(row, ())), len(tokens))
            if sequence.row < 0 and tokens and not sequence.request.has_output:
                first.append(self.outbox.note_first_output(sequence.request))  # its row was forgotten
            num_kept[i], finish = self._append(sequence, tokens)
            if finish is not None:
                finishes.append((int(clients[i]), finish))
        pooled: dict[int, dict[int, np.ndarray]] = {}
        if result.pooled:
            first += self.outbox.take_first_outputs(np.fromiter(result.pooled, np.int32, len(result.pooled)))
        for row, vector in result.pooled.items():
            sequence = table.sequence_of[row]
            if sequence is None or sequence.is_finished:
                continue
            facts = sequence.request.facts
            if not sequence.request.has_output:  # it was preempted or parked while in flight; its vector is complete
                first.append(self.outbox.note_first_output(sequence.request))
            finish = self.lifecycle.finish(sequence, RequestStatus.FINISHED_STOPPED)
            finishes.append((facts.client_index, finish))
            pooled.setdefault(facts.client_index, {})[facts.handle] = vector
        self.counters.generation_tokens += int(num_kept.sum())
        outputs = _kept_outputs(table, rows, result, num_kept)
        by_client = self._by_client(outputs, clients[num_kept > 0], None, finishes, first)
        for client, by_handle in prompt_logprobs.items():
            by_client[client] = replace(by_client.get(client, NOTHING), prompt_logprobs=by_handle)
        for client, vectors in pooled.items():
            by_client[client] = replace(by_client.get(client, NOTHING), pooled=vectors)
        return by_client

    def _append(self, sequence: Sequence, tokens: list[int]) -> tuple[int, Finish | None]:
        """Append to a running sequence, or to one that was preempted or parked meanwhile. Return (kept, its end)."""
        table, facts, row = self.table, sequence.request.facts, sequence.row
        if row >= 0:
            num_tokens, limit = int(table.num_tokens[row]), int(table.length_limit[row])
        else:
            num_tokens, limit = len(sequence.token_ids), table.limit_of(facts)
        end = find_end(facts, num_tokens - facts.num_prompt_tokens, tokens, limit)
        if end is None:
            table.append_tokens(sequence, tokens)
            return len(tokens), None
        table.append_tokens(sequence, tokens[: end.num_kept])
        return end.num_kept, self.lifecycle.finish(sequence, end.status, end.stop_token)

    def _fail_rows(
        self, output: SchedulerOutput, result: ModelRunnerOutput, *, raised: bool
    ) -> list[tuple[int, Finish]]:
        """End the sequences of the rows that failed, and undo what was planned on top of them.

        No block that such a row should have filled stays in the prefix cache. Sequences that read one, or forked from
        such a row, are computed again: their results, which are in flight, are dropped.
        """
        lost_runs = output.encoder_runs if raised else ()
        waiting = self.encoder.waiting_for(lost_runs)
        dependent = self.table.rows_of(waiting)
        rows, blocks = find_spoiled(result.failed, dependent, output, self.in_flight.outputs, self.kv)
        sequences = [self.table.sequence_of[row] for row in rows]
        finishes: list[tuple[int, Finish]] = []
        for row, message in result.failed.items():
            sequence = self.table.sequence_of[row]
            if sequence is None or sequence.is_finished:
                continue
            if not raised:
                self.kv.uncache(sequence)  # its numbers may have been wrong before they showed in the logits
            status = RequestStatus.FINISHED_IGNORED if row in result.refused else RequestStatus.FINISHED_ERROR
            client = sequence.request.facts.client_index
            finishes += [(client, finish) for finish in self.lifecycle.finish_one(sequence, status, message=message)]
        spoiled = {one.request for one in sequences if one is not None and not one.is_finished}
        requests = self.lifecycle.requests
        spoiled.update(requests[request_id] for request_id in waiting if request_id in requests)
        for request in sorted(spoiled, key=lambda one: -one.admission):  # so that the queue keeps their order
            self.preemption.recompute(request)
        self.encoder.drop_outputs(lost_runs)
        self.kv.uncache_blocks(blocks)
        return finishes

    def _add_beams(self, by_client: dict[int, EngineCoreOutputs], beams: BeamResults) -> dict[int, EngineCoreOutputs]:
        """Add the outputs of beam searches that are done to the others of the step."""
        added = self._by_client(NOTHING, NOTHING.counts, None, beams.finishes, beams.first)
        for client, outputs in added.items():
            own = [part for of, part in zip(beams.clients, beams.outputs, strict=True) if of == client]
            by_client[client] = join_outputs([*([by_client[client]] if client in by_client else []), *own, outputs])
        self.counters.generation_tokens += sum(len(part.token_ids) for part in beams.outputs)
        return by_client

    def _new_prompt_logprobs(
        self, output: SchedulerOutput, result: ModelRunnerOutput
    ) -> dict[int, dict[int, LogprobColumns]]:
        """Return prompt logprobs by client and handle, without positions that were sent before a preemption."""
        by_client: dict[int, dict[int, LogprobColumns]] = {}
        for row, columns in result.prompt_logprobs.items():
            sequence = self.table.sequence_of[row]
            if sequence is None or sequence.is_finished or row in result.failed:
                continue
            request, count = sequence.request, len(columns.ranks)
            start = int(output.start[output.rows == row][0])
            num_sent = max(request.num_prompt_logprobs_sent - start, 0)
            request.num_prompt_logprobs_sent = max(request.num_prompt_logprobs_sent, start + count)
            if num_sent < count:
                new = _select(columns, np.arange(count) >= num_sent)
                by_client.setdefault(request.facts.client_index, {})[request.facts.handle] = new
        return by_client

    def _by_client(
        self,
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
            facts = request.facts
            self.counters.prompt_tokens += facts.num_prompt_tokens
            one = by_client.get(facts.client_index, NOTHING)  # a first token that failed leaves only an end to report
            by_client[facts.client_index] = replace(
                one,
                num_cached_tokens=one.num_cached_tokens | {facts.handle: request.num_cached_tokens},
                queue_s=one.queue_s | {facts.handle: request.queue_s},
            )
        ended: dict[int, list[Finish]] = {}
        for one_client, finish in finishes:
            ended.setdefault(one_client, []).append(finish)
        for one_client, of_client in ended.items():
            by_client[one_client] = _with_finishes(by_client.get(one_client, NOTHING), tuple(of_client))
        return by_client


def _kept_outputs(
    table: RequestTable, rows: np.ndarray, result: ModelRunnerOutput, num_kept: np.ndarray
) -> EngineCoreOutputs:
    """Return the first `num_kept` tokens of each row, with their logprobs."""
    columns = np.arange(result.sampled.shape[1])
    kept, emitted = columns < num_kept[:, None], num_kept > 0
    logprobs = result.logprobs
    if logprobs is not None:
        logprobs = _select(logprobs, kept[columns < result.num_sampled[:, None]])
    return EngineCoreOutputs(
        table.handle[rows[emitted]],
        table.index[rows[emitted]],
        num_kept[emitted],
        result.sampled[kept],
        logprobs=logprobs,
    )


def _with_finishes(outputs: EngineCoreOutputs, finishes: tuple[Finish, ...]) -> EngineCoreOutputs:
    return replace(outputs, finishes=outputs.finishes + finishes)


def _of_client(outputs: EngineCoreOutputs, mine: np.ndarray) -> EngineCoreOutputs:
    """Return the entries of the sequences in the mask."""
    tokens = np.repeat(mine, outputs.counts)
    logprobs = _select(outputs.logprobs, tokens) if outputs.logprobs is not None else None
    return EngineCoreOutputs(
        outputs.handles[mine],
        outputs.sequences[mine],
        outputs.counts[mine],
        outputs.token_ids[tokens],
        logprobs=logprobs,
    )


def _select(columns: LogprobColumns, mask: np.ndarray) -> LogprobColumns:
    return LogprobColumns(columns.token_ids[mask], columns.logprobs[mask], columns.ranks[mask])
