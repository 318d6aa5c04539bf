"""StepCosts: measured durations of decode steps, by the number of rows and of drafts in them."""

from bisect import bisect_left
from collections import deque
from statistics import median

import numpy as np

_KEPT = 7  # measurements per shape; their median is used, so that one slow step changes nothing
_PRIOR_SLOPE = 0.15  # of a plain step, per draft, where no step with drafts has been measured yet
_SIZES = (
    0,
    1,
    2,
    3,
    4,
    5,
    6,
    7,
    8,
    10,
    12,
    14,
    16,
    20,
    24,
    28,
    32,
    40,
    48,
    56,
    64,
    80,
    96,
    112,
    128,
    160,
    192,
    224,
    256,
)


def size_class(count: int) -> int:
    """Return the number of the size class of `count`; sizes in one class differ by less than a quarter."""
    return bisect_left(_SIZES, count)


class _Shape:
    """Steps with about the same number of rows.

    samples: by size class of the number of drafts: (drafts, seconds).   medians: of both, by size class.
    points: ascending (drafts, seconds), monotone; None: to be computed.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.samples: dict[int, deque[tuple[int, float]]] = {}
        self.medians: dict[int, tuple[float, float]] = {}
        self.points: list[tuple[float, float]] | None = None


class StepCosts:
    """Seconds per step. The caller provides the times, so results are reproducible."""

    def __init__(self) -> None:
        self._shapes: dict[int, _Shape] = {}

    def observe(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """Record a step of `seconds` in which `num_rows` rows decoded and `num_drafts` drafts were verified."""
        shape = self._shapes.setdefault(size_class(num_rows), _Shape(num_rows))
        size = size_class(num_drafts)
        samples = shape.samples.setdefault(size, deque(maxlen=_KEPT))
        samples.append((num_drafts, seconds))
        shape.medians[size] = (median([each[0] for each in samples]), median([each[1] for each in samples]))
        shape.points = None

    def num_plain_steps(self, num_rows: int) -> int:
        """Return how many measurements there are of steps without drafts (at most 7)."""
        shape = self._shapes.get(size_class(num_rows))
        return len(shape.samples.get(0, ())) if shape is not None else 0

    def curve(self, num_rows: int, most: int) -> np.ndarray | None:
        """Return the seconds expected with 0 .. `most` drafts (float64), or None if no plain step was measured.

        Between measurements the curve is a straight line; beyond the last one, each draft costs what the average one
        before it did, but at least a quarter of what a row costs.
        """
        shape = self._shapes.get(size_class(num_rows))
        if shape is None or 0 not in shape.samples:
            return None
        drafts, seconds = zip(*(shape.points or self._points(shape)), strict=True)
        plain, last = seconds[0], drafts[-1]
        per_row = plain / max(num_rows, 1)
        slope = max((seconds[-1] - plain) / last, per_row / 4) if last else min(per_row, _PRIOR_SLOPE * plain)
        counts = np.arange(most + 1)
        return np.interp(counts, drafts, seconds) + slope * np.maximum(counts - last, 0)

    def _points(self, shape: _Shape) -> list[tuple[float, float]]:
        """Return (drafts, seconds) by size class, medians; a step with more drafts is never taken to be faster."""
        points: list[tuple[float, float]] = []
        for _, (x, y) in sorted(shape.medians.items()):
            points.append((x, max(y, points[-1][1]) if points else y))
        shape.points = points
        return points
