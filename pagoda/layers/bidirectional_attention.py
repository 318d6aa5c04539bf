"""Attention of every token to all tokens of its request, as encoders have it."""

from pagoda.layers.attention import Heads
from pagoda.layers.linear import Linear
from pagoda.layers.module import Module
from pagoda.layers.parameter import Axis, Part
from pagoda.layers.rotary import Rotary
from pagoda.ops.batch import ForwardBatch
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import Tensor


class BidirectionalAttention(Module):
    """Fused q, k and v, a rotary embedding where there is one, and attention; the output projection is its caller's.

    Keeps no KV: all tokens of a request are in the batch.
    names: of q, k and v in the checkpoint; equal where it stores them as one.   window: only tokens less than so many
    positions away, 0 for all.   scale: multiplies scores, by default 1 / sqrt(head size).
    """

    def __init__(
        self,
        hidden_size: int,
        heads: Heads,
        names: tuple[str, str, str],
        bias: bool,
        rotary: Rotary | None = None,
        window: int = 0,
        scale: float | None = None,
    ) -> None:
        sizes = (heads.num_heads * heads.dim, heads.num_kv_heads * heads.dim, heads.num_kv_heads * heads.dim)
        parts = tuple(
            Part(name, size, unit=heads.dim, rotary=rotary is not None and at < 2, replicated=at > 0)
            for at, (name, size) in enumerate(zip(names, sizes, strict=True))
        )
        self.qkv = Linear(hidden_size, parts, bias, Axis.OUT)
        self.rotary = rotary
        self.heads = heads
        self.window = window
        self.scale = heads.dim**-0.5 if scale is None else scale

    def __call__(self, ops: ForwardOps, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, hidden] -> [T, heads * head size]."""
        heads = self.heads
        q, k, v = ops.split_qkv(self.qkv(ops, x), heads.num_heads, heads.num_kv_heads, heads.dim)
        if self.rotary is not None:
            q, k = ops.rotary(q, k, batch.positions, self.rotary.cos, self.rotary.sin)
        return ops.bidirectional_attention(q, k, v, batch.metadata[0], self.scale, self.window)
