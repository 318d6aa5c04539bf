"""CostModel: how long a step takes, fitted to those that were measured. Preemption asks it.

    seconds = constant + rows + tokens (piecewise linear) + attention (pairs of tokens) + KV that is read
              + tokens of encoder inputs
    copies  = blocks x seconds per block

All coefficients are at least 0. A completed step costs one append; the fit is made on request.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pagoda.core.kv import KVGroupKind, KVGroupSpec
from pagoda.core.scheduler_output import ModelRunnerOutput, SchedulerOutput

_KNOTS = (0, 16, 128)  # of the price of a token: few share the time in which the weights are read
TERMS = ("constant", "rows", *(f"tokens after {knot}" for knot in _KNOTS), "attention", "KV read", "encoder")

_STEPS_PER_SIZE = 48  # steps kept of each power of two of tokens, so that rare large steps are not displaced
_NUM_COPIES = 64
_REFIT_SHARE = 8  # fit again when the new steps are an eighth of those of the last fit
_RIDGE = 1e-5
_NUM_ROUNDS = 5  # of weighting by the errors of the fit before
_SMALL_ERROR = 0.05


@dataclass(frozen=True, slots=True, eq=False)
class RowWork:
    """What rows compute: num_new[i] tokens after the first start[i] of row i. int32 [num_rows].

    num_encoded: tokens of the media items that the encoder computes for them.
    """

    start: np.ndarray
    num_new: np.ndarray
    num_encoded: int = 0

    @property
    def num_tokens(self) -> int:
        return int(self.num_new.sum())


class CostModel:
    """What steps and copies of blocks cost, in seconds: 0 as long as nothing was measured.

    groups: of the KV cache; a sliding window bounds what a token attends to in its layers.
    """

    def __init__(self, groups: tuple[KVGroupSpec, ...] = ()) -> None:
        growing = [group for group in groups if group.kind is not KVGroupKind.CROSS]
        num_layers = sum(len(group.layers) for group in growing)
        self._windows = [(len(group.layers) / num_layers, group.window or np.inf) for group in growing]
        self.forget()

    def forget(self) -> None:
        """Forget all measurements."""
        self._steps: dict[int, deque[tuple[RowWork, float]]] = {}
        self._num_seen = 0
        self._copies: deque[tuple[int, float]] = deque(maxlen=_NUM_COPIES)
        self._coefficients = np.zeros(len(TERMS))  # seconds per unit of each term
        self._fitted = 0, 0  # steps of the last fit, and steps seen until then

    def observe(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Take the measurements of a completed step. Its duration_s includes swap_s."""
        num_copied = len(output.swap_in) + len(output.swap_out)
        if num_copied and result.swap_s > 0:
            self.observe_copies(num_copied, result.swap_s)
        if result.duration_s > result.swap_s and not output.is_empty:
            num_encoded = sum(item.length for item in output.encoder_inputs)
            chunks = RowWork(output.start, output.num_new, num_encoded)
            self.observe_step(chunks, result.duration_s - result.swap_s, output.total_num_scheduled_tokens)

    def observe_copies(self, num_blocks: int, seconds: float) -> None:
        """Record the duration of a copy of `num_blocks` blocks, in or out."""
        self._copies.append((num_blocks, seconds))

    def observe_step(self, chunks: RowWork, seconds: float, num_tokens: int | None = None) -> None:
        """Record the duration of a step without its copies.   num_tokens: of the chunks, where it is known."""
        size = (chunks.num_tokens if num_tokens is None else num_tokens).bit_length()
        steps = self._steps.get(size)
        if steps is None:
            steps = self._steps[size] = deque(maxlen=_STEPS_PER_SIZE)
        steps.append((chunks, seconds))
        self._num_seen += 1

    @property
    def copy_s_per_block(self) -> float:
        """Seconds per block, in one direction."""
        num_blocks = sum(num for num, _ in self._copies)
        return sum(seconds for _, seconds in self._copies) / num_blocks if num_blocks else 0.0

    def terms_s(self, steps: Sequence[RowWork]) -> np.ndarray:
        """Return the seconds of each term (`TERMS`) in steps that compute this: float64 [num_steps, num_terms]."""
        self._update()
        return self._units(steps) * self._coefficients

    def added_s(self, chunks: RowWork) -> float:
        """Return the seconds by which this lengthens a step; the constant per step is not included."""
        return float(self.terms_s([chunks])[0, 1:].sum())

    def swap_is_cheaper(self, lost: RowWork, num_blocks: int) -> bool:
        """Whether copying `num_blocks` out and in beats computing `lost` again. Unmeasured copies are tried."""
        return 2 * num_blocks * self.copy_s_per_block < self.added_s(lost)

    def _units(self, steps: Sequence[RowWork]) -> np.ndarray:
        """Return how much of each term the steps have: float64 [num_steps, num_terms]."""
        first = np.cumsum([0] + [len(step.start) for step in steps[:-1]])
        before = np.concatenate([step.start for step in steps]).astype(np.float64)
        new = np.concatenate([step.num_new for step in steps]).astype(np.float64)
        attended, read = np.zeros_like(before), np.zeros_like(before)
        for share, window in self._windows or [(1.0, np.inf)]:
            attended += share * np.minimum(before + new / 2, window)
            read += share * (np.minimum(before, window) + new)
        by_row = np.stack([np.ones_like(new), new, new * attended, read])
        rows, tokens, pairs, kv = np.add.reduceat(by_row, first, axis=1)
        ends = (*_KNOTS[1:], np.inf)
        pieces = [np.clip(tokens, knot, end) - knot for knot, end in zip(_KNOTS, ends, strict=True)]
        encoded = np.array([step.num_encoded for step in steps], np.float64)
        return np.stack([np.ones_like(tokens), rows, *pieces, pairs, kv, encoded], axis=1)

    def _update(self) -> None:
        """Fit again if enough steps are new. The same steps give the same coefficients."""
        num_fitted, num_seen = self._fitted
        if (self._num_seen - num_seen) * _REFIT_SHARE <= num_fitted:
            return
        measured = [step for _, steps in sorted(self._steps.items()) for step in steps]
        seconds = np.array([seconds for _, seconds in measured])
        units = self._units([chunks for chunks, _ in measured])
        self._coefficients, self._fitted = _solve(units, seconds), (len(measured), self._num_seen)


def _solve(units: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Return coefficients of at least 0 for which `units @ coefficients` is about the median of `seconds`.

    Errors count as shares of the prediction, so that large steps do not outweigh small ones, and by their size, not its
    square, so that steps which something else on the machine disturbed do not count for more than others.
    A piece of the tokens' price that no step has reached costs what the piece before it does.
    """
    coefficients = _least_squares(units / seconds[:, None], np.ones(len(seconds)))
    for _ in range(_NUM_ROUNDS):
        predicted = np.maximum(units @ coefficients, seconds.min() / 10)
        errors = np.maximum(np.abs(seconds / predicted - 1), _SMALL_ERROR)
        weights = 1 / (predicted * np.sqrt(errors))
        coefficients = _least_squares(units * weights[:, None], seconds * weights)
    first = TERMS.index(f"tokens after {_KNOTS[0]}")
    for piece in range(first + 1, first + len(_KNOTS)):
        if not units[:, piece].any():
            coefficients[piece] = coefficients[piece - 1]
    return coefficients


def _least_squares(units: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Return ridge coefficients; while one is negative, the most negative becomes 0."""
    sizes = np.sqrt((units**2).sum(axis=0))
    kept = sizes > 0
    coefficients = np.zeros(len(sizes))
    while kept.any():
        scaled = units[:, kept] / sizes[kept]
        found = np.linalg.solve(scaled.T @ scaled + _RIDGE * np.eye(scaled.shape[1]), scaled.T @ seconds)
        if found.min() >= 0:
            coefficients[kept] = found / sizes[kept]
            break
        kept[np.flatnonzero(kept)[found.argmin()]] = False
    return coefficients
