"""StepCosts: measured durations of decode steps, by the number of rows and of drafts in them."""

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from itertools import accumulate
from statistics import median_low

_KEPT = 7  # measurements per shape; their median is used, so that one slow step changes nothing
_PROFILE_WEIGHT = 2  # measurements that the profile counts as
_SAME = 0.01  # medians that differ by less are not worth another curve
_GUESSED_SLOPE = 0.15  # of a plain step, per draft, if steps of several tokens were not measured at start
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
    changed: size classes with samples that are not in `medians` yet.   curve: what is known of it.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.samples: dict[int, deque[tuple[int, float]]] = {}
        self.medians: dict[int, tuple[int, float]] = {}
        self.changed: set[int] = set()
        self.curve: list[float] = []

    def update_medians(self) -> None:
        for size in self.changed:
            samples = self.samples[size]
            # Of an even number the lower one, so that two measurements withstand one slow step.
            drafts, typical_s = (
                median_low([count for count, _ in samples]),
                median_low([seconds for _, seconds in samples]),
            )
            known, known_s = self.medians.get(size, (-1, 0.0))
            if drafts != known or len(samples) < _KEPT or abs(typical_s - known_s) > _SAME * known_s:
                self.medians[size] = drafts, typical_s
                self.curve = []
        self.changed.clear()


class StepCosts:
    """Seconds per step. The caller provides the times, so results are reproducible.

    Steps over several tokens are measured once, before the first request (`set_profile`), so that the first draft is
    not a leap in the dark. Steps with drafts correct this profile wherever they are measured.
    """

    def __init__(self) -> None:
        self._shapes: dict[int, _Shape] = {}
        self._profile: list[tuple[int, float]] = []  # ascending (tokens, seconds), monotone
        self._slope_s = 0.0  # beyond its end

    def set_profile(self, seconds: Mapping[int, float]) -> None:
        """seconds: of a step over so many tokens, at least for 1 and another number."""
        self._profile = _monotone(sorted(seconds.items()))
        (before, before_s), (last, last_s) = self._profile[-2:]
        # As at its end, and at least a quarter of what a token costs there.
        self._slope_s = max((last_s - before_s) / (last - before), last_s / last / 4)

    def observe(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """Record a step of `seconds` in which `num_rows` rows decoded and `num_drafts` drafts were verified."""
        rows, size = size_class(num_rows), size_class(num_drafts)
        shape = self._shapes.get(rows)
        if shape is None:
            shape = self._shapes[rows] = _Shape(num_rows)
        if size not in shape.samples:
            shape.samples[size] = deque(maxlen=_KEPT)
        shape.samples[size].append((num_drafts, seconds))
        shape.changed.add(size)

    def num_plain_steps(self, num_rows: int) -> int:
        """Return how many measurements there are of steps without drafts (at most 7)."""
        shape = self._shapes.get(size_class(num_rows))
        return len(shape.samples.get(0, ())) if shape is not None else 0

    def curve(self, num_rows: int, most: int) -> list[float] | None:
        """Return the seconds expected with 0 .. `most` drafts, or None if no plain step was measured.

        The curve has the form of the profile and goes through the measurements. Between them, the correction of the
        profile is a straight line; beyond the last one it is constant.
        """
        shape = self._shapes.get(size_class(num_rows))
        if shape is None or 0 not in shape.samples:
            return None
        shape.update_medians()
        if len(shape.curve) <= most:
            corrections = self._corrections(shape)
            each = (self._expected(shape.num_rows, drafts) * _at(corrections, drafts) for drafts in range(most + 1))
            shape.curve = list(accumulate(each, max))
        return shape.curve[: most + 1]

    def _corrections(self, shape: _Shape) -> list[tuple[int, float]]:
        """Return (drafts, seconds per unit of `_expected`) by size class."""
        plain_s = shape.medians[0][1] / self._expected(shape.num_rows, 0)
        found: list[tuple[int, float]] = []
        for size, (drafts, seconds) in sorted(shape.medians.items()):
            unit = self._expected(shape.num_rows, drafts)
            if size and self._profile:
                samples = [sample_s for _, sample_s in shape.samples[size]]
                seconds = median_low([*samples, *[plain_s * unit] * _PROFILE_WEIGHT])
            found.append((drafts, seconds / unit))
        return found

    def _expected(self, num_rows: int, drafts: int) -> float:
        """Return the time with so many drafts before it is measured, in units that cancel out."""
        if not self._profile:
            return 1.0 + min(1 / max(num_rows, 1), _GUESSED_SLOPE) * drafts
        tokens = num_rows + drafts
        return _at(self._profile, tokens) + self._slope_s * max(0, tokens - self._profile[-1][0])


def _monotone(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return ascending points with no time below one before it: more tokens are never taken to be faster."""
    return list(zip([count for count, _ in points], accumulate((seconds for _, seconds in points), max), strict=True))


def _at(points: list[tuple[int, float]], count: int) -> float:
    """Return the value at `count` on straight lines between ascending points; outside of them, that of the nearest."""
    after = bisect_left(points, count, key=lambda point: point[0])
    if after == len(points):
        return points[-1][1]
    right, right_value = points[after]
    if not after or right == count:
        return right_value
    left, left_value = points[after - 1]
    return left_value + (right_value - left_value) * (count - left) / (right - left)
