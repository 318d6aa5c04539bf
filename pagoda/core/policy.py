"""Policies: the order of the queues, which request is preempted, and whether its KV is swapped out or dropped."""

from collections.abc import Callable, Iterable
from itertools import count
from typing import Protocol

from pagoda.base.config import PreemptionMode, SchedulingPolicy
from pagoda.core.request import Request, RequestState, SortKey
from pagoda.core.scheduler_output import ModelRunnerOutput, SchedulerOutput


class Policy(Protocol):
    """Orders the queues by key (smallest first) and picks victims."""

    def key(self, request: Request) -> SortKey:
        """Return the sort key of a new request."""
        ...

    def key_on_return(self, request: RequestState) -> SortKey:
        """Return the sort key of a request that was preempted."""
        ...

    def victim(self, running: Iterable[RequestState]) -> RequestState:
        """Return the request of `running` to preempt (not empty, oldest admission first)."""
        ...

    def outranks(self, waiting: RequestState, running: RequestState) -> bool:
        """Whether `running` may be preempted only to let `waiting` enter."""
        ...


class FirstComeFirstServed:
    """Order of arrival. The newest running request is the victim, and returns to the front of the queue."""

    def __init__(self) -> None:
        self._next_last = count()
        self._next_front = count(-1, -1)

    def key(self, request: Request) -> SortKey:
        return (next(self._next_last),)

    def key_on_return(self, request: RequestState) -> SortKey:
        return (next(self._next_front),)

    def victim(self, running: Iterable[RequestState]) -> RequestState:
        return next(reversed(running))  # type: ignore[call-overload]  # a dict view

    def outranks(self, waiting: RequestState, running: RequestState) -> bool:
        return False


class MostUrgentFirst:
    """Smallest priority number first, then arrival, then id.

    The victim has the largest (priority, arrival); of equals, the one admitted first. It returns to its usual place.
    """

    def key(self, request: Request) -> SortKey:
        return (request.priority, request.arrival_time_s, request.request_id)

    def key_on_return(self, request: RequestState) -> SortKey:
        return self.key(request.spec)

    def victim(self, running: Iterable[RequestState]) -> RequestState:
        return max(running, key=lambda request: (request.spec.priority, request.spec.arrival_time_s))

    def outranks(self, waiting: RequestState, running: RequestState) -> bool:
        return self.key(waiting.spec) < self.key(running.spec)


POLICIES: dict[SchedulingPolicy, Callable[[], Policy]] = {
    SchedulingPolicy.FCFS: FirstComeFirstServed,
    SchedulingPolicy.PRIORITY: MostUrgentFirst,
}


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
