"""The largest steps that a scheduler may plan, on rows without blocks: what a step takes is measured with them."""

from collections.abc import Iterator

import numpy as np

from pagoda.core.scheduler_output import SchedulerOutput


def largest_steps(max_rows: int, max_tokens: int, max_len: int) -> Iterator[SchedulerOutput]:
    """Yield a step of as many prompt tokens as there can be, and one that decodes all rows at their longest.

    max_rows: sequences that run at once.   max_tokens: per step.   max_len: of a sequence.
    """
    num_new: list[int] = []
    left = max_tokens
    while left and len(num_new) < max_rows:
        num_new.append(min(left, max_len))
        left -= num_new[-1]
    yield _step(np.zeros(len(num_new), np.int32), np.array(num_new, np.int32))
    num_rows = min(max_rows, max_tokens)
    yield _step(np.full(num_rows, max_len - 1, np.int32), np.ones(num_rows, np.int32))


def _step(start: np.ndarray, num_new: np.ndarray) -> SchedulerOutput:
    """A step of the first rows of the table, all of which sample."""
    rows = np.arange(len(start), dtype=np.int32)
    return SchedulerOutput(0, rows, start, num_new, rows, rows, int(num_new.sum()))
