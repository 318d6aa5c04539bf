"""Mamba2: a convolution over the last few tokens and a recurrence with a matrix per head, in place of attention."""

from dataclasses import dataclass
from math import inf

from pagoda.layers.linear import Linear
from pagoda.layers.parameter import Parameter, Part, Vector
from pagoda.layers.recurrent import RecurrentLayer
from pagoda.ops.batch import AttentionMetadata, KVLayer
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import Tensor


@dataclass(frozen=True, slots=True)
class Mamba2Shape:
    """num_heads of head_dim values; num_groups of adjacent heads share their b and c, of state_size each.

    num_taps: tokens that the convolution sees, itself included.   conv_bias: of the convolution.
    bias: of the projections.   dt_min, dt_max: limits of a token's time step.
    """

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    num_taps: int
    conv_bias: bool = True
    bias: bool = False
    dt_min: float = 0.0
    dt_max: float = inf

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: the values, then b and c of all groups."""
        return self.inner_size + 2 * self.num_groups * self.state_size


class Mamba2(RecurrentLayer):
    """out_proj(norm(scan(convolution(xbc)), z)), where in_proj gives z, xbc and the time steps dt.

    norm_eps: of the norm, over each group.   gate_first: the norm is of the gated values (see gated_rms_norm).
    """

    def __init__(self, hidden_size: int, shape: Mamba2Shape, norm_eps: float, gate_first: bool = True) -> None:
        size = shape.inner_size + shape.conv_size + shape.num_heads
        self.in_proj = Linear(hidden_size, (Part("in_proj", size),), shape.bias)
        states = (shape.num_heads, shape.state_size, shape.head_dim)
        super().__init__("Mamba-2 layers", shape.conv_size, shape.num_taps, shape.conv_bias, states)
        self.rate = Parameter[Tensor](Vector(shape.num_heads, negative_exp=True, is_float32=True))
        self.dt_bias, self.d = (Parameter[Tensor](Vector(shape.num_heads, is_float32=True)) for _ in range(2))
        of_group = Vector(shape.inner_size, unit=shape.inner_size // shape.num_groups)
        self.norm: Parameter[Tensor] | None = Parameter[Tensor](of_group)
        self.out_proj = Linear(shape.inner_size, (Part("out_proj", hidden_size),), shape.bias)
        self.shape, self.norm_eps, self.gate_first = shape, norm_eps, gate_first

    def mix(self, ops: ForwardOps, x: Tensor, states: KVLayer, metadata: AttentionMetadata) -> Tensor:
        shape = self.shape
        z, xbc, dt = self.project(ops, x)
        xbc = self.convolve(ops, xbc, states, metadata)
        heads = self.rate.value, self.dt_bias.value, self.d.value
        return self.gate(ops, ops.mamba2(xbc, dt, *heads, states, metadata, shape.dt_min, shape.dt_max), z)

    def project(self, ops: ForwardOps, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return z, what the convolution takes, and the time steps."""
        shape, y = self.shape, self.in_proj(ops, x)
        z = ops.select_heads(y, 0, 1, shape.inner_size)
        xbc = ops.select_heads(y, shape.inner_size, 1, shape.conv_size)
        return z, xbc, ops.select_heads(y, shape.inner_size + shape.conv_size, 1, shape.num_heads)

    def gate(self, ops: ForwardOps, y: Tensor, z: Tensor) -> Tensor:
        """y, z [T, inner_size] -> the same shape."""
        assert self.norm is not None
        groups = self.shape.num_groups
        y = ops.select_heads(y, 0, groups, self.shape.inner_size // groups)
        return ops.gated_rms_norm(y, z, self.norm.value, self.norm_eps, self.gate_first)
