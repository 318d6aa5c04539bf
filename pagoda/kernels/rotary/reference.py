"""The definition of the rotary embedding (NeoX halves), in float32, rounded once."""

import torch


def rotary(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate q [T, H, D] and k [T, K, D] to `positions` [T]; cos, sin float32 [max_position, D / 2]."""
    row_cos = cos[positions.long()].unsqueeze(1)
    row_sin = sin[positions.long()].unsqueeze(1)
    return _rotate(q, row_cos, row_sin), _rotate(k, row_cos, row_sin)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
