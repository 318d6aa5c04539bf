"""What a batch of logits is sampled with: the constraints of some rows, and how one token is drawn from each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from pagoda.kernels.native.checks import check_below

_NO_IDS = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class TokenLists:
    """One list of token ids per constrained row, concatenated.

    starts: int64 [m + 1], list i is ids[starts[i]:starts[i + 1]].   ids: int32 [starts[m]].
    """

    starts: np.ndarray
    ids: np.ndarray

    @classmethod
    def of(cls, lists: Sequence[np.ndarray]) -> "TokenLists":
        """Concatenate integer arrays."""
        starts = np.zeros(len(lists) + 1, np.int64)
        np.cumsum([len(ids) for ids in lists], out=starts[1:])
        return cls(starts, np.concatenate(lists, dtype=np.int32, casting="same_kind") if starts[-1] else _NO_IDS)

    def spans(self) -> Iterator[slice]:
        """Yield where each list is in `ids`."""
        ends = self.starts.tolist()
        return (slice(begin, end) for begin, end in pairwise(ends))

    @property
    def rows(self) -> np.ndarray:
        """int64 [starts[m]]: which list each id belongs to."""
        return np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))


@dataclass(frozen=True, slots=True, eq=False)
class BatchConstraints:
    """Changes to m rows of logits [n, V], in the order in which they apply. Ids are distinct within a list.

    rows: int64 [m], which rows of the logits, each at most once.
    bias, bias_values: added to the logits; float32, one per id.
    penalized, output_counts: tokens that the penalties apply to, and how often each occurs in the output (int32, one
        per id; 0 for a token that is only in the prompt).
    repetition, frequency, presence: float32 [m]. A penalized token's logit is divided by `repetition` if positive, else
        multiplied by it; if the token is in the output, `frequency * count + presence` is then subtracted.
    allowed: per row, bool [up to V] or None. Tokens that are not marked, or are beyond its end, become -inf.
    forbidden: tokens that become -inf.
    """

    rows: np.ndarray
    bias: TokenLists
    bias_values: np.ndarray
    penalized: TokenLists
    output_counts: np.ndarray
    repetition: np.ndarray
    frequency: np.ndarray
    presence: np.ndarray
    allowed: Sequence[np.ndarray | None]
    forbidden: TokenLists

    def check(self, num_rows: int, vocab_size: int) -> None:
        """Raise InvariantBroken for a row or a token id outside logits [num_rows, vocab_size]."""
        check_below("constrain: rows", self.rows, num_rows)
        for name in ("bias", "penalized", "forbidden"):
            check_below(f"constrain: {name}", getattr(self, name).ids, vocab_size)
        last_ids = np.array([0 if mask is None else max(0, len(mask) - 1) for mask in self.allowed])
        check_below("constrain: allowed", last_ids, vocab_size)


@dataclass(frozen=True, slots=True, eq=False)
class DrawParams:
    """The parameters of S draws, as columns [S].

    temperature: float32, 0 is greedy.   top_k: int32, 0 is off.   top_p: float32 in (0, 1], 1 is off.
    min_p: float32 in [0, 1], 0 is off.   uniform: float64 in [0, 1), unused by greedy rows.
    on_device: the columns in this order on the device of the logits, if they are there already.
    """

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    uniform: np.ndarray
    on_device: tuple[torch.Tensor, ...] | None = None

    @property
    def columns(self) -> list[np.ndarray]:
        """Return the columns, each contiguous and of its own type."""
        return [
            np.ascontiguousarray(self.temperature, np.float32),
            np.ascontiguousarray(self.top_k, np.int32),
            np.ascontiguousarray(self.top_p, np.float32),
            np.ascontiguousarray(self.min_p, np.float32),
            np.ascontiguousarray(self.uniform, np.float64),
        ]

    def __getitem__(self, rows: np.ndarray | slice) -> "DrawParams":
        """Return the draws of some rows."""
        return DrawParams(
            self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], self.uniform[rows]
        )
