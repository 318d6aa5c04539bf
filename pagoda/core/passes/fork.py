"""Fork: sequences that waited for their request's first row get rows of their own."""

from dataclasses import dataclass

import numpy as np

from pagoda.core.chunk_limits import ChunkLimits
from pagoda.core.kv import KVCacheManager
from pagoda.core.lifecycle import Lifecycle
from pagoda.core.request_state import RequestState
from pagoda.core.request_table import RequestTable
from pagoda.core.running_batch import RunningBatch
from pagoda.core.scheduler_output import AdmitKind, RowFork
from pagoda.core.step_plan import StepPlan


@dataclass(frozen=True, slots=True, eq=False)
class Fork:
    """Runs after the counts have advanced: a prompt may be complete with this step."""

    table: RequestTable
    kv: KVCacheManager
    batch: RunningBatch
    lifecycle: Lifecycle
    limits: ChunkLimits

    def run(self, plan: StepPlan) -> None:
        """Fork the sequences of new requests, then let those of resumed ones join."""
        leaders = list(self.batch.leaders.items())
        for row, request in leaders:
            if request.awaiting_fork and self.table.num_computed[row] >= self.table.num_tokens[row]:
                self._fork(plan, row, request)
        for row, request in leaders:
            if row in self.batch.leaders and not request.awaiting_fork:
                if all(sequence.row >= 0 for sequence in request.unfinished):
                    self.batch.dissolve(row)  # those that waited for it have ended
                    continue
                shared = self._num_shared_tokens(request)
                if self.table.num_computed[row] >= shared:
                    self._join(plan, row, request, shared)

    def _fork(self, plan: StepPlan, source: int, request: RequestState) -> None:
        """The prompt is complete: the other sequences share its blocks, and sample from the same logits."""
        self.batch.dissolve(source)
        request.awaiting_fork = False
        first = self.table.owner(source)
        forks: list[RowFork] = []
        for sequence in request.unfinished:
            if sequence is first:
                continue
            row = self.lifecycle.fork_row(source, sequence)
            self.kv.fork(source, row, int(self.table.num_computed[source]))
            forks.append(RowFork(source, row, sequence.index, sequence.seed))
        where = int(np.flatnonzero(plan.rows == source)[0])
        plan.forks = (*plan.forks, *forks)
        plan.sample_rows = np.concatenate((plan.sample_rows, np.array([fork.dst for fork in forks], np.int32)))
        plan.sample_index = np.concatenate((plan.sample_index, np.full(len(forks), where, np.int32)))

    def _num_shared_tokens(self, request: RequestState) -> int:
        """Tokens in the full prompt blocks that the sequences of a resumed request share.

        One token at least is left to compute: sequences may have lost their first one in flight, to a cache reset.
        """
        known = min(len(sequence.token_ids) for sequence in request.unfinished if sequence.row < 0)
        return min(request.facts.num_prompt_tokens, known - 1) // self.kv.block_size * self.kv.block_size

    def _join(self, plan: StepPlan, leader: int, request: RequestState, shared: int) -> None:
        """The resumed first sequence has the full prompt blocks again: the others share them, and compute the rest."""
        self.batch.dissolve(leader)
        for sequence in request.unfinished:
            if sequence.row == leader:
                continue
            row = self.lifecycle.give_row(sequence, shared)
            self.kv.fork(leader, row, shared)
            plan.enter(row, AdmitKind.RESUMED, shared)
            self.limits.enter(request, row)
            self.batch.start_prefill(row)
