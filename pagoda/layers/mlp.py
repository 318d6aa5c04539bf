"""The gated MLP of one layer."""

from dataclasses import dataclass

import torch

from pagoda.kernels.ops import LinearWeight, Ops
from pagoda.layers.activation import Activation


@dataclass(frozen=True, slots=True, eq=False)
class GatedMLP:
    """gate_up: [2 I, hidden], gate then up.   down: [hidden, I]."""

    gate_up: LinearWeight
    down: LinearWeight
    activation: Activation

    def __call__(self, ops: Ops, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]."""
        gate_up = ops.linear(x, self.gate_up)
        act = ops.silu_mul(gate_up) if self.activation is Activation.SILU else ops.gelu_tanh_mul(gate_up)
        return ops.linear(act, self.down)
