"""Lifecycle: requests by id, their status and their end. The only place that makes every owner forget a row."""

import logging
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Protocol

from pagoda.base.clock import Clock
from pagoda.core.chunk_limits import ChunkLimits
from pagoda.core.decision_log import DecisionLog, Reason
from pagoda.core.gates import Gates
from pagoda.core.in_flight import StepsInFlight
from pagoda.core.kv import KVCacheManager
from pagoda.core.outbox import Outbox
from pagoda.core.policy import Policy
from pagoda.core.queues import RequestQueue
from pagoda.core.request import RequestStatus
from pagoda.core.request_state import RequestState, Sequence
from pagoda.core.request_table import RequestTable
from pagoda.core.running_batch import RunningBatch
from pagoda.core.scheduler_output import AdmitKind, Finish
from pagoda.core.stops import StopTokens

logger = logging.getLogger("pagoda")


class RowOwner(Protocol):
    """Keeps something by row."""

    def forget(self, row: int) -> None:
        """The row's sequence has left it."""
        ...


@dataclass(slots=True, eq=False)
class Lifecycle:
    """Moves requests between waiting, running, swapped and finished.

    requests: all that have not ended, by id.   forgetful: what keeps something by row.
    """

    requests: dict[str, RequestState]
    table: RequestTable
    kv: KVCacheManager
    batch: RunningBatch
    in_flight: StepsInFlight
    outbox: Outbox
    waiting: RequestQueue
    swapped: RequestQueue
    stops: StopTokens
    gates: Gates
    limits: ChunkLimits
    policy: Policy
    clock: Clock
    log: DecisionLog
    forgetful: Items[RowOwner]
    _num_admissions: int = field(default=0, init=False)

    # In

    def add(self, request: RequestState) -> None:
        """A new request waits."""
        self.requests[request.request_id] = request
        self.stops.add(request.facts)
        self.waiting.push(request)

    def enter(self, request: RequestState, num_cached: int = 0) -> AdmitKind:
        """The request enters the running batch; the caller gives rows to its sequences. Return what it is to workers.

        num_cached: its tokens that the prefix cache has.
        """
        queue, kind = self.waiting, AdmitKind.RESUMED
        if request.status is RequestStatus.SWAPPED:
            queue, kind = self.swapped, AdmitKind.SWAPPED_IN
        elif request.admission < 0:
            kind = AdmitKind.NEW
            request.num_cached_tokens = num_cached
            request.queue_s = self.clock.now() - request.facts.arrival_time_s
        queue.remove(request)
        self._num_admissions += 1
        request.admission = self._num_admissions
        request.status = RequestStatus.RUNNING
        self.batch.add(request)
        self.gates.enter(request)
        return kind

    def give_row(self, sequence: Sequence, num_computed: int) -> int:
        """The sequence gets a row, without blocks. Return the row."""
        return self._joined(sequence, self.table.admit(sequence, num_computed))

    def fork_row(self, source: int, sequence: Sequence) -> int:
        """The sequence gets a row with the tokens of `source`, without blocks. Return the row."""
        return self._joined(sequence, self.table.fork(source, sequence))

    def _joined(self, sequence: Sequence, row: int) -> int:
        sequence.status = RequestStatus.RUNNING
        self.batch.changed()
        return row

    # Out of the running batch

    def requeue(self, request: RequestState) -> None:
        """The request loses all KV, wherever that is, and waits again. Tokens are kept."""
        is_parked = request.status is RequestStatus.SWAPPED
        for sequence in request.sequences:
            if sequence.row >= 0:
                self._free_row(sequence)
            if not sequence.is_finished:
                self.kv.drop_parked(sequence)
                self.table.rewind(sequence)
                sequence.status = RequestStatus.PREEMPTED
        if request.facts.is_beam_search:
            self._restart_search(request)
        if is_parked:
            self.swapped.remove(request)
        else:
            self._leave(request)
        request.status = RequestStatus.PREEMPTED
        request.sort_key = self.policy.key_on_return(request)
        self.waiting.push(request)

    def _restart_search(self, request: RequestState) -> None:
        """Begin the beam search again, with the same result: without the blocks that its beams shared, they might no
        longer fit. What it loses was sent to no client."""
        for sequence in request.sequences:
            self.table.restart(sequence)
            self.kv.forget_sequence(sequence)
        request.beams, request.awaiting_fork = None, True
        self.kv.hash_prompt(request)

    def park(self, request: RequestState) -> None:
        """The request's KV moves to host memory; it waits there with all that it has computed."""
        sequences = [sequence for sequence in request.sequences if sequence.row >= 0]
        self.kv.swap_out(sequences)
        for sequence in sequences:
            self._leave_row(sequence)
            sequence.status = RequestStatus.SWAPPED
        self._leave(request)
        request.status = RequestStatus.SWAPPED
        self.swapped.push(request)

    def _leave(self, request: RequestState) -> None:
        self.batch.remove(request)
        self.gates.leave(request)
        self.limits.release(request)

    def _free_row(self, sequence: Sequence) -> None:
        """The sequence leaves its row and all its blocks."""
        self.kv.free(sequence.row)
        self._leave_row(sequence)

    def _leave_row(self, sequence: Sequence) -> None:
        """The sequence leaves its row, which has no blocks any more."""
        row, last_step = sequence.row, self.in_flight.departed(sequence)
        self.table.release(sequence, last_step)
        self.outbox.post_released(row)
        for owner in self.forgetful:
            owner.forget(row)

    # The end

    def finish(
        self, sequence: Sequence, status: RequestStatus, stop_reason: int | None = None, message: str | None = None
    ) -> Finish:
        """The sequence has ended, and with the last one the request. What it held is free at once."""
        request = sequence.request
        self.batch.sequence_ended(request)
        sequence.status = status
        if sequence.row >= 0:
            self._free_row(sequence)
        self.kv.forget_sequence(sequence)
        is_done = not request.unfinished
        if is_done:
            self._remove(request, status)
        return Finish(
            request.request_id,
            request.facts.handle,
            sequence.index,
            status,
            stop_reason,
            is_done,
            message,
            request.num_preemptions,
            request.num_draft_tokens,
            request.num_accepted_tokens,
        )

    def _remove(self, request: RequestState, status: RequestStatus) -> None:
        """No queue keeps anything of the request."""
        if request.request_id in self.batch.requests:
            self._leave(request)
        elif request.request_id in self.swapped:
            self.swapped.remove(request)
        elif request.request_id in self.waiting:
            self.waiting.remove(request)
        request.status = status
        del self.requests[request.request_id]
        self.stops.forget(request.facts)
        self.outbox.post_finished(request)

    def finish_one(self, sequence: Sequence, status: RequestStatus, message: str | None = None) -> list[Finish]:
        """`finish` for one sequence of several. If others wait for its row, the request starts again without it.

        Of a beam search, all sequences end: none of them has a result of its own.
        """
        request = sequence.request
        if request.facts.is_beam_search:
            return self.finish_all(request, status, message)
        if sequence.row in self.batch.leaders and len(request.unfinished) > 1:
            self.requeue(request)
        return [self.finish(sequence, status, message=message)]

    def finish_all(self, request: RequestState, status: RequestStatus, message: str | None = None) -> list[Finish]:
        """All unfinished sequences of the request end together."""
        return [self.finish(sequence, status, message=message) for sequence in request.unfinished]

    def refuse(self, request: RequestState, why: str) -> None:
        """The request ends without being served. If it has output already, that stays, and it ends for its length."""
        num_prompt = request.facts.num_prompt_tokens
        has_output = any(len(sequence.token_ids) > num_prompt for sequence in request.sequences)
        status = RequestStatus.FINISHED_LENGTH_CAPPED if has_output else RequestStatus.FINISHED_IGNORED
        logger.warning("request %s is ignored: it %s", request.request_id, why)
        finishes = self.finish_all(request, status, f"request {request.request_id} {why}")
        self.outbox.post_deferred(request, finishes)
        self.log.held(request.request_id, Reason.NEVER, stops_queue=False)
