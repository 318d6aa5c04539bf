"""The gated MLP of one layer."""

from dataclasses import dataclass

from pagoda.layers.activation import Activation
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import LinearWeight, Tensor


@dataclass(frozen=True, slots=True, eq=False)
class GatedMLP:
    """gate_up: [2 I, hidden], gate then up.   down: [hidden, I]."""

    gate_up: LinearWeight
    down: LinearWeight
    activation: Activation

    def __call__(self, ops: ForwardOps, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        gate_up = ops.linear(x, self.gate_up)
        act = ops.silu_mul(gate_up) if self.activation is Activation.SILU else ops.gelu_tanh_mul(gate_up)
        return ops.linear(act, self.down)
