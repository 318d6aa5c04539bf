"""AdmitWaiting: which waiting requests enter the running batch."""

from dataclasses import dataclass

import numpy as np

from pagoda.base.config import SchedulingMode
from pagoda.core.chunk_limits import ChunkLimits
from pagoda.core.decision_log import Admitted, DecisionLog, Reason
from pagoda.core.gates import Gates, Skip
from pagoda.core.kv import AdmissionResult, CachedPrefix, KVCacheManager
from pagoda.core.lifecycle import Lifecycle
from pagoda.core.outbox import Outbox
from pagoda.core.preemption import Preemption
from pagoda.core.queues import QueueScan, RequestQueue
from pagoda.core.request import RequestState, RequestStatus, Sequence
from pagoda.core.request_table import RequestTable
from pagoda.core.running_batch import RunningBatch
from pagoda.core.scheduler_options import SchedulerOptions
from pagoda.core.scheduler_output import AdmitKind
from pagoda.core.stats import Counters
from pagoda.core.step_plan import StepPlan

REASONS = {
    AdmissionResult.NO_BLOCKS: Reason.BLOCKS,
    AdmissionResult.WATERMARK: Reason.WATERMARK,
    AdmissionResult.NEVER: Reason.NEVER,
}


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
    """Strict queue order; only requests held back by a gate may be skipped."""

    config: SchedulerOptions
    waiting: RequestQueue
    table: RequestTable
    kv: KVCacheManager
    batch: RunningBatch
    gates: Gates
    limits: ChunkLimits
    preemption: Preemption
    lifecycle: Lifecycle
    outbox: Outbox
    log: DecisionLog
    counters: Counters

    def run(self, plan: StepPlan) -> None:
        """Admit in queue order while gates, blocks and budget allow."""
        if self.kv.caches_prefixes:
            self._cache_filled(plan)
        scan = QueueScan(self.waiting)
        while plan.budget > 0 and (request := scan.peek()) is not None:
            hold = self.gates.check(request, self.waiting, plan)
            if hold is not None and hold.skip is not Skip.QUEUE:
                self.log.held(request.request_id, hold.reason, stops_queue=False)
                scan.skip_key(request) if hold.skip is Skip.KEY else scan.skip(request)
                continue
            reason = hold.reason if hold is not None else self._admit(request, plan)
            if reason is not None and not self.preemption.make_way(request, plan, reason):
                self.log.held(request.request_id, reason, stops_queue=True)
                break
        scan.close()

    def _cache_filled(self, plan: StepPlan) -> None:
        """Make the blocks that running rows have filled findable, this step's included. Decoding leaves it to us."""
        rows = self.batch.running.rows
        ends = plan.ends_of(self.table.num_computed - self.table.num_pending)
        self.kv.cache_blocks(rows, ends[rows])

    def _admit(self, request: RequestState, plan: StepPlan) -> Reason | None:
        """Let the first request in, or end it, or return why it waits. Nothing is allocated before all checks pass."""
        sequences = request.unfinished
        leader, num_tokens = sequences[0], len(sequences[0].token_ids)
        sibling_blocks = 0 if request.awaiting_fork else self._sibling_blocks(request, sequences[1:])
        why = self._why_never(request, len(sequences), num_tokens, sibling_blocks)
        if why is not None:
            self.lifecycle.refuse(request, why)
            return None
        prefix = self.kv.get_computed_blocks(leader, skip=self._skips_prefix_cache(request, len(sequences)))
        num_new = self.limits.fit(plan, request, -1, prefix.num_tokens, num_tokens - prefix.num_tokens)
        if num_new == 0:
            self.limits.release(request)
            return self.limits.last_reason
        need = self._blocks_needed(request, num_tokens, num_new, prefix, sibling_blocks)
        result = self.kv.can_allocate(need, others_run=bool(self.batch.requests))
        if result is AdmissionResult.OK:
            self._enter(request, sequences, prefix, num_new, plan)
            return None
        self.limits.release(request)
        if result is AdmissionResult.NEVER:
            self.lifecycle.refuse(request, "needs more KV blocks than there are")
            return None
        return REASONS[result]

    def _why_never(self, request: RequestState, num_seqs: int, num_tokens: int, sibling_blocks: int) -> str | None:
        """Return why a request can never be served: too long for a phased step, too many sequences or blocks."""
        config = self.config
        need = self.kv.sizing.blocks_for_request(num_tokens, request.facts.encoder_len) + sibling_blocks
        phased = config.scheduling_mode is SchedulingMode.PHASED
        if need > self.kv.num_blocks:
            return f"needs {need} KV blocks of the {self.kv.num_blocks} there are"
        if num_seqs > config.max_num_seqs:
            return f"asks for {num_seqs} sequences at once, max_num_seqs is {config.max_num_seqs}"
        if phased and request.facts.num_prompt_tokens > config.max_num_batched_tokens:
            num_tokens, limit = request.facts.num_prompt_tokens, config.max_num_batched_tokens
            return f"has {num_tokens} tokens; a phased step takes {limit} (max_num_batched_tokens)"
        return None

    def _skips_prefix_cache(self, request: RequestState, num_seqs: int) -> bool:
        facts = request.facts
        wants_prompt_logprobs = facts.sampling is not None and facts.sampling.prompt_logprobs is not None
        # Sequences that come back share the first one's blocks, which a hit in a window group may not all have.
        shares_behind_window = self.kv.has_windows and num_seqs > 1 and not request.awaiting_fork
        return facts.skip_prefix_read or wants_prompt_logprobs or shares_behind_window

    def _blocks_needed(
        self, request: RequestState, num_tokens: int, num_new: int, prefix: CachedPrefix, sibling_blocks: int
    ) -> int:
        """Blocks for this chunk; with `admit_whole_prompt`, for all known tokens (a check, not a reservation)."""
        kv, encoder_len = self.kv, request.facts.encoder_len
        need = kv.blocks_to_admit(kv.sizing.slots_up_to(prefix.num_tokens + num_new), prefix, encoder_len)
        if self.config.admit_whole_prompt:
            whole = kv.blocks_to_admit(num_tokens, prefix, encoder_len, capped=True)
            need = max(need, whole + sibling_blocks)
        return need

    def _sibling_blocks(self, request: RequestState, siblings: list[Sequence]) -> int:
        """Blocks of sequences that come back next to the first one, after the full prompt blocks that all share."""
        lengths = [len(sequence.token_ids) for sequence in siblings]
        return self.kv.sizing.blocks_for_siblings(lengths, request.facts.num_prompt_tokens)

    def _enter(
        self, request: RequestState, sequences: list[Sequence], prefix: CachedPrefix, num_new: int, plan: StepPlan
    ) -> None:
        """All checks passed: take the row and the blocks."""
        resumed = request.status is RequestStatus.PREEMPTED
        leader, start = sequences[0], prefix.num_tokens
        self.lifecycle.enter(request)
        row = self.lifecycle.give_row(leader, start)
        self.kv.allocate_prompt(row, prefix, start + num_new, request.facts.encoder_len)
        plan.enter(row, AdmitKind.RESUMED if resumed else AdmitKind.NEW, start)
        plan.place(row, start, num_new)
        self.limits.enter(request, row)
        self.limits.commit(plan, request, row)
        if len(sequences) > 1:
            self.batch.lead(row, request)
        self.outbox.await_first_output(row, request)
        self._count_prefix(request, len(leader.token_ids), start, resumed)
        note_admitted(self.log, self.kv, request, num_new, start)

    def _count_prefix(self, request: RequestState, num_tokens: int, num_cached: int, resumed: bool) -> None:
        if not resumed:
            request.num_cached_tokens = num_cached
        if not self.kv.caches_prefixes:
            return
        if resumed:
            self.counters.prefix_queries_resumed += num_tokens
            self.counters.prefix_hits_resumed += num_cached
        else:
            self.counters.prefix_queries += num_tokens
            self.counters.prefix_hits += num_cached
