"""The definition of the low-rank ops: one row at a time, products in float32."""

import torch

from pagoda.kernels.low_rank.table import LowRankPiece, PlainLowRank


def add_low_rank(y: torch.Tensor, x: torch.Tensor, adapters: torch.Tensor, table: PlainLowRank) -> None:
    """y [T, out] += b @ round(a @ x) + bias for the pieces of each row's adapter; see ForwardOps."""
    for row, slot in enumerate(adapters.tolist()):
        for piece in table.slots[slot]:
            _add(y[row], piece, piece.a.float() @ x[row].float())


def add_low_rank_embedding(
    y: torch.Tensor, token_ids: torch.Tensor, adapters: torch.Tensor, table: PlainLowRank
) -> None:
    """As `add_low_rank`, with column token_ids[t] of `a` in place of a @ x."""
    columns = table.shape[2]
    for row, (token, slot) in enumerate(zip(token_ids.tolist(), adapters.tolist(), strict=True)):
        for piece in table.slots[slot]:
            if 0 <= token < columns:
                _add(y[row], piece, piece.a[:, token].float())


def _add(y: torch.Tensor, piece: LowRankPiece, inner: torch.Tensor) -> None:
    """inner: float32 [rank]."""
    delta = piece.b.float() @ inner.to(piece.b.dtype).float()
    if piece.bias is not None:
        delta = delta + piece.bias
    part = y[piece.first_row : piece.first_row + len(delta)]
    part.copy_(part.float() + delta)
