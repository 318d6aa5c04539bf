"""Mixture of experts in torch, one expert at a time with all of its tokens."""

from functools import partial

import torch

from pagoda.kernels.linear.library import LibraryLinear, linear
from pagoda.kernels.moe.reference import ExpertList, activated, grouped_moe_by, moe_by
from pagoda.ops.declare import Activation


def _sum_of_experts(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: ExpertList[LibraryLinear],
    down: ExpertList[LibraryLinear],
    activation: Activation,
    alpha: float,
    limit: float,
) -> torch.Tensor:
    """See reference. `linear` rounds an expert's output once more than the definition."""
    tokens, top_k = experts.shape
    per_row = top_k if len(x) == tokens else 1
    parts = torch.empty(tokens * top_k, x.shape[1], dtype=torch.float32, device=x.device)
    pair_of = experts.flatten()
    for expert in pair_of.unique().tolist():
        pairs = (pair_of == expert).nonzero().squeeze(1)
        both = linear(x[pairs // per_row], gate_up.weights[expert])
        active = activated(both, down.in_features, activation, alpha, limit)
        parts[pairs] = linear(active, down.weights[expert]).float()
    return (parts.view(-1, top_k, x.shape[1]) * weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)


moe, grouped_moe = partial(moe_by, _sum_of_experts), partial(grouped_moe_by, _sum_of_experts)
