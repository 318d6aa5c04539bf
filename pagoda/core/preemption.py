"""Preemption: which request leaves the running batch when blocks run out, and whether its KV is dropped or swapped."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pagoda.base.config import PreemptionMode
from pagoda.core.decision_log import DecisionLog, Preempted, Reason
from pagoda.core.encoder import EncoderInputs
from pagoda.core.in_flight import StepsInFlight
from pagoda.core.kv import KVCacheManager
from pagoda.core.lifecycle import Lifecycle
from pagoda.core.outbox import Outbox
from pagoda.core.policy import Policy
from pagoda.core.request import RequestStatus
from pagoda.core.request_state import RequestState
from pagoda.core.request_table import RequestTable
from pagoda.core.running_batch import RunningBatch
from pagoda.core.scheduler_options import SchedulerOptions
from pagoda.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from pagoda.core.stats import Counters
from pagoda.core.step_plan import StepPlan

_NO_ROOM = (Reason.NUM_SEQS, Reason.BLOCKS, Reason.WATERMARK)
"""What a preemption can mend."""


class CostModel:
    """What a computed token and a copied block cost, measured in completed steps (exponential averages).

    prefill_s_per_token: seconds.   copy_s_per_block: seconds, one direction. Zero until measured.
    """

    _NEW_SHARE = 0.2
    _MIN_PREFILL_TOKENS = 16  # smaller steps measure latency, not prefill speed

    def __init__(self) -> None:
        self.prefill_s_per_token = 0.0
        self.copy_s_per_block = 0.0

    def observe(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Take the measurements of a completed step. Its duration_s includes swap_s."""
        num_copied = len(output.swap_in) + len(output.swap_out)
        if num_copied and result.swap_s > 0:
            self.copy_s_per_block = self._mix(self.copy_s_per_block, result.swap_s / num_copied)
        num_tokens, compute_s = output.total_num_scheduled_tokens, result.duration_s - result.swap_s
        if num_tokens - len(output.rows) >= self._MIN_PREFILL_TOKENS and compute_s > 0:
            self.prefill_s_per_token = self._mix(self.prefill_s_per_token, compute_s / num_tokens)

    def _mix(self, old: float, new: float) -> float:
        return new if old == 0 else (1 - self._NEW_SHARE) * old + self._NEW_SHARE * new

    def swap_is_cheaper(self, num_tokens: int, num_blocks: int) -> bool:
        """Whether copying `num_blocks` out and in beats computing `num_tokens` again. Unmeasured copies are tried."""
        return 2 * num_blocks * self.copy_s_per_block < num_tokens * self.prefill_s_per_token


PreemptionRule = Callable[[RequestState, int, int], bool]
"""Whether to swap a request, with that many computed tokens in that many blocks, if the host has room."""


def make_preemption_rule(mode: PreemptionMode, costs: CostModel) -> PreemptionRule:
    rules: dict[PreemptionMode, PreemptionRule] = {
        # While more than one sequence is unfinished: recomputing would compute each of them.
        PreemptionMode.AUTO: lambda request, num_tokens, num_blocks: len(request.unfinished) > 1,
        PreemptionMode.RECOMPUTE: lambda request, num_tokens, num_blocks: False,
        PreemptionMode.SWAP: lambda request, num_tokens, num_blocks: True,
        PreemptionMode.COST: lambda request, num_tokens, num_blocks: costs.swap_is_cheaper(num_tokens, num_blocks),
    }
    return rules[mode]


@dataclass(frozen=True, slots=True, eq=False)
class Preemption:
    """Takes requests out of the running batch when memory runs out, or for a more urgent one."""

    config: SchedulerOptions
    policy: Policy
    rule: PreemptionRule
    table: RequestTable
    kv: KVCacheManager
    batch: RunningBatch
    in_flight: StepsInFlight
    lifecycle: Lifecycle
    encoder: EncoderInputs
    outbox: Outbox
    log: DecisionLog
    counters: Counters

    def victim(self) -> RequestState:
        """Return the running request to preempt next."""
        return self.policy.victim(self.batch.requests.values())

    def preempt(self, victim: RequestState, plan: StepPlan, for_request: RequestState) -> None:
        """Take `victim` out of the batch and out of the step; its KV is dropped or swapped out."""
        rows, free_before = victim.rows, self.kv.num_free_blocks
        lost = sum(int(self.table.num_computed[row]) for row in rows)
        for sequence in [sequence for sequence in victim.sequences if sequence.row >= 0]:
            plan.take_out(sequence.row)
            self.encoder.take_out(plan, sequence, self.lifecycle.requests)
            self.kv.uncache_uncomputed(sequence.row)
        swap = self._swaps(victim, rows, lost)
        if swap:
            self.lifecycle.park(victim)
            self.counters.swap_outs += 1
        else:
            self.lifecycle.requeue(victim)
        self._count(victim)
        plan.preempted.append(victim)
        if self.log.enabled:
            freed, mode = self.kv.num_free_blocks - free_before, "swap" if swap else "recompute"
            self.log.note(Preempted(victim.request_id, for_request.request_id, mode, 0 if swap else lost, freed))

    def _swaps(self, victim: RequestState, rows: list[int], num_computed: int) -> bool:
        """Whether to swap. Not what would lose encoder outputs, nor a request whose sequences do not all have rows."""
        return (
            not any(row in self.batch.leaders for row in rows)
            and not (victim.facts.is_beam_search and victim.beams is None)  # its rows may share the slot they write
            and not any(self.encoder.has_media_ahead(row) for row in rows)
            and self.kv.can_swap_out(rows)
            and self.rule(victim, num_computed, self._num_blocks(rows))
        )

    def _num_blocks(self, rows: list[int]) -> int:
        tables = [entries for row in rows for entries in self.kv.tables_of(row)]
        return len(set(np.concatenate(tables).tolist()))

    def _count(self, victim: RequestState) -> None:
        victim.num_preemptions += 1
        self.counters.preemptions += 1
        self.outbox.post_preempted(victim)

    def make_way(self, head: RequestState, plan: StepPlan, reason: Reason) -> bool:
        """Preempt the policy's victim if `head`, held back for `reason`, outranks it. Return whether it was done."""
        if not self.config.evict_for_priority or plan.entering or not self.batch.requests:
            return False  # a request that entered in this step may use blocks that a running row fills in it
        if reason not in _NO_ROOM:
            return False
        worst = self.victim()
        if not self.policy.outranks(head, worst):
            return False
        self.preempt(worst, plan, head)
        return True

    def preempt_all(self) -> None:
        """Take all requests out, newest first, so that the queue keeps their order. Tokens in flight are lost."""
        for request in reversed(list(self.batch.requests.values())):
            self.recompute(request)

    def recompute(self, request: RequestState) -> None:
        """Take the request out with all its KV, wherever that is. Its tokens in flight are lost."""
        if request.status in (RequestStatus.RUNNING, RequestStatus.SWAPPED):
            self.lifecycle.requeue(request)
            self._count(request)
        self.table.disown(request)
        self.in_flight.disown(request)
