"""Router: which replica of an engine a request goes to, by what the client of all replicas knows of them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

_WINDOW_S = 20.0  # of steps of each replica: what they took before counts less and less
_MOST_WINDOWS = 30.0  # in one report, whose engine was stopped for hours: nothing is left of those before it
_MIN_REPORTS = 20
_PRIOR_S = 1.0  # of steps that took what was expected, as if each replica had reported them
_MOST_NOISE = 1.33  # times as long as expected, or as short: nothing that routing should follow


class RoutedBecause(Enum):
    """Why a request is where it is."""

    ONLY_READY = "only_ready"  # no other replica takes requests now
    LEAST_WAIT = "shortest_wait"  # its first token is expected earlier than from any other
    CACHED_PREFIX = "cached_prefix"  # because more of its prompt is cached there
    PROBE = "probe"  # it may have killed another's engine, and this one has no other request
    TURN = "turn"  # several would be as fast: each in turn
    NONE_READY = "none_ready"  # it goes to the first replica that takes requests again


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """What one replica has to do, each request counted from the moment at which it is sent.

    takes_requests: whether its engine gets a request now.   num_seqs: unfinished sequences.   replica: its number.
    num_owed: tokens to compute for the requests that wait for their next token since they were sent.
    """

    takes_requests: bool
    num_seqs: int
    num_owed: int
    replica: int = 0


class PrefixIndex:
    """Which replicas have which blocks in their prefix caches: a fold of what their engines tell."""

    def __init__(self) -> None:
        self._holders: dict[bytes, int] = {}  # by hash, a bit for each replica

    def __len__(self) -> int:
        return len(self._holders)

    def change(self, replica: int, stored: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """A replica's cache has these blocks now, and those no more."""
        holders, bit = self._holders, 1 << replica
        for one in stored:
            holders[one] = holders.get(one, 0) | bit
        for one in removed:
            if (left := holders.get(one, 0) & ~bit) != 0:
                holders[one] = left
            else:
                holders.pop(one, None)

    def clear(self, replica: int) -> None:
        """A replica's engine has ended, and its cache with it."""
        bit = 1 << replica
        self._holders = {one: left for one, held in self._holders.items() if (left := held & ~bit)}

    def num_leading(self, hashes: Iterable[bytes], replicas: Sequence[int]) -> list[int]:
        """Return how many of the first blocks each replica has, up to the first that it has not.

        hashes: are taken as long as any of them has the block.
        """
        holding = sum(1 << replica for replica in replicas)
        found, num_blocks = dict.fromkeys(replicas, 0), 0
        for one in hashes:
            still = self._holders.get(one, 0) & holding
            if still != holding:
                found |= {replica: num_blocks for replica in replicas if (holding ^ still) >> replica & 1}
                holding = still
                if not holding:
                    break
            num_blocks += 1
        return [num_blocks if holding >> replica & 1 else found[replica] for replica in replicas]


class StepCosts:
    """What steps take, learned from what the engines report of theirs.

    All replicas run the same model: seconds = per_step_s * steps + per_token_s * tokens, fitted to all their steps.
    Until there are enough of them, a token counts as a second. A replica can be slower than that, see `pace`.
    """

    def __init__(self) -> None:
        self.per_step_s, self.per_token_s = 0.0, 1.0
        self._sums = [0.0] * 5  # steps * steps, steps * tokens, tokens * tokens, steps * seconds, tokens * seconds
        self._taken: dict[int, list[float]] = {}  # by replica: seconds that its steps took, and that they should have
        self._num_reports = 0
        self._weight = 1.0  # of the next report: it grows, in place of all sums that would have to shrink

    def observe(self, replica: int, num_steps: int, num_tokens: int, seconds: float) -> None:
        """Take what a replica's last steps took."""
        if num_steps <= 0 or seconds <= 0:
            return
        taken = self._taken.setdefault(replica, [0.0, 0.0])
        self._weight *= math.exp(min(seconds / _WINDOW_S / len(self._taken), _MOST_WINDOWS))
        if self._weight > 1e12:
            self._sums = [one / self._weight for one in self._sums]
            self._taken = {one: [value / self._weight for value in pair] for one, pair in self._taken.items()}
            self._weight, taken = 1.0, self._taken[replica]
        steps, tokens = float(num_steps), float(num_tokens)
        products = (steps * steps, steps * tokens, tokens * tokens, steps * seconds, tokens * seconds)
        share = self._weight / seconds  # each second of steps counts as much as any other
        self._sums = [one + share * product for one, product in zip(self._sums, products, strict=True)]
        self._num_reports += 1
        if self.are_known:
            self._fit()
            taken[0] += self._weight * seconds
            taken[1] += self._weight * (self.per_step_s * steps + self.per_token_s * tokens)

    def forget(self, replica: int) -> None:
        """A replica's engine has ended. The next one may be on another device."""
        self._taken.pop(replica, None)

    def seconds(self, num_tokens: int, load: ReplicaLoad, max_num_batched_tokens: int) -> float:
        """Return how long a replica takes to compute tokens and, in each step of that, one per sequence that it has."""
        num_steps = -(-num_tokens // max_num_batched_tokens)
        seconds = self.per_step_s * num_steps + self.per_token_s * (num_tokens + num_steps * load.num_seqs)
        return self.pace(load.replica) * seconds

    @property
    def are_known(self) -> bool:
        """Whether there were enough reports for `seconds` to be seconds."""
        return self._num_reports >= _MIN_REPORTS

    def pace(self, replica: int) -> float:
        """Return how many times as long as expected a replica's steps take; 1 for what may be chance."""
        took_s, expected_s = self._taken.get(replica, (0.0, 0.0))
        prior = _PRIOR_S * self._weight
        found = (took_s + prior) / (expected_s + prior)
        return found if max(found, 1 / found) > _MOST_NOISE else 1.0

    def _fit(self) -> None:
        """Fit both coefficients, at least 0, by least squares."""
        ss, st, tt, sy, ty = self._sums
        determinant = ss * tt - st * st
        if determinant > 1e-6 * ss * tt:
            step_s, token_s = (sy * tt - ty * st) / determinant, (ty * ss - sy * st) / determinant
            if step_s > 0 and token_s > 0:
                self.per_step_s, self.per_token_s = step_s, token_s
                return
        self.per_step_s, self.per_token_s = 0.0, ty / tt if tt else 1.0


@dataclass(slots=True)
class Router:
    """Chooses the replica from which the first token is expected earliest.

    Until then, a replica computes the tokens that it owes, those of the prompt that are not cached, and in each of the
    steps that this takes one per sequence: for as long as `costs` say. Sequences beyond `max_num_seqs` wait for others
    to end, which takes longer than all of that.

    max_num_seqs, max_num_batched_tokens: of a step.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    costs: StepCosts = field(default_factory=StepCosts)
    _last: int = -1

    def choose(
        self, num_tokens: int, num_seqs: int, loads: Sequence[ReplicaLoad], num_cached: Sequence[int]
    ) -> tuple[int, RoutedBecause]:
        """Return the index of a replica, and why.

        num_tokens: of the prompt, and of what was generated before.   num_cached: of these, by replica, in its cache.
        """
        ready = [index for index, load in enumerate(loads) if load.takes_requests]
        among = ready or range(len(loads))
        costs = {index: self._cost(num_tokens - num_cached[index], num_seqs, loads[index]) for index in among}
        best = self._cheapest(costs)
        self._last = next((index for index in best if index > self._last), best[0])
        if not ready:
            return self._last, RoutedBecause.NONE_READY
        if len(ready) == 1:
            return self._last, RoutedBecause.ONLY_READY
        if len(best) > 1:
            return self._last, RoutedBecause.TURN
        if any(num_cached[index] for index in ready):
            costs = {index: self._cost(num_tokens, num_seqs, loads[index]) for index in ready}
            if self._cheapest(costs) != best:
                return self._last, RoutedBecause.CACHED_PREFIX
        return self._last, RoutedBecause.LEAST_WAIT

    @staticmethod
    def _cheapest(costs: Mapping[int, tuple[int, float]]) -> list[int]:
        least = min(costs.values())
        return [index for index, cost in costs.items() if cost == least]

    def _cost(self, num_new: int, num_seqs: int, load: ReplicaLoad) -> tuple[int, float]:
        """Return the sequences that have to end first, and the seconds until the first token after that.

        num_new: tokens of the request that are not cached.
        """
        seconds = self.costs.seconds(load.num_owed + num_new, load, self.max_num_batched_tokens)
        return max(0, load.num_seqs + num_seqs - self.max_num_seqs), seconds
