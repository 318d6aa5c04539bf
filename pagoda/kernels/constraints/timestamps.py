"""The order of timestamps in a speech model's output, as changes of its logits; plain torch, on any device."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class TimestampRow:
    """One row of the logits.   first: id of the first timestamp; what is below is text.   forbidden: ids (from, to)."""

    row: int
    first: int
    forbidden: Sequence[tuple[int, int]]


def constrain_timestamps(logits: torch.Tensor, rows: Sequence[TimestampRow]) -> None:
    """Change logits float32 [n, V] in place: forbidden ids become -inf, and so does all text where the timestamps
    together are more likely than the most likely token of text.

    Row by row, in shapes that do not depend on the others: a row gives the same bits in any batch.
    """
    for one in rows:
        own = logits[one.row]
        for begin, end in one.forbidden:
            own[begin:end] = -torch.inf
        text, timestamps = own[: one.first], own[one.first :]
        text.masked_fill_(timestamps.double().logsumexp(0) > text.max(), -torch.inf)
