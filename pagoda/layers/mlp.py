"""The gated MLP."""

from pagoda.layers.activation import Activation, gate
from pagoda.layers.linear import Linear
from pagoda.layers.module import Module
from pagoda.layers.parameter import Axis, Part
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import Tensor


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
        self.gate_up = Linear(hidden_size, parts, bias, Axis.OUT)
        self.down_proj = Linear(inner_size, (Part(down_name, hidden_size),), bias, Axis.IN)
        self.activation = activation

    def __call__(self, ops: ForwardOps, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        return self.down_proj(ops, gate(ops, self.activation, self.gate_up(ops, x)))
