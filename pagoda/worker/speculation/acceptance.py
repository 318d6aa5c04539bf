"""Acceptance: how often drafted tokens were right, per row and grade, with what other requests saw as the prior."""

import numpy as np

from pagoda.worker.drafters.drafter import NUM_GRADES

_ROW_DECAY = 0.85  # per draft: one made ten drafts ago counts a fifth
_ALL_DECAY = 0.99
_PRIOR_WEIGHT = 2.0  # tokens of the row's own history that other requests' history counts as
# About what n-gram drafts reach between free text (0.2, 0.5, ..) and copied text (0.8, 0.9, ..).
_FIRST_GUESS = np.array([0.25, 0.5, 0.6, 0.7, 0.8, 0.9])
_FIRST_WEIGHT = 4.0


class Acceptance:
    """Probability that a drafted token is accepted, given that those before it in the draft were."""

    def __init__(self, max_rows: int) -> None:
        self._right = np.zeros((max_rows, NUM_GRADES))
        self._tried = np.zeros((max_rows, NUM_GRADES))
        self._all_right = _FIRST_GUESS * _FIRST_WEIGHT
        self._all_tried = np.full(NUM_GRADES, _FIRST_WEIGHT)

    def forget(self, row: int) -> None:
        """Forget the row's history: it has a new request."""
        self._right[row] = self._tried[row] = 0

    def copy(self, source: int, target: int) -> None:
        self._right[target], self._tried[target] = self._right[source], self._tried[source]

    @property
    def hoped(self) -> np.ndarray:
        """What others' drafts suggest and at least the first guess: float64 [NUM_GRADES]."""
        return np.maximum(self._all_right / self._all_tried, _FIRST_GUESS)

    def observe(self, row: int, grade: int, num_drafts: int, num_accepted: int) -> None:
        """Record a draft of `num_drafts` tokens, of which the first `num_accepted` were accepted."""
        tried = min(num_accepted + 1, num_drafts)
        self._right[row, grade] = self._right[row, grade] * _ROW_DECAY + num_accepted
        self._tried[row, grade] = self._tried[row, grade] * _ROW_DECAY + tried
        self._all_right[grade] = self._all_right[grade] * _ALL_DECAY + num_accepted
        self._all_tried[grade] = self._all_tried[grade] * _ALL_DECAY + tried

    def of(self, rows: np.ndarray) -> np.ndarray:
        """Return the probabilities, float64 [num_rows, NUM_GRADES]."""
        prior = self._all_right / self._all_tried
        return (self._right[rows] + _PRIOR_WEIGHT * prior) / (self._tried[rows] + _PRIOR_WEIGHT)
