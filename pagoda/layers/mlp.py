"""Feed-forward layers: the plain and the gated MLP, and a mixture of gated MLPs."""

from dataclasses import dataclass

from pagoda.layers.linear import ExpertLinear, Linear
from pagoda.layers.module import Module
from pagoda.layers.parameter import Axis, Parameter, Part, Vector
from pagoda.ops.declare import Activation
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import RankGroup, Tensor


class GatedMLP(Module):
    """down(activation(gate(x)) * up(x)); gate and up are one multiplication.

    names: of gate, up and down in the checkpoint.
    """

    def __init__(
        self,
        hidden_size: int,
        inner_size: int,
        activation: Activation,
        bias: bool = False,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> None:
        gate_name, up_name, down_name = names
        parts = (Part(gate_name, inner_size), Part(up_name, inner_size))
        self.gate_up = Linear(hidden_size, parts, bias, Axis.OUT, in_pairs=True)
        self.down_proj = Linear(inner_size, (Part(down_name, hidden_size),), bias, Axis.IN)
        self.activation = activation

    def __call__(self, ops: ForwardOps, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        return self.down_proj(ops, ops.gate(self.gate_up(ops, x), self.activation))


class PlainMLP(Module):
    """down(activation(up(x))).   names: of up and down in the checkpoint."""

    def __init__(
        self,
        hidden_size: int,
        inner_size: int,
        activation: Activation,
        bias: bool = False,
        names: tuple[str, str] = ("up_proj", "down_proj"),
    ) -> None:
        up_name, down_name = names
        self.up_proj = Linear(hidden_size, (Part(up_name, inner_size),), bias, Axis.OUT)
        self.down_proj = Linear(inner_size, (Part(down_name, hidden_size),), bias, Axis.IN)
        self.activation = activation

    def __call__(self, ops: ForwardOps, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        return self.down_proj(ops, ops.activate(self.up_proj(ops, x), self.activation))


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """How a token's experts are chosen, where not by the router's logits alone: see `ForwardOps.route`.

    top: groups that a token takes experts of.   has_bias: the checkpoint has a bias of the choice, in float32.
    """

    count: int = 1
    top: int = 1
    best: int = 1
    sigmoid: bool = False
    has_bias: bool = False
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """inner_size: of one expert.   top_k: experts per token.   renormalize: scale their weights to sum to 1.

    shared_size: inner size of an MLP that every token has as well, 0 for none.   shared_gate: a sigmoid multiplies it.
    bias: of the router and of all experts.   limit, alpha: of their activation, see `ForwardOps.moe`.
    scales_input: see there.
    alternates: the checkpoint has gate and up of an expert as one matrix, row by row in turn.
    groups: None where experts are chosen by the router's logits alone.
    """

    num_experts: int = 0
    top_k: int = 0
    inner_size: int = 0
    renormalize: bool = False
    shared_size: int = 0
    shared_gate: bool = False
    bias: bool = False
    alpha: float = 1.0
    limit: float = 0.0
    scales_input: bool = False
    alternates: bool = False
    groups: ExpertGroups | None = None

    def route_in_groups(self, ops: ForwardOps, logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """See `ForwardOps.route`. There must be groups."""
        assert self.groups is not None
        of = self.groups
        how = of.sigmoid, bias, of.count, of.top, of.best, of.factor
        return ops.route(logits, self.top_k, self.renormalize, *how)


class StackedExperts(Module):
    """Experts, MLPs of `size` in and out, of which each token has some. Ranks compute a share of every expert.

    gate_up: gate and up of each in one matrix, or up alone if they are not `gated`.
    """

    def __init__(
        self, size: int, config: ExpertsConfig, activation: Activation = Activation.SILU, gated: bool = True
    ) -> None:
        inner = config.inner_size
        parts = (Part("gate_proj", inner), Part("up_proj", inner)) if gated else (Part("up_proj", inner),)
        if config.alternates:
            parts = (Part("gate_up_proj", inner, alternates=True),) * 2
        self.gate_up = ExpertLinear(config.num_experts, size, parts, Axis.OUT, config.bias)
        self.down = ExpertLinear(config.num_experts, inner, (Part("down_proj", size),), Axis.IN, config.bias)
        self.how = activation, config.alpha, config.limit, config.scales_input
        self.ranks: RankGroup | None = None

    def divide(self, ranks: RankGroup, group: int) -> None:
        """Sum the shares of the ranks, each of which routes as all others do."""
        self.ranks = ranks

    def __call__(self, ops: ForwardOps, x: Tensor, chosen: tuple[Tensor, Tensor]) -> Tensor:
        """x [T, size] -> [T, size].   chosen: experts and weights, as `ForwardOps.route` returns them."""
        y = ops.moe(x, *chosen, self.gate_up.weight.value, self.down.weight.value, *self.how)
        return y if self.ranks is None else ops.all_reduce(y, self.ranks)


class MoE(Module):
    """The sum of each token's top_k experts, weighted by the router, and of a shared expert, if there is one.

    Experts are SiLU-gated MLPs, or as `limit` says.
    """

    def __init__(self, hidden_size: int, config: ExpertsConfig) -> None:
        self.gate = Linear(hidden_size, config.num_experts, config.bias, quantizable=False)
        self.choice_bias: Parameter[Tensor] | None = None
        if config.groups is not None:
            declared = Vector(config.num_experts, zeros=not config.groups.has_bias, is_float32=True)
            self.choice_bias = Parameter[Tensor](declared)
        self.experts = StackedExperts(hidden_size, config)
        self.shared_expert: GatedMLP | None = None
        self.shared_expert_gate: Linear | None = None
        if config.shared_size:
            self.shared_expert = GatedMLP(hidden_size, config.shared_size, Activation.SILU)
        if config.shared_gate:
            self.shared_expert_gate = Linear(hidden_size, 1, quantizable=False)
        self.config = config

    def __call__(self, ops: ForwardOps, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        y = self.experts(ops, x, self.route(ops, x))
        return y if self.shared_expert is None else ops.add(y, self._shared(ops, x, self.shared_expert))

    def route(self, ops: ForwardOps, x: Tensor) -> tuple[Tensor, Tensor]:
        """See `ForwardOps.route`."""
        config = self.config
        if self.choice_bias is None:
            return ops.route(self.gate(ops, x), config.top_k, config.renormalize)
        return config.route_in_groups(ops, ops.logits(x, self.gate.weight.value), self.choice_bias.value)

    def _shared(self, ops: ForwardOps, x: Tensor, expert: GatedMLP) -> Tensor:
        y = expert(ops, x)
        if self.shared_expert_gate is None:
            return y
        return ops.scale_rows(y, ops.activate(self.shared_expert_gate(ops, x), Activation.SIGMOID))
