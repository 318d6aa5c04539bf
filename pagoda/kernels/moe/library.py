"""Mixture of experts in torch, one expert at a time with all of its tokens."""

import torch

from pagoda.kernels.linear.library import LibraryLinear, linear
from pagoda.kernels.moe.reference import ExpertList, activated, scaled_input
from pagoda.ops.declare import Activation


def moe(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: ExpertList[LibraryLinear],
    down: ExpertList[LibraryLinear],
    activation: Activation = Activation.SILU,
    alpha: float = 1.0,
    limit: float = 0.0,
    scales_input: bool = False,
) -> torch.Tensor:
    """See reference. `linear` rounds an expert's output once more than the definition."""
    top_k, hidden = experts.shape[1], x.shape[1]
    rows, per_row = (scaled_input(x, weights), 1) if scales_input else (x, top_k)
    parts = torch.empty(experts.numel(), hidden, dtype=torch.float32, device=x.device)
    pair_of = experts.flatten()
    for expert in pair_of.unique().tolist():
        pairs = (pair_of == expert).nonzero().squeeze(1)
        both = linear(rows[pairs // per_row], gate_up.weights[expert])
        active = activated(both, down.in_features, activation, alpha, limit)
        parts[pairs] = linear(active, down.weights[expert]).float()
    parts = parts.view(-1, top_k, hidden)
    return (parts if scales_input else parts * weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)
