"""ResumeSwapped: bring parked requests back from host memory. It mirrors admission."""

from dataclasses import dataclass

from pagoda.core.chunk_limits import ChunkLimits
from pagoda.core.decision_log import DecisionLog
from pagoda.core.gates import Gates, Skip
from pagoda.core.kv import AdmissionResult, KVCacheManager
from pagoda.core.lifecycle import Lifecycle
from pagoda.core.outbox import Outbox
from pagoda.core.passes.admit_waiting import REASONS, note_admitted
from pagoda.core.queues import QueueScan, RequestQueue
from pagoda.core.request import RequestState, Sequence
from pagoda.core.running_batch import RunningBatch
from pagoda.core.scheduler_output import AdmitKind
from pagoda.core.step_plan import StepPlan


@dataclass(frozen=True, slots=True, eq=False)
class ResumeSwapped:
    """Asks swapped requests in queue order; a request comes back with all its sequences or not at all."""

    swapped: RequestQueue
    gates: Gates
    kv: KVCacheManager
    batch: RunningBatch
    limits: ChunkLimits
    lifecycle: Lifecycle
    outbox: Outbox
    log: DecisionLog

    def run(self, plan: StepPlan) -> bool:
        """Bring parked requests back while gates, blocks and budget allow.

        Return False if one of them has to wait: then no waiting request may enter before it.
        """
        scan = QueueScan(self.swapped)
        is_open = True
        while is_open and plan.budget > 0 and (request := scan.peek()) is not None:
            hold = self.gates.check(request, self.swapped, plan)
            if hold is not None:
                is_open = hold.skip is not Skip.QUEUE
                self.log.held(request.request_id, hold.reason, stops_queue=not is_open)
                scan.skip_key(request) if hold.skip is Skip.KEY else scan.skip(request)
            else:
                is_open = self._resume(request, plan)
        scan.close()
        return is_open and plan.budget > 0

    def _resume(self, request: RequestState, plan: StepPlan) -> bool:
        """Bring the request back, or end it if that can never be. Return False if it has to wait."""
        sequences = request.unfinished
        shares = self._divide(plan, request)
        if not any(shares) and any(map(_num_lacking, sequences)):
            self.log.held(request.request_id, self.limits.last_reason, stops_queue=True)
            return False
        ends = [sequence.num_computed + share for sequence, share in zip(sequences, shares, strict=True)]
        need = self.kv.blocks_to_swap_in(sequences, ends)
        result = self.kv.can_allocate(need, others_run=bool(self.batch.requests))
        if result is AdmissionResult.NEVER:
            self.lifecycle.refuse(request, "can never come back from host memory")
            return True
        if result is not AdmissionResult.OK:
            self.log.held(request.request_id, REASONS[result], stops_queue=True)
            return False
        self.lifecycle.enter(request)
        for sequence in sequences:
            self.lifecycle.give_row(sequence, sequence.num_computed)
        self.kv.swap_in(sequences)
        for sequence, share, end in zip(sequences, shares, ends, strict=True):
            row, start = sequence.row, sequence.num_computed
            plan.enter(row, AdmitKind.SWAPPED_IN, start)
            self.limits.enter(request, row)
            if share:
                self.kv.allocate_slots_swapped_in(row, end)
                plan.place(row, start, share)
                self.limits.commit(plan, request, row)
        self.outbox.await_first_output(sequences[0].row, request)
        note_admitted(self.log, self.kv, request, sum(shares), 0)
        return True

    def _divide(self, plan: StepPlan, request: RequestState) -> list[int]:
        """How many of the tokens that each sequence lacks it computes in this step."""
        left, shares = plan.budget, list[int]()
        for sequence in request.unfinished:
            want = min(_num_lacking(sequence), left)
            share = self.limits.fit(plan, request, -1, sequence.num_computed, want)
            shares.append(share)
            left -= share
        return shares


def _num_lacking(sequence: Sequence) -> int:
    """Tokens of a sequence without a row that are not computed."""
    return len(sequence.token_ids) - sequence.num_computed
