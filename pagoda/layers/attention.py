"""The attention block of one layer: fused QKV, rotary embedding, paged attention, output projection."""

from dataclasses import dataclass

from pagoda.layers.rotary import RotaryTable
from pagoda.ops.batch import AttentionMetadata, KVLayer
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import LinearWeight, Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """Weights and facts of one layer's attention.

    qkv: [(H + 2 K) D, hidden].   out: [hidden, H D].   q_norm, k_norm: [D], None where there are none.
    scale: what scores are multiplied with.   window: tokens, 0 for all.   softcap: 0 is off.
    """

    qkv: LinearWeight
    out: LinearWeight
    q_norm: Tensor | None
    k_norm: Tensor | None
    rotary: RotaryTable
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int
    softcap: float
    norm_eps: float
    unit_offset_norms: bool

    def queries(
        self, ops: ForwardOps, x: Tensor, positions: Tensor, kv: KVLayer, metadata: AttentionMetadata
    ) -> Tensor:
        """x [T, hidden] -> [T, H, D]; writes the tokens' K and V into the cache."""
        q, k, v = ops.split_qkv(ops.linear(x, self.qkv), self.num_heads, self.num_kv_heads, self.head_dim)
        if self.q_norm is not None:
            q = ops.rms_norm(q, self.q_norm, self.norm_eps, self.unit_offset_norms)
        if self.k_norm is not None:
            k = ops.rms_norm(k, self.k_norm, self.norm_eps, self.unit_offset_norms)
        return ops.rotary_write_kv(q, k, v, positions, self.rotary.cos, self.rotary.sin, kv, metadata)

    def attend(self, ops: ForwardOps, q: Tensor, kv: KVLayer, metadata: AttentionMetadata) -> Tensor:
        """q [T, H, D] -> [T, hidden]: what the queries find in the cache, and the output projection."""
        attended = ops.attention(q, kv, metadata, self.scale, self.window, self.softcap)
        return ops.linear(attended, self.out)
