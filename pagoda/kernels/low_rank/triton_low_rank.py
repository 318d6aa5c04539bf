"""The low-rank ops in Triton: one program per token, or per token and piece of its outputs, whatever its adapter.

An adapter's pieces are for disjoint outputs. A slot keeps their `a` stacked along the rank, and their `b` as the rows
of one matrix, with the place in that stack of the ranks which each row multiplies.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from pagoda.kernels.low_rank.table import LowRankPiece, check_pieces
from pagoda.kernels.triton_support import jit_for_any


class StackedLowRank:
    """See FillableLowRank. Grows when an adapter of a larger rank comes; takes no memory before the first one.

    a: [slots, ranks, in].   b: [slots, out, rank], zeros past a piece's own.   first_rank: int32 [slots, out], where in
    `ranks` each output's begin; -1 for outputs that the adapter leaves as they are.   bias: float32 [slots, out].
    """

    def __init__(self, num_slots: int, out_features: int, in_features: int, dtype: torch.dtype) -> None:
        self.shape = (num_slots, out_features, in_features)
        self.dtype = dtype
        self.a = self.b = self.first_rank = self.bias = torch.empty(0, dtype=dtype)
        self.num_moves = 0

    @property
    def is_empty(self) -> bool:
        return self.first_rank.numel() == 0

    def fill(self, slot: int, pieces: Sequence[LowRankPiece]) -> None:
        check_pieces(self.shape, slot, pieces)
        if not pieces:
            self.clear(slot)
            return
        ranks, rank = sum(piece.rank for piece in pieces), max(piece.rank for piece in pieces)
        self._reserve(ranks, rank, pieces[0].a.device)
        self.clear(slot)
        first = 0
        for piece in pieces:
            rows = slice(piece.first_row, piece.first_row + piece.b.shape[0])
            self.a[slot, first : first + piece.rank] = piece.a.to(self.dtype)
            self.b[slot, rows, : piece.rank] = piece.b.to(self.dtype)
            self.first_rank[slot, rows] = first
            if piece.bias is not None:
                self.bias[slot, rows] = piece.bias.float()
            first += piece.rank

    def clear(self, slot: int) -> None:
        """Empty a slot. Its memory is kept for the next adapter."""
        if not self.is_empty:
            self.a[slot], self.b[slot], self.bias[slot] = 0, 0, 0
            self.first_rank[slot] = -1

    def _reserve(self, ranks: int, rank: int, device: torch.device) -> None:
        """Make room for an adapter of so many ranks in total, and in its largest piece."""
        num_slots, rows, columns = self.shape
        if self.is_empty or ranks > self.a.shape[1] or rank > self.b.shape[2]:
            self.num_moves += 1
        if self.is_empty:
            self.first_rank = torch.full((num_slots, rows), -1, dtype=torch.int32, device=device)
            self.bias = torch.zeros((num_slots, rows), device=device)
            self.a = torch.zeros((num_slots, 0, columns), dtype=self.dtype, device=device)
            self.b = torch.zeros((num_slots, rows, 0), dtype=self.dtype, device=device)
        if ranks > self.a.shape[1]:
            self.a = torch.nn.functional.pad(self.a, (0, 0, 0, ranks - self.a.shape[1]))
        if rank > self.b.shape[2]:
            self.b = torch.nn.functional.pad(self.b, (0, rank - self.b.shape[2]))


@jit_for_any("ranks")
def _shrink(
    x, a, inner, adapters, ranks, in_features, x_stride,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """inner [T, ranks] = round(a @ x) of each token's adapter."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(adapters + token).to(tl.int64)
    if slot > 0:
        rank = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
        has_rank = rank < ranks
        acc = tl.zeros([BLOCK_R, BLOCK_K], tl.float32)
        rows = a + (slot * ranks + rank) * in_features
        for start in range(0, in_features, BLOCK_K):
            at = start + tl.arange(0, BLOCK_K)
            inside = at < in_features
            value = tl.load(x + token * x_stride + at, mask=inside, other=0.0).to(tl.float32)
            some = tl.load(rows[:, None] + at[None, :], mask=has_rank[:, None] & inside[None, :], other=0.0)
            acc += some.to(tl.float32) * value[None, :]
        tl.store(inner + token * ranks + rank, tl.sum(acc, 1).to(inner.dtype.element_ty), mask=has_rank)


@jit_for_any("ranks")
def _expand(
    y, inner, b, first_ranks, bias, adapters, token_ids, a, ranks, max_rank, out_features, in_features, y_stride,
    EMBEDDING: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Add b @ inner + bias of each token's adapter to y; EMBEDDING: with a column of `a` in place of inner."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(adapters + token).to(tl.int64)
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.load(first_ranks + slot * out_features + row, mask=row < out_features, other=-1)
    column = 0
    if EMBEDDING:
        column = tl.load(token_ids + token)
        first = tl.where((column >= 0) & (column < in_features), first, -1)
    is_adapted = first >= 0  # of no output in slot 0
    delta = tl.zeros([BLOCK_N], tl.float32)
    # In pieces of one size: zeros past an adapter's own ranks then change nothing, however many there are.
    for start in range(0, max_rank, BLOCK_R):
        rank = start + tl.arange(0, BLOCK_R)
        place = first[:, None] + rank[None, :]
        some = is_adapted[:, None] & (rank < max_rank)[None, :]
        weight = tl.load(b + ((slot * out_features + row) * max_rank)[:, None] + rank[None, :], mask=some, other=0.0)
        has_value = some & (place < ranks)
        if EMBEDDING:
            value = tl.load(a + (slot * ranks + place) * in_features + column, mask=has_value, other=0.0)
        else:
            value = tl.load(inner + token * ranks + place, mask=has_value, other=0.0)
        delta += tl.sum(weight.to(tl.float32) * value.to(tl.float32), 1)
    delta += tl.load(bias + slot * out_features + row, mask=is_adapted, other=0.0)
    target = y + token * y_stride + row
    old = tl.load(target, mask=is_adapted, other=0.0).to(tl.float32)
    tl.store(target, (old + delta).to(y.dtype.element_ty), mask=is_adapted)


def add_low_rank(y: torch.Tensor, x: torch.Tensor, adapters: torch.Tensor, table: StackedLowRank) -> None:
    """See reference.add_low_rank."""
    if table.is_empty:
        return
    tokens, ranks = x.shape[0], table.a.shape[1]
    inner = torch.empty((tokens, ranks), dtype=table.dtype, device=x.device)
    _shrink[(tokens, triton.cdiv(ranks, 16))](
        x, table.a, inner, adapters, ranks, x.shape[1], x.stride(0), 16, 128, num_warps=4
    )  # fmt: skip
    _run_expand(y, inner, adapters, adapters, table, is_embedding=False)


def add_low_rank_embedding(
    y: torch.Tensor, token_ids: torch.Tensor, adapters: torch.Tensor, table: StackedLowRank
) -> None:
    """See reference.add_low_rank_embedding."""
    if not table.is_empty:
        _run_expand(y, y, adapters, token_ids, table, is_embedding=True)


def _run_expand(
    y: torch.Tensor,
    inner: torch.Tensor,
    adapters: torch.Tensor,
    token_ids: torch.Tensor,
    table: StackedLowRank,
    is_embedding: bool,
) -> None:
    max_rank = table.b.shape[2]
    block_n, block_r = 128, 16
    _expand[(y.shape[0], triton.cdiv(y.shape[1], block_n))](
        y, inner, table.b, table.first_rank, table.bias, adapters, token_ids, table.a, table.a.shape[1], max_rank,
        y.shape[1], table.shape[2], y.stride(0), is_embedding, block_n, block_r, num_warps=4,
    )  # fmt: skip
