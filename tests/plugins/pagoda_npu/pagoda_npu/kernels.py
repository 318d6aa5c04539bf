"""The kernels of the pretended NPU: the reference of every op, but for one that it computes itself."""

from typing import cast

import torch

from pagoda.kernels.ops import Ops
from pagoda.kernels.reference_ops import ReferenceOps


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[T, 2 I] (gate then up) -> silu(gate) * up, [T, I], as kernels/activation/reference.py defines it."""
    half = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :half].float(), gate_up[..., half:].float()
    return (gate / (1 + torch.exp(-gate)) * up).to(gate_up.dtype)


class NpuOps(ReferenceOps):
    """num_own: calls of the kernel of its own, which a test counts."""

    name = "npu"

    def __init__(self) -> None:
        super().__init__()
        self.num_own = 0
        self.silu_mul = self._silu_mul

    def _silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        self.num_own += 1
        return silu_mul(gate_up)


def make_ops() -> Ops:
    return cast(Ops, NpuOps())
