"""DraftController: choose how many tokens to draft, so that speculation never costs more time than it saves.

It has no clock: times and results are given to it. Its choices never change a token.
"""

import numpy as np

from pagoda.worker.drafters.drafter import NUM_GRADES
from pagoda.worker.speculation.acceptance import Acceptance
from pagoda.worker.speculation.lengths import MIN_GAIN, best_lengths
from pagoda.worker.speculation.step_costs import StepCosts

_LOSS_SHARE = 0.007  # fraction of the time that useless speculation may cost in the long run
_MOST_CREDIT_S = 0.25  # largest credit: the time that may be lost at once
_FIRST_CREDIT_S = 0.03
_LEAST_CREDIT_S = -0.05  # a slow machine is not held against drafts for longer than some seconds
_MIN_GAIN_WITHOUT_CREDIT = 1.5
_MIN_PLAIN_STEPS = 2  # measured before the first draft at a batch size
_PLAIN_EVERY = 64  # steps with drafts between two plain ones, which keep the measurement of plain steps fresh
_FIRST_PROBE_AFTER = 8  # steps
_MOST_BETWEEN_PROBES = 64
_PROBE_TOKENS = 4
_MOST_IN_A_STEP = 256  # drafts


class DraftController:
    """Chooses the lengths of drafts before they are made, and again before they are verified, with their grades known.

    A step with drafts should emit its tokens in the time that plain steps would have taken. If it takes longer, the
    difference is paid from a credit, which grows by 0.7 % of all time and by the time that speculation saves. Without
    credit, only drafts that promise a large gain are made, and nothing is probed.
    """

    def __init__(self, max_rows: int, max_drafts: int) -> None:
        """max_drafts: most tokens per row and step."""
        self._max_drafts = max_drafts
        self._costs = StepCosts()
        self._acceptance = Acceptance(max_rows)
        self._credit_s = _FIRST_CREDIT_S
        self._draft_s_per_token = 0.0
        self._since_plain = 0
        self._since_probe = 0
        self._probe_after = _FIRST_PROBE_AFTER
        self._next_probed = 0
        self._is_probe = False

    def forget(self, row: int) -> None:
        """The row has a new request."""
        self._acceptance.forget(row)

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
        self._credit_s += _LOSS_SHARE * seconds
        if num_drafts:
            self._since_plain += 1
            curve = self._costs.curve(num_rows, 0)
            plain_s = float(curve[0]) if curve is not None else seconds
            # A step that takes more than twice as long as a plain one was held up by something else.
            gained_s = max(plain_s * num_emitted / num_rows - (seconds - draft_s), -plain_s) - draft_s
            self._credit_s += gained_s
            if self._is_probe:
                longer = min(2 * self._probe_after, _MOST_BETWEEN_PROBES)
                self._probe_after = _FIRST_PROBE_AFTER if gained_s > 0 else longer
        else:
            self._since_plain = 0
        self._credit_s = min(max(self._credit_s, _LEAST_CREDIT_S), _MOST_CREDIT_S)

    def observe_drafting(self, num_tokens: int, seconds: float) -> None:
        """Record that drafting `num_tokens` tokens in total took `seconds`."""
        if num_tokens:
            per_token = seconds / num_tokens
            known = self._draft_s_per_token
            self._draft_s_per_token = per_token if not known else 0.9 * known + 0.1 * per_token

    def observe_draft(self, row: int, grade: int, num_drafts: int, num_accepted: int) -> None:
        """Record the verification of one row's draft."""
        self._acceptance.observe(row, grade, num_drafts, num_accepted)

    # What to do

    def plan(self, rows: np.ndarray, room: np.ndarray) -> np.ndarray:
        """Return the tokens to draft for each of `rows`, int32 [num_rows], before the drafts are known.

        room: int32 [num_rows], most tokens that the row could still emit.
        """
        lengths = np.minimum(room, self._max_drafts)
        nothing = np.zeros(len(rows), np.int32)
        self._is_probe = False
        self._since_probe += 1
        curve = self._curve(len(rows), lengths)
        if curve is None or self._since_plain >= _PLAIN_EVERY:
            return nothing
        best_grade = self._acceptance.of(rows).max(1)
        planned = best_lengths(best_grade, lengths, curve, self._draft_s_per_token, self._min_gain)
        if not planned.any() and self._probe_is_due:
            self._next_probed = (self._next_probed + 1) % len(rows)  # rows take turns
            planned[self._next_probed] = min(_PROBE_TOKENS, int(lengths[self._next_probed]))
        return planned

    def trim(self, rows: np.ndarray, lengths: np.ndarray, grades: np.ndarray) -> np.ndarray:
        """Return how many tokens of each draft to verify, int32 [num_rows], now that they are known.

        rows: all that decode.   lengths: of their drafts (int32), 0 for none.   grades: int [num_rows].
        """
        curve = self._curve(len(rows), lengths) if lengths.any() else None
        if curve is None:
            return np.zeros(len(rows), np.int32)
        survival = self._acceptance.of(rows)[np.arange(len(rows)), np.minimum(grades, NUM_GRADES - 1)]
        chosen = best_lengths(survival, lengths, curve, min_gain=self._min_gain)
        if not chosen.any() and self._probe_is_due:
            # Verify a little of one draft, to learn whether drafting pays off by now.
            self._is_probe = True
            self._since_probe = 0
            probed = int(np.flatnonzero(lengths)[0])
            chosen[probed] = min(_PROBE_TOKENS, int(lengths[probed]))
        return chosen

    @property
    def _min_gain(self) -> float:
        return MIN_GAIN if self._credit_s > 0 else _MIN_GAIN_WITHOUT_CREDIT

    @property
    def _probe_is_due(self) -> bool:
        return self._since_probe >= self._probe_after and self._credit_s > 0

    def _curve(self, num_rows: int, lengths: np.ndarray) -> np.ndarray | None:
        """Return the costs of steps with up to all of these drafts; None if plain steps are not measured yet."""
        if self._costs.num_plain_steps(num_rows) < _MIN_PLAIN_STEPS:
            return None
        return self._costs.curve(num_rows, min(int(lengths.sum()), _MOST_IN_A_STEP))
