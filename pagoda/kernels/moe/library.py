"""Mixture of experts in torch, one expert at a time with all of its tokens."""

import torch

from pagoda.kernels.linear.library import LibraryLinear, linear
from pagoda.kernels.moe.reference import ExpertList, activated, route, route_in_groups


def moe(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    gate_up: ExpertList[LibraryLinear],
    down: ExpertList[LibraryLinear],
    top_k: int,
    renormalize: bool,
    alpha: float = 1.0,
    limit: float = 0.0,
) -> torch.Tensor:
    """See reference.moe. `linear` rounds an expert's output once more than the definition."""
    return _sum_of_experts(x, *route(router_logits, top_k, renormalize), gate_up, down, alpha, limit)


def grouped_moe(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    bias: torch.Tensor,
    gate_up: ExpertList[LibraryLinear],
    down: ExpertList[LibraryLinear],
    top_k: int,
    renormalize: bool,
    sigmoid: bool,
    groups: int,
    top_groups: int,
    best: int,
    factor: float,
) -> torch.Tensor:
    """See reference.grouped_moe."""
    chosen = route_in_groups(router_logits, bias, top_k, renormalize, sigmoid, groups, top_groups, best, factor)
    return _sum_of_experts(x, *chosen, gate_up, down, 1.0, 0.0)


def _sum_of_experts(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: ExpertList[LibraryLinear],
    down: ExpertList[LibraryLinear],
    alpha: float,
    limit: float,
) -> torch.Tensor:
    top_k = experts.shape[1]
    parts = torch.empty(x.shape[0] * top_k, x.shape[1], dtype=torch.float32, device=x.device)
    pair_of = experts.flatten()
    for expert in pair_of.unique().tolist():
        pairs = (pair_of == expert).nonzero().squeeze(1)
        gate, up = linear(x[pairs // top_k], gate_up.weights[expert]).float().chunk(2, dim=-1)
        active = activated(gate, up, alpha, limit).to(x.dtype)
        parts[pairs] = linear(active, down.weights[expert]).float()
    return (parts.view(-1, top_k, x.shape[1]) * weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)
