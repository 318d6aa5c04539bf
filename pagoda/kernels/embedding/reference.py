"""The definition of the embedding gathers."""

import torch


def embedding(token_ids: torch.Tensor, table: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """int32 [T], [vocab, hidden] -> [T, hidden] in the table's dtype; `scale` is rounded to that dtype first."""
    rows = table[token_ids.long()]
    if scale == 1.0:
        return rows
    return rows * torch.tensor(scale, dtype=table.dtype)  # of no dimension, on the host: a GPU need not wait for it


def partial_embedding(token_ids: torch.Tensor, table: torch.Tensor, first: int, scale: float = 1.0) -> torch.Tensor:
    """As `embedding`, of the ids from `first` on; ids whose rows are not in the table give zeros."""
    rows = token_ids - first
    outside = (rows < 0) | (rows >= table.shape[0])
    return embedding(rows.masked_fill(outside, 0), table, scale).masked_fill(outside.unsqueeze(1), 0.0)
