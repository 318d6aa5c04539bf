"""The low-rank ops in torch, one adapter at a time with all of its rows."""

import torch

from pagoda.kernels.low_rank.table import LowRankPiece, PlainLowRank


def add_low_rank(y: torch.Tensor, x: torch.Tensor, adapters: torch.Tensor, table: PlainLowRank) -> None:
    """See reference.add_low_rank."""
    for slot in adapters.unique().tolist():
        rows = (adapters == slot).nonzero().squeeze(1)
        for piece in table.slots[slot]:
            _add(y, rows, piece, x[rows].float() @ piece.a.float().T)


def add_low_rank_embedding(
    y: torch.Tensor, token_ids: torch.Tensor, adapters: torch.Tensor, table: PlainLowRank
) -> None:
    """See reference.add_low_rank_embedding."""
    known = (token_ids >= 0) & (token_ids < table.shape[2])
    for slot in adapters.unique().tolist():
        rows = ((adapters == slot) & known).nonzero().squeeze(1)
        for piece in table.slots[slot]:
            _add(y, rows, piece, piece.a.T[token_ids[rows].long()].float())


def _add(y: torch.Tensor, rows: torch.Tensor, piece: LowRankPiece, inner: torch.Tensor) -> None:
    """inner: float32 [rows, rank]."""
    delta = inner.to(piece.b.dtype).float() @ piece.b.float().T
    if piece.bias is not None:
        delta = delta + piece.bias
    columns = slice(piece.first_row, piece.first_row + delta.shape[1])
    y[rows, columns] = (y[rows, columns].float() + delta).to(y.dtype)
