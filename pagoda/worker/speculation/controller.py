"""DraftController: choose how many tokens to draft, so that speculation never costs more time than it saves.

It has no clock: times and results are given to it. Its choices never change a token.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import takewhile
from statistics import median_low

import numpy as np

from pagoda.worker.speculation.acceptance import Acceptance
from pagoda.worker.speculation.lengths import MIN_GAIN, best_lengths
from pagoda.worker.speculation.step_costs import StepCosts

# Credit is counted in plain steps: 0.2 means a fifth of the time that a step without drafts takes.
_CREDIT_PER_STEP = 0.008
_CREDIT_OF_A_NEW_REQUEST = 0.2
_MOST_CREDIT = 2.0
_LEAST_CREDIT = -1.0  # misjudged costs are not held against drafts for longer than some hundred steps
_MIN_PLAIN_STEPS = 2  # measured before the first draft at a batch size
_PLAIN_EVERY = 64  # steps with drafts between two plain ones, which keep the measurement of plain steps fresh
_JUDGED_EVERY = 8  # steps: whether drafts could pay off changes slowly
_FIRST_PROBE_AFTER = 8  # steps
_MOST_BETWEEN_PROBES = 64
_PROBE_TOKENS = 4
_MOST_IN_A_STEP = 256  # drafts
_KEPT = 7  # measurements of drafting; their median is used, so that one slow draft changes nothing
_DOUBT = 0.8  # factor on what drafts took, for each probe that this forbids


class DraftController:
    """Chooses the lengths of drafts before they are made, and again before they are verified, with their grades known.

    Of all choices, the one with the most expected tokens per second is taken. Expectations may be wrong, so each step
    with drafts is a bet from a credit, which must cover the time lost if every drafted token is wrong. Credit grows by
    0.8 % of all steps and by the time that drafts save; a new request starts with little. So useless drafts cost a
    request at most a fifth of a step and 0.8 % of its time; if the first drafts are right, longer ones soon follow.
    """

    def __init__(self, max_rows: int, max_drafts: int) -> None:
        """max_drafts: most tokens per row and step."""
        self._max_drafts = max_drafts
        self._costs = StepCosts()
        self._acceptance = Acceptance(max_rows)
        self._credit = _CREDIT_OF_A_NEW_REQUEST
        self._drafting_s: deque[float] = deque(maxlen=_KEPT)  # per token
        self._doubt = 1.0  # factor on their median, which nothing corrects while it forbids drafts
        self._since_plain = 0
        self._since_probe = 0
        self._probe_after = _FIRST_PROBE_AFTER
        self._next_probed = 0
        self._is_probe = False
        self._could_pay = False
        self._judged_in = self._judged_rows = 0

    def set_profile(self, seconds: Mapping[int, float]) -> None:
        """seconds: of a step over so many tokens, measured before the first request."""
        self._costs.set_profile(seconds)

    def forget(self, row: int) -> None:
        """The row has a new request."""
        self._acceptance.forget(row)
        self._credit = min(self._credit, _CREDIT_OF_A_NEW_REQUEST)

    def copy(self, source: int, target: int) -> None:
        """Row `target` is a fork of `source`."""
        self._acceptance.copy(source, target)

    # What happened

    def observe_step(self, num_rows: int, num_drafts: int, num_emitted: int, seconds: float, draft_s: float) -> None:
        """Record a completed step of decoding rows.

        num_drafts: verified in it.   num_emitted: tokens sampled.   seconds: of the step and the work around it.
        draft_s: the part of it that making the drafts took.
        """
        self._costs.observe(num_rows, num_drafts, seconds - draft_s)
        gained = _CREDIT_PER_STEP
        if num_drafts:
            self._since_plain += 1
            curve = self._costs.curve(num_rows, num_drafts)
            if curve is not None:
                # The typical cost of such a step: this one may have been held up by something else.
                saved = num_emitted / num_rows - (curve[-1] + draft_s) / curve[0]
                gained += saved
                if self._is_probe:
                    longer = min(2 * self._probe_after, _MOST_BETWEEN_PROBES)
                    self._probe_after = _FIRST_PROBE_AFTER if saved > 0 else longer
        else:
            self._since_plain = 0
        self._credit = min(max(self._credit + gained, _LEAST_CREDIT), _MOST_CREDIT)

    def observe_drafting(self, num_tokens: int, seconds: float) -> None:
        """Record that drafting `num_tokens` tokens in total took `seconds`."""
        if num_tokens:
            self._drafting_s.append(seconds / num_tokens)
            self._doubt = 1.0

    def observe_draft(self, row: int, grade: int, num_drafts: int, num_accepted: int) -> None:
        """Record the verification of one row's draft."""
        self._acceptance.observe(row, grade, num_drafts, num_accepted)

    # What to do

    def may_draft(self, num_rows: int) -> bool:
        """Return whether drafts for these rows could pay off at all: worth looking for them if that takes no time."""
        self._begin_choice()
        self._judged_in -= 1
        if self._judged_in <= 0 or num_rows != self._judged_rows:
            costs = self._affordable(num_rows, num_rows * self._max_drafts)
            self._could_pay = any(
                (num_rows + count) * costs[0] > MIN_GAIN * num_rows * cost for count, cost in enumerate(costs) if count
            )
            self._judged_in, self._judged_rows = (_JUDGED_EVERY if len(costs) else 0), num_rows
        return self._could_pay and self._since_plain < _PLAIN_EVERY

    def plan(self, rows: np.ndarray, most: np.ndarray) -> np.ndarray:
        """Return the tokens to draft for each of `rows`, int32 [num_rows], before the drafts are known.

        most: int32 [num_rows], tokens.
        """
        self._begin_choice()
        planned = [0] * len(rows)
        if self._since_plain < _PLAIN_EVERY:
            lengths: list[int] = np.minimum(most, self._max_drafts).tolist()
            drafting_s = median_low(self._drafting_s) * self._doubt if self._drafting_s else 0.0
            costs = self._affordable(len(rows), sum(lengths), drafting_s)
            planned = best_lengths(self._acceptance.of(rows).max(1).tolist(), lengths, costs)
            if self._probe_is_due and len(costs) > 1 and not any(planned):
                self._next_probed = (self._next_probed + 1) % len(rows)  # rows take turns
                planned[self._next_probed] = min(_PROBE_TOKENS, len(costs) - 1, lengths[self._next_probed])
            elif self._probe_is_due and len(costs) == 1 and self._credit > 0:
                # Perhaps kernels were compiled, or graphs captured, when drafting took so long.
                self._doubt *= _DOUBT
                self._since_probe = 0
        return np.array(planned, np.int32)

    def trim(self, num_rows: int, rows: np.ndarray, lengths: Sequence[int], grades: Sequence[int]) -> list[int]:
        """Return how many tokens of each draft to verify, now that they are known.

        num_rows: rows that decode.   rows: those with drafts, int32.   lengths, grades: of their drafts.
        """
        costs = self._affordable(num_rows, sum(lengths))
        survival: list[float] = self._acceptance.of(rows)[np.arange(len(rows)), grades].tolist()
        chosen = best_lengths(survival, lengths, costs, num_rows)
        if self._probe_is_due and not any(chosen):
            # Verify a little of one draft that would pay off if it were as good as such drafts can be.
            hoped = best_lengths(self._acceptance.hoped[np.array(grades)].tolist(), lengths, costs, num_rows)
            if any(hoped):
                self._is_probe = True
                self._since_probe = 0
                probed = int(np.argmax(hoped))
                chosen[probed] = min(_PROBE_TOKENS, hoped[probed])
        return chosen

    def _begin_choice(self) -> None:
        self._is_probe = False
        self._since_probe += 1

    @property
    def _probe_is_due(self) -> bool:
        return self._since_probe >= self._probe_after

    def _affordable(self, num_rows: int, most: int, draft_s_per_token: float = 0.0) -> list[float]:
        """Return the costs of steps with 0 .. `most` drafts, as far as the credit covers what they can lose.

        Empty if plain steps are not measured yet.   draft_s_per_token: seconds to draft one token.
        """
        if not most or self._costs.num_plain_steps(num_rows) < _MIN_PLAIN_STEPS:
            return []
        costs = self._costs.curve(num_rows, min(most, _MOST_IN_A_STEP))
        assert costs is not None
        limit_s = costs[0] * (1 + max(self._credit, 0.0))
        with_drafting = (cost + draft_s_per_token * count for count, cost in enumerate(costs))
        return list(takewhile(lambda cost: cost <= limit_s, with_drafting))
