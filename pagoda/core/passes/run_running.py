"""RunRunning: continue what runs. Steady steps and batches by numpy; row by row if blocks are short or media wait."""

from dataclasses import dataclass

import numpy as np

from pagoda.core.chunk_limits import ChunkLimits
from pagoda.core.drafts import Drafts
from pagoda.core.kv import KVCacheManager
from pagoda.core.lifecycle import Lifecycle
from pagoda.core.outbox import Outbox
from pagoda.core.preemption import Preemption
from pagoda.core.request import RequestStatus
from pagoda.core.request_state import RequestState, Sequence
from pagoda.core.request_table import RequestTable
from pagoda.core.running_batch import RunningBatch
from pagoda.core.step_plan import StepPlan


@dataclass(frozen=True, slots=True, eq=False)
class RunRunning:
    """Gives every running row, in order of admission, the tokens it lacks, as far as budget and blocks go."""

    table: RequestTable
    kv: KVCacheManager
    drafts: Drafts
    batch: RunningBatch
    limits: ChunkLimits
    preemption: Preemption
    lifecycle: Lifecycle
    outbox: Outbox

    def run(self, plan: StepPlan) -> None:
        """Plan the rows of the running batch."""
        if self.batch.plan_steady_step(plan):
            return
        if self.limits.must_plan_by_row or not self._run_batch(plan):
            self._run_row_by_row(plan)

    # Any mixture of chunks, decodes and drafts, while blocks last

    def _run_batch(self, plan: StepPlan) -> bool:
        """`_run_row_by_row` in one go: equal if no preemption is needed. Otherwise return False, with nothing done."""
        rows = self.batch.running.rows
        start = self.table.num_computed[rows]
        want = self.limits.fit_rows(plan, rows, self.drafts.num_wanted(rows, start))
        runs = want > 0
        if not runs.all():
            rows, start, want = rows[runs], start[runs], want[runs]
        ends = start + want
        short = ends > self.kv.reserved_until[rows]
        if short.any() and not self.kv.allocate_slots(rows[short], ends[short]):
            return False
        self.limits.place_rows(plan, rows, start, want)
        self.drafts.place(plan, rows, ends)
        return True

    # The definition

    def _run_row_by_row(self, plan: StepPlan) -> None:
        """The same, one row after the other.

        If no block is free, preempt the policy's victim until the row fits or is itself preempted.
        """
        running = self.batch.requests
        for request in list(running.values()):
            if request.request_id not in running:
                continue
            for sequence in request.sequences:
                if sequence.row >= 0 and not self._place_row(plan, request, sequence):
                    break

    def _place_row(self, plan: StepPlan, request: RequestState, sequence: Sequence) -> bool:
        """Return False if the request does not run any more."""
        row = sequence.row
        one = np.array([row])
        start = int(self.table.num_computed[row])
        want = int(self.drafts.num_wanted(one, self.table.num_computed[one])[0])
        want = self.limits.fit(plan, request, row, start, want)
        if want <= 0:
            return True
        end = start + want
        end_of_known = min(end, int(self.table.num_known(row)))
        while not self.kv.allocate_slots_for(row, end):
            if len(self.batch.requests) == 1 and end > end_of_known:  # a preemption would not help: drop its drafts
                end = end_of_known
                continue
            if self._has_outgrown_pool(request, end_of_known):
                if self.table.num_pending[row]:
                    return True  # its token in flight still counts: it ends when that is back
                message = f"the KV cache has {self.kv.num_blocks} blocks: too few for this request to continue"
                rows = set(request.rows)
                finishes = self.lifecycle.finish_one(sequence, RequestStatus.FINISHED_LENGTH_CAPPED, message)
                for other in rows.difference(request.rows):  # a beam search ends as a whole
                    plan.take_out(other)
                self.outbox.post_deferred(request, finishes)
                return request.request_id in self.batch.requests
            victim = self.preemption.victim()
            self.preemption.preempt(victim, plan, request)
            if victim is request:
                return False
        self.limits.place(plan, request, row, start, end - start)
        self.drafts.place(plan, one, np.array([end]))
        return True

    def _has_outgrown_pool(self, request: RequestState, end: int) -> bool:
        """No preemption can help: even alone, the row could not continue."""
        if self.kv.sizing.blocks_for_request(end, request.facts.encoder_len) > self.kv.num_blocks:
            return True
        return len(self.batch.requests) == 1 and len(request.unfinished) > 1
