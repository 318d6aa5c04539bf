"""How many tokens to draft for each row, so that expected tokens per second are highest."""

import numpy as np

MIN_GAIN = 1.03
"""Minimum expected speed relative to plain steps: estimates are noisy, and planning costs time too."""


def best_lengths(
    survival: np.ndarray,
    lengths: np.ndarray,
    step_costs: np.ndarray,
    draft_s_per_token: float = 0.0,
    min_gain: float = MIN_GAIN,
) -> np.ndarray:
    """Return the number of tokens to draft per row, int32 [num_rows].

    survival: float64 [num_rows], probability that a drafted token is right if those before it were.
    lengths: int32 [num_rows], most tokens per row.
    step_costs: float64, seconds of a step with 0, 1, 2, .. drafts; no more are planned than there are costs.
    draft_s_per_token: seconds to draft one token.   min_gain: minimum expected speed relative to plain steps; nothing
    is drafted for less.

    Each row emits one token anyway, and its j-th draft adds one with probability survival ** j. Of all ways to verify m
    drafts, the m most probable ones are best, and since probabilities fall along a row, they are beginnings of drafts.
    """
    num_rows = len(survival)
    nothing = np.zeros(num_rows, np.int32)
    most, total = int(lengths.max(initial=0)), min(int(lengths.sum()), len(step_costs) - 1)
    counts = np.arange(1, total + 1)
    costs = step_costs[1 : total + 1] + draft_s_per_token * counts
    speed_to_beat = min_gain * num_rows / step_costs[0]
    if not total or ((num_rows + counts * survival.max()) / costs).max() < speed_to_beat:
        return nothing  # not even if all were as good as the best first draft: the usual case in a large batch
    steps = np.arange(1, most + 1)
    gains = np.where(steps <= lengths[:, None], survival[:, None] ** steps, 0.0).ravel()
    order = np.argsort(-gains, kind="stable")[:total]
    speeds = (num_rows + np.cumsum(gains[order])) / costs
    best = int(np.argmax(speeds))
    if speeds[best] < speed_to_beat:
        return nothing
    return np.bincount(order[: best + 1] // most, minlength=num_rows).astype(np.int32)
