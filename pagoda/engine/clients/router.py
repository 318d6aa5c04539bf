"""Router: which replica of an engine a request goes to, by what the client of all replicas knows of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum


class RoutedBecause(Enum):
    """Why a request is where it is."""

    ONLY_READY = "only_ready"  # no other replica takes requests now
    LEAST_WAIT = "shortest_wait"  # its first token is expected earlier than from any other
    CACHED_PREFIX = "cached_prefix"  # because more of its prompt is cached there
    TURN = "turn"  # several would be as fast: each in turn
    NONE_READY = "none_ready"  # it goes to the first replica that takes requests again


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """What one replica has to do, each request counted from the moment at which it is sent.

    takes_requests: whether its engine gets a request now.   num_seqs: unfinished sequences.
    num_owed: tokens to compute for the requests that wait for their next token since they were sent.
    num_cached: tokens of the request in question that need not be computed.
    """

    takes_requests: bool
    num_seqs: int
    num_owed: int
    num_cached: int = 0


@dataclass(slots=True)
class Router:
    """Chooses the replica from which the first token is expected earliest.

    The time is counted in tokens that the replica computes until then: those that it owes, those of the prompt that are
    not cached, and in each of the steps that this takes one per sequence. Sequences beyond `max_num_seqs` wait for
    others to end, which takes longer than all of that.

    max_num_seqs, max_num_batched_tokens: of a step.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    _last: int = -1

    def choose(self, num_tokens: int, num_seqs: int, loads: Sequence[ReplicaLoad]) -> tuple[int, RoutedBecause]:
        """Return the index of a replica, and why.   num_tokens: of the prompt, and of what was generated before."""
        ready = [index for index, load in enumerate(loads) if load.takes_requests]
        among = ready or range(len(loads))
        best = self._cheapest({index: self._cost(num_tokens, num_seqs, loads[index]) for index in among})
        self._last = next((index for index in best if index > self._last), best[0])
        if not ready:
            return self._last, RoutedBecause.NONE_READY
        if len(ready) == 1:
            return self._last, RoutedBecause.ONLY_READY
        if len(best) > 1:
            return self._last, RoutedBecause.TURN
        if any(loads[index].num_cached for index in ready):
            costs = {index: self._cost(num_tokens, num_seqs, replace(loads[index], num_cached=0)) for index in ready}
            if self._cheapest(costs) != best:
                return self._last, RoutedBecause.CACHED_PREFIX
        return self._last, RoutedBecause.LEAST_WAIT

    @staticmethod
    def _cheapest(costs: Mapping[int, tuple[int, int]]) -> list[int]:
        least = min(costs.values())
        return [index for index, cost in costs.items() if cost == least]

    def _cost(self, num_tokens: int, num_seqs: int, load: ReplicaLoad) -> tuple[int, int]:
        """Return the sequences that have to end first, and the tokens that are computed before the first one."""
        num_computed = load.num_owed + num_tokens - load.num_cached
        num_steps = -(-num_computed // self.max_num_batched_tokens)
        return max(0, load.num_seqs + num_seqs - self.max_num_seqs), num_computed + num_steps * load.num_seqs
