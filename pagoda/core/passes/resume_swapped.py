"""ResumeSwapped: bring parked requests back from host memory. It mirrors admission."""

from copy import copy
from dataclasses import dataclass

from pagoda.core.chunk_limits import ChunkLimits
from pagoda.core.decision_log import DecisionLog, Reason
from pagoda.core.gates import Gates
from pagoda.core.kv import AdmissionResult, KVCacheManager
from pagoda.core.lifecycle import Lifecycle
from pagoda.core.outbox import Outbox
from pagoda.core.passes.admit_waiting import note_admitted
from pagoda.core.queues import RequestQueue
from pagoda.core.request_state import RequestState, Sequence
from pagoda.core.running_batch import RunningBatch
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
        return self.gates.walk(self.swapped, plan, self._resume)

    def _resume(self, request: RequestState, plan: StepPlan) -> Reason | None:
        """Bring the request back, or end it if that can never be, or return why it waits."""
        sequences = request.unfinished
        shares = self._divide(plan, request)
        if not any(shares) and any(map(_num_lacking, sequences)):
            return self.limits.last_reason
        ends = [sequence.num_computed + share for sequence, share in zip(sequences, shares, strict=True)]
        result = self.kv.can_swap_in(sequences, ends, others_run=bool(self.batch.requests))
        if result is AdmissionResult.NEVER:
            self.lifecycle.refuse(request, "can never come back from host memory")
            return None
        if result is not AdmissionResult.OK:
            return result.value
        kind = self.lifecycle.enter(request)
        for sequence in sequences:
            self.lifecycle.give_row(sequence, sequence.num_computed)
        self.kv.swap_in(sequences)
        for sequence, share, end in zip(sequences, shares, ends, strict=True):
            row, start = sequence.row, sequence.num_computed
            plan.enter(row, kind, start)
            self.limits.enter(request, row)
            if share:
                self.kv.allocate_slots_swapped_in(row, end)
                self.limits.place(plan, request, row, start, share)
        self.outbox.await_first_output(sequences[0].row, request)
        note_admitted(self.log, self.kv, request, sum(shares), 0)
        return None

    def _divide(self, plan: StepPlan, request: RequestState) -> list[int]:
        """How many of the tokens that each sequence lacks it computes in this step."""
        trial, shares = copy(plan), list[int]()  # the request may still have to wait
        for sequence in request.unfinished:
            want = min(_num_lacking(sequence), trial.budget)
            shares.append(self.limits.fit(trial, request, -1, sequence.num_computed, want))
            trial.spend(shares[-1])
        return shares


def _num_lacking(sequence: Sequence) -> int:
    """Tokens of a sequence without a row that are not computed."""
    return len(sequence.token_ids) - sequence.num_computed
