"""GatedDelta: a convolution over the last few tokens and the gated delta rule, in place of attention (Qwen3-Next)."""

from collections.abc import Container
from dataclasses import dataclass

from pagoda.layers.linear import Linear
from pagoda.layers.parameter import Parameter, Part, Vector
from pagoda.layers.recurrent import RecurrentLayer
from pagoda.ops.batch import AttentionMetadata, KVLayer
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import Tensor


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """num_heads of value_dim values; num_groups of adjacent heads share their query and key, of key_dim each.

    num_taps: tokens that the convolution sees, itself included.   tiled: head h is of group h % num_groups instead.
    """

    num_heads: int
    num_groups: int
    key_dim: int
    value_dim: int
    num_taps: int
    tiled: bool = False

    @property
    def keys_size(self) -> int:
        return self.num_groups * self.key_dim

    @property
    def values_size(self) -> int:
        return self.num_heads * self.value_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: queries and keys of all groups, then the values."""
        return 2 * self.keys_size + self.values_size


class GatedDelta(RecurrentLayer):
    """out_proj(norm(delta rule(convolution(qkv))) * silu(z)); in_proj gives qkv and z, in_gates b and a of each head.

    names: of q, k, v, z, b and a in the checkpoint.   alternating: names whose parts alternate, group by group.
    norm_eps: of the norm, over each head.
    """

    def __init__(
        self,
        hidden_size: int,
        shape: DeltaShape,
        norm_eps: float,
        names: tuple[str, ...],
        alternating: Container[str] = (),
    ) -> None:
        keys, values, heads = shape.keys_size, shape.values_size, shape.num_heads
        sizes = (keys, keys, values, values, heads, heads)
        parts = [
            Part(name, size, unit=size // shape.num_groups, alternates=name in alternating)
            for name, size in zip(names, sizes, strict=True)
        ]
        self.in_proj = Linear(hidden_size, parts[:4])
        # Few, and exponents: how far a state decays depends on them.
        self.in_gates = Linear(hidden_size, parts[4:], quantizable=False)
        states = (heads, shape.key_dim, shape.value_dim)
        super().__init__("layers of the gated delta rule", shape.conv_size, shape.num_taps, matrices=states)
        self.rate = Parameter[Tensor](Vector(heads, negative_exp=True, is_float32=True))
        self.dt_bias = Parameter[Tensor](Vector(heads, is_float32=True))
        self.norm = Parameter[Tensor](Vector(shape.value_dim))
        self.out_proj = Linear(values, (Part("out_proj", hidden_size),))
        self.shape, self.norm_eps = shape, norm_eps
        self.takes_adapters = not shape.tiled  # whose heads are in the order of the published checkpoints

    def mix(self, ops: ForwardOps, x: Tensor, states: KVLayer, metadata: AttentionMetadata) -> Tensor:
        shape, y, gates = self.shape, self.in_proj(ops, x), self.in_gates(ops, x)
        qkv = ops.select_heads(y, 0, 1, shape.conv_size)
        z = ops.select_heads(y, shape.conv_size, 1, shape.values_size)
        b, a = (ops.select_heads(gates, at, 1, shape.num_heads) for at in (0, shape.num_heads))
        qkv = self.convolve(ops, qkv, states, metadata)
        y = ops.gated_delta(qkv, a, b, self.rate.value, self.dt_bias.value, states, metadata, shape.tiled)
        y = ops.select_heads(y, 0, shape.num_heads, shape.value_dim)
        return ops.gated_rms_norm(y, z, self.norm.value, self.norm_eps, gate_first=False)
