"""The adapters' weights for one layer, as loading gives them, and the table of the reference and torch kernels."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True, eq=False)
class LowRankPiece:
    """What an adapter adds to some outputs of a layer: b @ (a @ x) + bias, from output `first_row` on.

    a: [rank, in].   b: [rows, rank], the adapter's scale included.   bias: [rows], scaled too, or None.
    """

    a: torch.Tensor
    b: torch.Tensor
    first_row: int = 0
    bias: torch.Tensor | None = None

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    def to(self, dtype: torch.dtype) -> "LowRankPiece":
        bias = None if self.bias is None else self.bias.float()
        return LowRankPiece(self.a.to(dtype), self.b.to(dtype), self.first_row, bias)


class FillableLowRank(Protocol):
    """A LowRankTable as its owner sees it. Slot 0 stays empty: it means no adapter."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def num_moves(self) -> int:
        """Times that its weights were put at other addresses: what was captured before must not run again."""
        ...

    def fill(self, slot: int, pieces: Sequence[LowRankPiece]) -> None:
        """Set the weights of a slot, in place of what it had. The pieces' rows are disjoint."""
        ...

    def clear(self, slot: int) -> None:
        """Empty a slot and free its memory."""
        ...


def check_pieces(shape: tuple[int, ...], slot: int, pieces: Sequence[LowRankPiece]) -> None:
    """Raise ValueError for pieces that do not fit a table of `shape`."""
    num_slots, rows, columns = shape
    if not 1 <= slot < num_slots:
        raise ValueError(f"slot {slot} is not one of 1 .. {num_slots - 1}")
    taken = [False] * rows
    for piece in pieces:
        (rank, width), (height, inner) = piece.a.shape, piece.b.shape
        fits = rank == inner and rank > 0 and width == columns and piece.first_row >= 0
        if not fits or piece.first_row + height > rows or (piece.bias is not None and piece.bias.shape != (height,)):
            raise ValueError(f"a [{rank}, {width}] and b [{height}, {inner}] do not fit a layer [{rows}, {columns}]")
        if any(taken[piece.first_row : piece.first_row + height]):
            raise ValueError("two pieces of an adapter are for the same outputs")
        taken[piece.first_row : piece.first_row + height] = [True] * height


class PlainLowRank:
    """A table of torch tensors, on the device of what it is filled with."""

    def __init__(self, num_slots: int, out_features: int, in_features: int, dtype: torch.dtype) -> None:
        self.shape = (num_slots, out_features, in_features)
        self.dtype = dtype
        self.num_moves = 0
        self.slots: list[tuple[LowRankPiece, ...]] = [()] * num_slots

    def fill(self, slot: int, pieces: Sequence[LowRankPiece]) -> None:
        check_pieces(self.shape, slot, pieces)
        self.slots[slot] = tuple(piece.to(self.dtype) for piece in pieces)
        self.num_moves += 1

    def clear(self, slot: int) -> None:
        self.slots[slot] = ()
        self.num_moves += 1
