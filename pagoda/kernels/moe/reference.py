"""The definition of the mixture-of-experts ops: one token and one expert at a time, in float32."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeAlias, TypeVar

import torch

from pagoda.kernels.activation.reference import activate, gate
from pagoda.kernels.linear.reference import PlainLinear, logits
from pagoda.ops.declare import Activation
from pagoda.ops.tensor import LinearWeight

WeightT = TypeVar("WeightT", bound=LinearWeight)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertList(Generic[WeightT]):
    """The weights of all experts, one by one."""

    weights: tuple[WeightT, ...]

    @property
    def num_experts(self) -> int:
        return len(self.weights)

    @property
    def out_features(self) -> int:
        return self.weights[0].out_features

    @property
    def in_features(self) -> int:
        return self.weights[0].in_features


def route(router_logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, E] -> (experts int64 [T, top_k], weights float32 [T, top_k]), the largest first, of equals the lower id."""
    weights = torch.softmax(router_logits.float(), dim=-1)
    experts = router_logits.float().sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    chosen = weights.gather(1, experts)
    return experts, chosen / chosen.sum(dim=-1, keepdim=True) if renormalize else chosen


def activated(x: torch.Tensor, inner: int, kind: Activation, alpha: float, limit: float) -> torch.Tensor:
    """[T, 2 I], gate then up, or [T, I], of experts without gates -> [T, I]; see `ForwardOps.moe`.   inner: I."""
    if x.shape[-1] == inner:
        return activate(x, kind)
    if not limit:
        return gate(x, kind)
    gates, up = x.float().chunk(2, dim=-1)
    gates, up = gates.clamp(max=limit), up.clamp(-limit, limit)
    return (gates * torch.sigmoid(alpha * gates) * (up + 1)).to(x.dtype)


SumOfExperts: TypeAlias = Callable[..., torch.Tensor]
"""(x, experts [T, top_k], weights [T, top_k], gate_up, down, activation, alpha, limit) -> [T, hidden], in x's dtype.

x: [T, hidden], or [T * top_k, hidden], a row for each expert of a token.
"""


def moe_by(
    sum_of_experts: SumOfExperts,
    x: torch.Tensor,
    router_logits: torch.Tensor,
    gate_up: ExpertList[WeightT],
    down: ExpertList[WeightT],
    top_k: int,
    renormalize: bool,
    alpha: float = 1.0,
    limit: float = 0.0,
    activation: Activation = Activation.SILU,
    factors: torch.Tensor | None = None,
    scales_input: bool = False,
) -> torch.Tensor:
    """Compute `ForwardOps.moe`."""
    experts, weights = route(router_logits, top_k, renormalize)
    if scales_input:
        x, weights = scaled_input(x, router_logits, experts)
    weights = weights if factors is None else weights * factors[experts]
    return sum_of_experts(x, experts, weights, gate_up, down, activation, alpha, limit)


def scaled_input(
    x: torch.Tensor, router_logits: torch.Tensor, experts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what each expert of a token reads, [T * top_k, hidden], and the weights of their outputs, which are 1."""
    factors = router_logits.float().gather(1, experts).sigmoid()
    return (x.unsqueeze(1) * factors.unsqueeze(-1)).to(x.dtype).flatten(0, 1), torch.ones_like(factors)


def grouped_moe_by(
    sum_of_experts: SumOfExperts,
    x: torch.Tensor,
    router_logits: torch.Tensor,
    bias: torch.Tensor,
    gate_up: ExpertList[WeightT],
    down: ExpertList[WeightT],
    top_k: int,
    renormalize: bool,
    sigmoid: bool,
    groups: int,
    top_groups: int,
    best: int,
    factor: float,
    activation: Activation = Activation.SILU,
) -> torch.Tensor:
    """Compute `ForwardOps.grouped_moe`."""
    logits = router_logits.float()
    scores = logits.sigmoid() if sigmoid else logits.softmax(dim=-1)
    choice = (scores + bias).unflatten(-1, (groups, -1))
    of_group = choice.sort(dim=-1, descending=True).values[..., :best].sum(dim=-1)
    chosen_groups = of_group.sort(dim=-1, descending=True, stable=True).indices[:, :top_groups]
    allowed = torch.zeros_like(of_group, dtype=torch.bool).scatter(1, chosen_groups, True)
    choice = choice.masked_fill(~allowed.unsqueeze(-1), float("-inf")).flatten(1)
    experts = choice.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    chosen = scores.gather(1, experts)
    weights = (chosen / chosen.sum(dim=-1, keepdim=True) if renormalize else chosen) * factor
    return sum_of_experts(x, experts, weights, gate_up, down, activation, 1.0, 0.0)


def _sum_of_experts(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: ExpertList[PlainLinear],
    down: ExpertList[PlainLinear],
    activation: Activation,
    alpha: float,
    limit: float,
) -> torch.Tensor:
    """Sum the MLPs of each token's experts by weight, rounded once.

    Between up and down an expert's activation is rounded to x's dtype, as in a dense layer.
    """
    tokens, top_k = experts.shape
    per_row = top_k if len(x) == tokens else 1
    out = torch.zeros(tokens, x.shape[1], dtype=torch.float32, device=x.device)
    for token in range(tokens):
        for rank, (expert, weight) in enumerate(zip(experts[token].tolist(), weights[token], strict=True)):
            row = (token * top_k + rank) // per_row
            both = logits(x[row : row + 1], gate_up.weights[expert]).to(x.dtype)
            active = activated(both, down.in_features, activation, alpha, limit)
            out[token] += weight * logits(active, down.weights[expert])[0]
    return out.to(x.dtype)


moe, grouped_moe = partial(moe_by, _sum_of_experts), partial(grouped_moe_by, _sum_of_experts)
