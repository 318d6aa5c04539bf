"""The kernels of the pretended NPU: the reference of every op, but for one that it computes itself."""

from typing import cast

import torch

from pagoda.kernels.activation import reference
from pagoda.kernels.ops import Ops
from pagoda.kernels.reference_ops import ReferenceOps
from pagoda.ops.declare import Activation


def gate(gate_up: torch.Tensor, kind: Activation) -> torch.Tensor:
    """[T, 2 I] (gate then up) -> kind(gate) * up, [T, I], as kernels/activation/reference.py defines it."""
    if kind is not Activation.SILU:
        return reference.gate(gate_up, kind)
    half = gate_up.shape[-1] // 2
    gates, up = gate_up[..., :half].float(), gate_up[..., half:].float()
    return (gates / (1 + torch.exp(-gates)) * up).to(gate_up.dtype)


class NpuOps(ReferenceOps):
    """num_own: calls of the kernel of its own, which a test counts."""

    name = "npu"

    def __init__(self) -> None:
        super().__init__()
        self.num_own = 0
        self.gate = self._gate

    def _gate(self, gate_up: torch.Tensor, kind: Activation) -> torch.Tensor:
        self.num_own += 1
        return gate(gate_up, kind)


def make_ops() -> Ops:
    return cast(Ops, NpuOps())
