"""How many tokens to draft for each row, so that expected tokens per second are highest."""

from collections.abc import Sequence

MIN_GAIN = 1.03
"""Minimum expected speed relative to plain steps: estimates are noisy, and planning costs time too."""


def best_lengths(
    survival: Sequence[float], lengths: Sequence[int], step_costs: Sequence[float], num_rows: int = 0
) -> list[int]:
    """Return the number of tokens to draft per row.

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
