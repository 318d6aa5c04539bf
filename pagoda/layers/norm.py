"""RMSNorm and LayerNorm."""

from dataclasses import replace

from pagoda.layers.module import Module
from pagoda.layers.parameter import Parameter, Vector
from pagoda.layers.rope_config import RopeConfig
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import Tensor


class RMSNorm(Module):
    """x / rms(x) * weight, over the last dimension.   unit_offset: times 1 + weight.

    zeros: the checkpoint has no weight, it is 0.
    """

    def __init__(self, size: int, eps: float, unit_offset: bool = False, zeros: bool = False) -> None:
        self.weight = Parameter[Tensor](Vector(size, unit_offset, zeros))
        self.size = size
        self.eps = eps
        self.unit_offset = unit_offset

    def follow_heads(self, rope: RopeConfig, head_dim: int) -> None:
        """Have the weight in the order in which heads are in memory: it norms such as the embedding turns."""
        declared = self.weight.declared
        assert isinstance(declared, Vector)
        self.weight = Parameter[Tensor](replace(declared, unit=head_dim, rotary=rope))

    def __call__(self, ops: ForwardOps, x: Tensor) -> Tensor:
        """x [..., size] -> the same shape."""
        return ops.rms_norm(x, self.weight.value, self.eps, self.unit_offset)

    def add(self, ops: ForwardOps, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add x to the residual stream and norm the sum: (normed, new residual), in one op.

        residual: None at the model's start, where x itself is the stream.
        """
        if residual is None:
            return self(ops, x), x
        return ops.add_rms_norm(x, residual, self.weight.value, self.eps, self.unit_offset)


class LayerNorm(Module):
    """(x - mean) / deviation * weight + bias, over the last dimension.   bias: False where the checkpoint has none."""

    def __init__(self, size: int, eps: float, bias: bool = True) -> None:
        self.weight = Parameter[Tensor](Vector(size))
        self.bias = Parameter[Tensor](Vector(size, zeros=not bias))
        self.eps = eps

    def __call__(self, ops: ForwardOps, x: Tensor) -> Tensor:
        """x [T, size] -> the same shape."""
        return ops.layer_norm(x, self.weight.value, self.bias.value, self.eps)

    def add(self, ops: ForwardOps, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """As `RMSNorm.add`."""
        if residual is None:
            return self(ops, x), x
        return ops.add_layer_norm(x, residual, self.weight.value, self.bias.value, self.eps)
