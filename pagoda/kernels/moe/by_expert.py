"""Mixture of experts in torch, one expert at a time with all of its tokens: fast where `linear` is a library's GEMM."""

from collections.abc import Callable

import torch

from pagoda.kernels.moe.reference import ExpertList, WeightT, route


def moe(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    gate_up: ExpertList[WeightT],
    down: ExpertList[WeightT],
    top_k: int,
    renormalize: bool,
    linear: Callable[[torch.Tensor, WeightT], torch.Tensor],
    gated: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """See reference.moe.

    linear: [n, in] -> [n, out] in x's dtype, which rounds an expert's output once more than the definition.
    """
    experts, weights = route(router_logits, top_k, renormalize)
    parts = torch.empty(x.shape[0] * top_k, x.shape[1], dtype=torch.float32, device=x.device)
    pair_of = experts.flatten()
    for expert in pair_of.unique().tolist():
        pairs = (pair_of == expert).nonzero().squeeze(1)
        parts[pairs] = linear(gated(linear(x[pairs // top_k], gate_up.weights[expert])), down.weights[expert]).float()
    return (parts.view(-1, top_k, x.shape[1]) * weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)
