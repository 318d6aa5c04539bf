"""The definition of the mixture-of-experts op: one token and one expert at a time, in float32."""

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
import torch.nn.functional as F

from pagoda.kernels.linear.reference import PlainLinear, logits
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


def activated(gate: torch.Tensor, up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """float32 [T, I] twice -> silu(gate) * up; with a limit, what GPT-OSS has instead (see `ForwardOps.moe`)."""
    if not limit:
        return F.silu(gate) * up
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


def moe(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    gate_up: ExpertList[PlainLinear],
    down: ExpertList[PlainLinear],
    top_k: int,
    renormalize: bool,
    alpha: float = 1.0,
    limit: float = 0.0,
) -> torch.Tensor:
    """[T, hidden] -> [T, hidden]: the gated MLPs of each token's top_k experts, summed by weight, rounded once.

    Between up and down an expert's activation is rounded to x's dtype, as in a dense layer.
    """
    experts, weights = route(router_logits, top_k, renormalize)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for token in range(x.shape[0]):
        for expert, weight in zip(experts[token].tolist(), weights[token], strict=True):
            gate, up = logits(x[token : token + 1], gate_up.weights[expert]).to(x.dtype).chunk(2, dim=-1)
            active = activated(gate.float(), up.float(), alpha, limit).to(x.dtype)
            out[token] += weight * logits(active, down.weights[expert])[0]
    return out.to(x.dtype)
