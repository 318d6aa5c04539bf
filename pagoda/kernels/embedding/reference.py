"""The definition of the embedding gather."""

import torch


def embedding(token_ids: torch.Tensor, table: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """int32 [T], [vocab, hidden] -> [T, hidden] in the table's dtype; `scale` is rounded to that dtype first."""
    rows = table[token_ids.long()]
    if scale == 1.0:
        return rows
    return rows * torch.tensor(scale, dtype=table.dtype)  # of no dimension, on the host: a GPU need not wait for it
