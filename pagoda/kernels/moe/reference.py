"""The definition of the mixture-of-experts ops: one token and one expert at a time, in float32."""

from dataclasses import dataclass
from typing import Generic, TypeVar

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
    def shape(self) -> tuple[int, int, int]:
        """(experts, out_features, in_features)"""
        return (self.num_experts, self.out_features, self.in_features)

    @property
    def num_experts(self) -> int:
        return len(self.weights)

    @property
    def out_features(self) -> int:
        return self.weights[0].out_features

    @property
    def in_features(self) -> int:
        return self.weights[0].in_features


def route(
    router_logits: torch.Tensor,
    top_k: int,
    renormalize: bool,
    sigmoid: bool = False,
    bias: torch.Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    best: int = 1,
    factor: float = 1.0,
    factors: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    choice = router_logits.float()
    scores = choice.sigmoid() if sigmoid else choice.softmax(dim=-1)
    if bias is not None:
        choice = (scores + bias).unflatten(-1, (groups, -1))
        of_group = choice.sort(dim=-1, descending=True).values[..., :best].sum(dim=-1)
        chosen_groups = of_group.sort(dim=-1, descending=True, stable=True).indices[:, :top_groups]
        allowed = torch.zeros_like(of_group, dtype=torch.bool).scatter(1, chosen_groups, True)
        choice = choice.masked_fill(~allowed.unsqueeze(-1), float("-inf")).flatten(1)
    experts = choice.sort(dim=-1, descending=True, stable=True).indices[:, :top_k].contiguous()
    weights = scores.gather(1, experts)
    weights = (weights / weights.sum(dim=-1, keepdim=True) if renormalize else weights) * factor
    return experts, weights if factors is None else weights * factors[experts]


def moe(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: ExpertList[PlainLinear],
    down: ExpertList[PlainLinear],
    activation: Activation = Activation.SILU,
    alpha: float = 1.0,
    limit: float = 0.0,
    scales_input: bool = False,
) -> torch.Tensor:
    """Between up and down an expert's activation is rounded to x's dtype, as in a dense layer."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for token, row in enumerate(x.unsqueeze(1)):
        for expert, weight in zip(experts[token].tolist(), weights[token], strict=True):
            reads, factor = ((row.float() * weight).to(x.dtype), 1.0) if scales_input else (row, weight)
            both = logits(reads, gate_up.weights[expert]).to(x.dtype)
            active = activated(both, down.in_features, activation, alpha, limit)
            out[token] += factor * logits(active, down.weights[expert])[0]
    return out.to(x.dtype)


def activated(x: torch.Tensor, inner: int, kind: Activation, alpha: float, limit: float) -> torch.Tensor:
    """[T, 2 I], gate then up, or [T, I], of experts without gates -> [T, I]; see `ForwardOps.moe`.   inner: I."""
    if x.shape[-1] == inner:
        return activate(x, kind)
    if not limit:
        return gate(x, kind)
    gates, up = x.float().chunk(2, dim=-1)
    gates, up = gates.clamp(max=limit), up.clamp(-limit, limit)
    return (gates * torch.sigmoid(alpha * gates) * (up + 1)).to(x.dtype)


def scaled_input(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return what each expert of a token reads where its weight scales that, [T * top_k, hidden]."""
    return (x.unsqueeze(1) * weights.unsqueeze(-1)).to(x.dtype).flatten(0, 1)
