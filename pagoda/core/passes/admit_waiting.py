"""AdmitWaiting: which waiting requests enter the running batch."""

from dataclasses import dataclass

import numpy as np

from pagoda.core.checks import RequestChecks
from pagoda.core.chunk_limits import ChunkLimits
from pagoda.core.decision_log import Admitted, DecisionLog, Reason
from pagoda.core.gates import Gates
from pagoda.core.kv import AdmissionResult, CachedPrefix, KVCacheManager
from pagoda.core.lifecycle import Lifecycle
from pagoda.core.outbox import Outbox
from pagoda.core.preemption import Preemption
from pagoda.core.queues import RequestQueue
from pagoda.core.request_state import RequestState
from pagoda.core.request_table import RequestTable
from pagoda.core.running_batch import RunningBatch
from pagoda.core.scheduler_output import AdmitKind
from pagoda.core.step_plan import StepPlan


def note_admitted(
    log: DecisionLog, kv: KVCacheManager, request: RequestState, num_tokens: int, num_cached: int
) -> None:
    """Log that the request entered."""
    if log.enabled:
        tables = kv.tables_of(request.unfinished[0].row)
        num_blocks = sum(int(np.count_nonzero(entries)) for entries in tables)
        log.note(Admitted(request.request_id, num_tokens, num_cached, num_blocks, kv.num_free_blocks))


@dataclass(frozen=True, slots=True, eq=False)
class AdmitWaiting:
    """Offers waiting requests a row and blocks. Nothing is allocated for one before all checks pass."""

    waiting: RequestQueue
    table: RequestTable
    kv: KVCacheManager
    batch: RunningBatch
    gates: Gates
    checks: RequestChecks
    limits: ChunkLimits
    preemption: Preemption
    lifecycle: Lifecycle
    outbox: Outbox
    log: DecisionLog

    def run(self, plan: StepPlan) -> None:
        """Admit in queue order while gates, blocks and budget allow."""
        # What running rows fill, in this step too, must be found by the lookups below: decoding does not insert it.
        rows, ends = self.batch.running.rows, plan.ends_of(self.table.num_computed)
        self.kv.cache_blocks(rows, ends[rows])
        self.gates.walk(self.waiting, plan, self._admit, self.preemption.make_way)

    def _admit(self, request: RequestState, plan: StepPlan) -> Reason | None:
        """Let the request in, or end it, or return why it waits."""
        why = self.checks.why_never(request)
        if why is not None:
            self.lifecycle.refuse(request, why)
            return None
        prefix = self.kv.get_computed_blocks(request)
        num_lacking = len(request.unfinished[0].token_ids) - prefix.num_tokens
        num_new = self.limits.fit(plan, request, -1, prefix.num_tokens, num_lacking)
        if num_new == 0:
            self.limits.release(request)
            return self.limits.last_reason
        result = self.kv.can_allocate(request, prefix, num_new, others_run=bool(self.batch.requests))
        if result is AdmissionResult.OK:
            self._enter(request, prefix, num_new, plan)
            return None
        self.limits.release(request)
        if result is AdmissionResult.NEVER:
            self.lifecycle.refuse(request, "needs more KV blocks than there are")
            return None
        return result.value

    def _enter(self, request: RequestState, prefix: CachedPrefix, num_new: int, plan: StepPlan) -> None:
        """All checks passed: take the row and the blocks."""
        start = prefix.num_tokens
        kind = self.lifecycle.enter(request, start)
        row = self.lifecycle.give_row(request.unfinished[0], start)
        self.kv.allocate_prompt(row, prefix, start + num_new, resumed=kind is AdmitKind.RESUMED)
        plan.enter(row, kind, start)
        self.limits.enter(request, row)
        self.limits.place(plan, request, row, start, num_new)
        self.batch.lead(row, request)
        self.outbox.await_first_output(row, request)
        note_admitted(self.log, self.kv, request, num_new, start)
