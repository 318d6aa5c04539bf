"""Mixture of experts: a router that picks a few gated MLPs for each token."""

from dataclasses import dataclass

from pagoda.layers.linear import ExpertLinear, Linear
from pagoda.layers.module import Module
from pagoda.layers.parameter import Axis, Part
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import Tensor


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """inner_size: of one expert.   top_k: experts per token.   renormalize: scale their weights to sum to 1."""

    num_experts: int = 0
    top_k: int = 0
    inner_size: int = 0
    renormalize: bool = False


class Experts(Module):
    """The experts' weights: gate and up of each in one matrix, and down."""

    def __init__(self, hidden_size: int, config: ExpertsConfig) -> None:
        inner = config.inner_size
        gate_up = (Part("gate_proj", inner), Part("up_proj", inner))
        self.gate_up = ExpertLinear(config.num_experts, hidden_size, gate_up, Axis.OUT)
        self.down = ExpertLinear(config.num_experts, inner, (Part("down_proj", hidden_size),), Axis.IN)


class MoE(Module):
    """The sum of each token's top_k experts, weighted by the router; experts are SiLU-gated MLPs."""

    def __init__(self, hidden_size: int, config: ExpertsConfig) -> None:
        self.gate = Linear(hidden_size, config.num_experts, quantizable=False)
        self.experts = Experts(hidden_size, config)
        self.config = config

    def __call__(self, ops: ForwardOps, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        experts = self.experts
        return ops.moe(
            x,
            self.gate(ops, x),
            experts.gate_up.weight.value,
            experts.down.weight.value,
            self.config.top_k,
            self.config.renormalize,
        )
