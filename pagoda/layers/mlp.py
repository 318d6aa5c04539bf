"""The gated MLP."""

from pagoda.layers.activation import Activation
from pagoda.layers.linear import Linear
from pagoda.layers.module import Module
from pagoda.layers.parameter import Axis, Part
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import Tensor


class GatedMLP(Module):
    """down(activation(gate(x)) * up(x)); gate and up are one multiplication."""

    def __init__(self, hidden_size: int, inner_size: int, activation: Activation, bias: bool = False) -> None:
        parts = (Part("gate_proj", inner_size), Part("up_proj", inner_size))
        self.gate_up = Linear(hidden_size, parts, bias, Axis.OUT)
        self.down_proj = Linear(inner_size, hidden_size, bias, Axis.IN)
        self.activation = activation

    def __call__(self, ops: ForwardOps, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        gate_up = self.gate_up(ops, x)
        active = ops.silu_mul(gate_up) if self.activation is Activation.SILU else ops.gelu_tanh_mul(gate_up)
        return self.down_proj(ops, active)
