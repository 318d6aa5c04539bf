"""RunRunning: continue what runs. Steady steps and batches by numpy; row by row if blocks are short or media wait."""

from dataclasses import dataclass

import numpy as np

from pagoda.core.chunk_limits import ChunkLimits
from pagoda.core.kv import KVCacheManager
from pagoda.core.lifecycle import Lifecycle
from pagoda.core.outbox import Outbox
from pagoda.core.preemption import Preemption
from pagoda.core.request import RequestState, RequestStatus, Sequence
from pagoda.core.request_table import RequestTable
from pagoda.core.running_batch import RunningBatch
from pagoda.core.scheduler_options import SchedulerOptions
from pagoda.core.step_plan import StepPlan


@dataclass(frozen=True, slots=True, eq=False)
class RunRunning:
    """Gives every running row, in order of admission, the tokens it lacks, as far as budget and blocks go."""

    config: SchedulerOptions
    table: RequestTable
    kv: KVCacheManager
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
        want = self.limits.fit_rows(plan, rows, self._wanted(rows, start))
        runs = want > 0
        if not runs.all():
            rows, start, want = rows[runs], start[runs], want[runs]
        ends = start + want
        short = ends > self.kv.reserved_until[rows]
        if short.any() and not self.kv.allocate_slots(rows[short], ends[short]):
            return False
        plan.place_bulk(rows, start, want, int(want.sum()))
        self.limits.commit_rows(plan, rows, want)
        if self.table.drafts:
            for i in self.table.num_drafts[rows].nonzero()[0].tolist():
                self._place_drafts(plan, int(rows[i]), int(ends[i]))
        return True

    def _wanted(self, rows: np.ndarray, start: np.ndarray) -> np.ndarray:
        """Tokens each row lacks, drafts included; int32 [num_rows]."""
        table = self.table
        known = table.num_tokens[rows] + table.num_pending[rows]
        end = known
        if table.drafts:
            end = known + table.num_drafts[rows]
        if table.drafts or self.config.async_scheduling:
            # The token at the model's last position is sampled, never computed.
            end = np.minimum(end, np.maximum(table.num_tokens[rows], table.max_model_len - 1))
            # The token in flight finishes this row; do not schedule it again.
            ends_in_flight = (table.num_pending[rows] > 0) & (known >= table.length_limit[rows])
            end = np.where(ends_in_flight, start, end)
        return np.maximum(end - start, 0)

    def _place_drafts(self, plan: StepPlan, row: int, end: int) -> None:
        """Plan those drafts of the row that fit before `end`; drop the others."""
        if row not in self.table.drafts:
            return
        drafts = self.table.take_drafts(row)
        count = end - int(self.table.num_tokens[row] + self.table.num_pending[row])
        if count > 0:
            plan.drafts[row] = drafts[:count]

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
        want = int(self._wanted(one, self.table.num_computed[one])[0])
        want = self.limits.fit(plan, request, row, start, want)
        if want <= 0:
            return True
        end = start + want
        without_drafts = min(end, int(self.table.num_tokens[row] + self.table.num_pending[row]))
        while not self.kv.allocate_slots_for(row, end):
            if len(self.batch.requests) == 1 and end > without_drafts:  # a preemption would not help
                end, want = without_drafts, without_drafts - start
                continue
            if self._has_outgrown_pool(request, without_drafts):
                message = f"the KV cache has {self.kv.num_blocks} blocks: too few for this request to go on"
                finish = self.lifecycle.finish_one(sequence, RequestStatus.FINISHED_LENGTH_CAPPED, message)
                self.outbox.post_deferred(request, [finish])
                return request.request_id in self.batch.requests
            victim = self.preemption.victim()
            self.preemption.preempt(victim, plan, request)
            if victim is request:
                return False
        plan.place(row, start, want)
        self._place_drafts(plan, row, end)
        self.limits.commit(plan, request, row)
        return True

    def _has_outgrown_pool(self, request: RequestState, end: int) -> bool:
        """No preemption can help: even alone, the row could not go on."""
        if self.kv.sizing.blocks_for_request(end, request.facts.encoder_len) > self.kv.num_blocks:
            return True
        return len(self.batch.requests) == 1 and len(request.unfinished) > 1
