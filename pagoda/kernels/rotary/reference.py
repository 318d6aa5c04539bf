"""The definition of the rotary embedding (NeoX halves), in float32, rounded once."""

import torch


def rotary(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate q [T, H, D] and k [T, K, D] to `positions` [T] or [T, R]; cos, sin float32 [max_position, D / 2]."""
    pairs = cos.shape[1]
    by_pair = positions.long().view(len(positions), -1)
    by_pair = by_pair.unsqueeze(2).expand(-1, -1, pairs // by_pair.shape[1]).flatten(1)
    each = torch.arange(pairs, device=cos.device)
    row_cos, row_sin = (table[by_pair, each].unsqueeze(1) for table in (cos, sin))
    return _rotate(q, row_cos, row_sin), _rotate(k, row_cos, row_sin)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
