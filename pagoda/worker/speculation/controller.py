"""DraftController: choose how many tokens to draft, so that speculation never costs more time than it saves.

One rule: of all ways to verify m drafts the most probable ones are best, and of all m the one with the most expected
tokens per second. What a step with m drafts takes is measured, all of it: drafting, verifying, and what comes around.
Expectations may be wrong, so each step with drafts is a bet from a credit, which must cover the time lost if every
drafted token is wrong. Credit grows by 0.8 % of all steps and by the time that drafts save; a new request starts with
little. So useless drafts cost a request at most a fifth of a step and 0.8 % of its time.

There is no clock here: times and results are given to it. Its choices never change a token.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate, takewhile
from statistics import median_low

import numpy as np

from pagoda.worker.speculation.drafter import NUM_GRADES

MIN_GAIN = 1.03
"""Minimum expected speed relative to plain steps: estimates are noisy, and planning costs time too."""

# Credit is counted in plain steps: 0.2 means a fifth of the time that a step without drafts takes.
_CREDIT_PER_STEP = 0.008
_CREDIT_OF_A_NEW_REQUEST = 0.2
_MOST_CREDIT = 2.0
_LEAST_CREDIT = -1.0  # misjudged costs are not held against drafts for longer than some hundred steps

_KEPT = 7  # measurements of a kind; their median is used, so that one slow step changes nothing
_PROFILE_WEIGHT = 2  # measurements of steps with drafts that the profile counts as
_GUESSED_SLOPE = 0.15  # of a plain step, per draft, if steps of several tokens were not measured at start
_MIN_PLAIN_STEPS = 2  # measured before the first draft at a batch size
_PLAIN_EVERY = 64  # steps with drafts between two plain ones, which keep the measurement of plain steps up to date
_MOST_IN_A_STEP = 256  # drafts
_JUDGED_EVERY = 8  # steps: whether drafts could save time changes slowly

_FIRST_PROBE_AFTER = 8  # steps
_MOST_BETWEEN_PROBES = 64
_PROBE_TOKENS = 4
_DOUBT = 0.8  # factor on what drafts took, for each probe that this forbids

_ROW_DECAY = 0.85  # per draft: one made ten drafts ago counts a fifth
_ALL_DECAY = 0.99
_PRIOR_WEIGHT = 2.0  # tokens of the row's own history that other requests' history counts as
# About what n-gram drafts reach between free text (0.2, 0.5, ..) and copied text (0.8, 0.9, ..).
_FIRST_GUESS = np.array([0.25, 0.5, 0.6, 0.7, 0.8, 0.9])
_FIRST_WEIGHT = 4.0


class DraftController:
    """Chooses the lengths of drafts, from how often drafts of a row and grade were right, and from what steps took."""

    def __init__(self, max_rows: int, max_drafts: int) -> None:
        """max_drafts: most tokens per row and step."""
        self._max_drafts = max_drafts
        # Drafted tokens that were reached, and how many of them were right; by row and grade, and of all rows.
        self._tried = np.zeros((max_rows, NUM_GRADES))
        self._right = np.zeros((max_rows, NUM_GRADES))
        self._all_tried = np.full(NUM_GRADES, _FIRST_WEIGHT)
        self._all_right = _FIRST_GUESS * _FIRST_WEIGHT
        self._profile: list[tuple[int, float]] = []  # ascending (tokens, seconds), monotone
        self._times: dict[int, _StepTimes] = {}  # by size class of the number of rows
        self._credit = _CREDIT_OF_A_NEW_REQUEST
        self._since_plain = 0
        self._since_probe = 0
        self._probe_after = _FIRST_PROBE_AFTER
        self._num_probes = 0
        self._is_probe = False
        self._could_pay = False
        self._judged_in = self._judged_rows = 0

    def set_profile(self, seconds: Mapping[int, float]) -> None:
        """seconds: of a step over so many tokens, at least for 1 and another number, measured before any request."""
        counts = sorted(seconds)
        # More tokens are never taken to be faster.
        self._profile = list(zip(counts, accumulate((seconds[count] for count in counts), max), strict=True))

    def forget(self, row: int) -> None:
        """The row has a new request."""
        self._right[row] = self._tried[row] = 0
        self._credit = min(self._credit, _CREDIT_OF_A_NEW_REQUEST)

    def copy(self, source: int, target: int) -> None:
        """Row `target` is a fork of `source`."""
        self._right[target], self._tried[target] = self._right[source], self._tried[source]

    # What happened

    def observe_draft(self, row: int, grade: int, num_drafts: int, num_accepted: int) -> None:
        """Record the verification of one row's draft, of which the first `num_accepted` tokens were right."""
        tried = min(num_accepted + 1, num_drafts)
        self._right[row, grade] = self._right[row, grade] * _ROW_DECAY + num_accepted
        self._tried[row, grade] = self._tried[row, grade] * _ROW_DECAY + tried
        self._all_right[grade] = self._all_right[grade] * _ALL_DECAY + num_accepted
        self._all_tried[grade] = self._all_tried[grade] * _ALL_DECAY + tried

    def observe_step(self, num_rows: int, num_drafts: int, num_emitted: int, seconds: float) -> None:
        """Record a completed step of decoding rows.

        num_drafts: verified in it.   num_emitted: tokens sampled.   seconds: of the step and all work around it, that
        of making its drafts included.
        """
        times = self._times_of(num_rows)
        times.add(num_drafts, seconds)
        self._since_plain = self._since_plain + 1 if num_drafts else 0
        gained = _CREDIT_PER_STEP
        costs = times.costs(num_drafts)
        if num_drafts and costs:
            # Once it is known, the typical cost of such a step: this one may have been held up by something else.
            saved = num_emitted / num_rows - (costs[-1] if times.is_measured else seconds) / costs[0]
            gained += saved
            if self._is_probe:
                longer = min(2 * self._probe_after, _MOST_BETWEEN_PROBES)
                self._probe_after = _FIRST_PROBE_AFTER if saved > 0 else longer
        self._credit = min(max(self._credit + gained, _LEAST_CREDIT), _MOST_CREDIT)

    # What to do

    def begin_choice(self, num_rows: int) -> bool:
        """Begin a choice for rows that decode; return whether drafts for them could pay off at all.

        Otherwise it is not worth looking for any.
        """
        self._is_probe = False
        self._since_probe += 1
        self._judged_in -= 1
        if self._judged_in <= 0 or num_rows != self._judged_rows:
            costs = self._affordable(num_rows, num_rows * self._max_drafts)
            self._could_pay = any(
                (num_rows + count) * costs[0] > MIN_GAIN * num_rows * cost for count, cost in enumerate(costs) if count
            )
            if costs and not self._could_pay:
                self._doubt_costs(num_rows)
            self._judged_in, self._judged_rows = (_JUDGED_EVERY if costs else 0), num_rows
        return self._could_pay and self._since_plain < _PLAIN_EVERY

    def choose(self, num_rows: int, rows: np.ndarray, lengths: Sequence[int], grades: Sequence[int]) -> list[int]:
        """Return how many tokens of each draft to verify.

        num_rows: rows that decode.   rows: those with drafts, int32.   lengths: the most of each, in tokens.
        grades: of their drafts.
        """
        costs = self._affordable(num_rows, sum(lengths))
        prior = self._all_right / self._all_tried
        at = rows, grades
        survival = (self._right[at] + _PRIOR_WEIGHT * prior[grades]) / (self._tried[at] + _PRIOR_WEIGHT)
        chosen = best_lengths(survival.tolist(), lengths, costs, num_rows)
        if self._since_probe >= self._probe_after and len(costs) and not any(chosen):
            # Verify a little of one draft that would pay off if it were as good as such drafts can be.
            hoped = np.maximum(prior, _FIRST_GUESS)[grades]
            some = [i for i, count in enumerate(best_lengths(hoped.tolist(), lengths, costs, num_rows)) if count]
            if some:
                self._is_probe = True
                self._num_probes += 1
                probed = some[self._num_probes % len(some)]  # rows take turns
                chosen[probed] = min(_PROBE_TOKENS, lengths[probed], len(costs) - 1)
                self._since_probe = 0
            else:
                self._doubt_costs(num_rows)
        return chosen

    def _doubt_costs(self, num_rows: int) -> None:
        """Take drafts to be a little cheaper than measured: nothing corrects a measurement that forbids them.

        Perhaps kernels were compiled, or graphs captured, when they took so long.
        """
        if self._since_probe >= self._probe_after and self._credit > 0:
            self._times_of(num_rows).doubt *= _DOUBT
            self._since_probe = 0

    def _times_of(self, num_rows: int) -> "_StepTimes":
        size = _size_class(num_rows)
        if size not in self._times:
            self._times[size] = _StepTimes(num_rows, self._profile)
        return self._times[size]

    def _affordable(self, num_rows: int, most: int) -> list[float]:
        """Return the costs of steps with 0 .. `most` drafts, as far as the credit covers what they can lose.

        Empty if plain steps are not measured yet.
        """
        costs = self._times_of(num_rows).costs(min(most, _MOST_IN_A_STEP)) if most else []
        if not costs:
            return []
        limit_s = costs[0] * (1 + max(self._credit, 0.0))
        return list(takewhile(lambda cost: cost <= limit_s, costs))


class _StepTimes:
    """What decode steps of about `num_rows` rows take.

    A step with drafts is expected to take as much longer than a plain one as the profile says of so many more tokens,
    which was measured before the first request, so that the first draft is not a leap in the dark. What it takes beyond
    that, such as making the drafts, is measured per draft.
    """

    def __init__(self, num_rows: int, profile: list[tuple[int, float]]) -> None:
        self._num_rows = num_rows
        self._profile = profile
        self._expected: list[float] = []  # by number of drafts, relative to a plain step
        self._plain_s: deque[float] = deque(maxlen=_KEPT)
        self._beyond_s: deque[float] = deque([0.0] * (_PROFILE_WEIGHT if profile else 0), maxlen=_KEPT)  # per draft
        self.doubt = 1.0  # factor on that, which a measurement ends

    def add(self, num_drafts: int, seconds: float) -> None:
        """Record a step."""
        if not num_drafts:
            self._plain_s.append(seconds)
        elif self._plain_s:
            expected_s = median_low(self._plain_s) * self._relative(num_drafts)[num_drafts]
            self._beyond_s.append((seconds - expected_s) / num_drafts)
            self.doubt = 1.0

    @property
    def is_measured(self) -> bool:
        """Return whether there are as many measurements of steps with drafts as are kept."""
        return len(self._beyond_s) == _KEPT

    def costs(self, most: int) -> list[float]:
        """Return the seconds of steps with 0 .. `most` drafts; nothing if too few plain ones were measured."""
        if len(self._plain_s) < _MIN_PLAIN_STEPS:
            return []
        # Of an even number the lower one, so that two measurements withstand one slow step.
        plain_s, beyond_s = median_low(self._plain_s), median_low(self._beyond_s or [0.0]) * self.doubt
        relative = self._relative(most)
        return list(accumulate((plain_s * relative[count] + beyond_s * count for count in range(most + 1)), max))

    def _relative(self, most: int) -> list[float]:
        while len(self._expected) <= most:
            self._expected.append(self._expectation(len(self._expected)))
        return self._expected

    def _expectation(self, num_drafts: int) -> float:
        """Return the time of a step with so many drafts, relative to a plain one, before any is measured."""
        if not self._profile:
            return 1.0 + min(1 / self._num_rows, _GUESSED_SLOPE) * num_drafts
        return self._profiled(self._num_rows + num_drafts) / self._profiled(self._num_rows)

    def _profiled(self, num_tokens: int) -> float:
        """Return the time of a step over so many tokens, on straight lines through the profile."""
        counts, seconds = zip(*self._profile, strict=True)
        (before, before_s), (last, last_s) = self._profile[-2:]
        # Beyond its end as there, and at least a quarter of what a token costs.
        slope_s = max((last_s - before_s) / (last - before), last_s / last / 4)
        return float(np.interp(num_tokens, counts, seconds)) + slope_s * max(0, num_tokens - last)


def best_lengths(
    survival: Sequence[float], lengths: Sequence[int], step_costs: Sequence[float], num_rows: int = 0
) -> list[int]:
    """Return the number of tokens to draft per row, so that expected tokens per second are highest.

    survival: probability that a drafted token of the row is right if those before it were.
    lengths: most tokens per row.
    step_costs: seconds of a step with 0, 1, 2, .. drafts; no more are planned than there are costs.
    num_rows: rows of the step, if there are more than these.

    Each row emits one token anyway, and its j-th draft adds one with probability survival ** j. Of all ways to verify m
    drafts, the m most probable ones are best, and since probabilities fall along a row, they are beginnings of drafts.
    """
    # Plain Python: most calls are about one row and a few tokens, where arrays take ten times as long.
    num_rows = max(num_rows, len(survival))
    chosen = [0] * len(survival)
    total = min(sum(lengths), len(step_costs) - 1)
    if total < 1:
        return chosen
    speed_to_beat = MIN_GAIN * num_rows / step_costs[0]
    highest = max(survival)
    if all(num_rows + count * highest < speed_to_beat * step_costs[count] for count in range(1, total + 1)):
        return chosen  # not even if all were as good as the best first draft: the usual case in a large batch
    gains = [
        (-(probability**at), row)
        for row, (probability, most) in enumerate(zip(survival, lengths, strict=True))
        for at in range(1, most + 1)
    ]
    gains.sort()
    emitted, best, best_speed = float(num_rows), 0, speed_to_beat
    for count in range(1, total + 1):
        emitted -= gains[count - 1][0]
        if emitted >= best_speed * step_costs[count]:
            best, best_speed = count, emitted / step_costs[count]
    for _, row in gains[:best]:
        chosen[row] += 1
    return chosen


_SIZES = [*range(9), *range(10, 17, 2), *range(20, 33, 4), *range(40, 65, 8), *range(80, 129, 16), *range(160, 257, 32)]


def _size_class(count: int) -> int:
    """Return the number of the size class of `count`; sizes in one class differ by less than a quarter."""
    return bisect_left(_SIZES, count)
