"""Attention over the paged cache: fused q, k, v, rotary embedding, output projection."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from pagoda.core.kv_specs import KVGroupKind, KVShape
from pagoda.layers.kv import KVDeclaration, KVPlace
from pagoda.layers.linear import Linear
from pagoda.layers.module import Module
from pagoda.layers.norm import RMSNorm
from pagoda.layers.parameter import Axis, Part
from pagoda.layers.rotary import Rotary
from pagoda.ops.batch import ForwardBatch, KVLayer
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import Tensor


@dataclass(frozen=True, slots=True)
class Heads:
    """num_heads: of queries.   num_kv_heads: divides them.   dim: of one head."""

    num_heads: int
    num_kv_heads: int
    dim: int


class Attention(Module):
    """Causal attention over the whole context or a sliding window.

    window: tokens, 0 for all.   scale: multiplies scores, by default 1 / sqrt(head size).   softcap: 0 is off.
    q_norm, k_norm: applied before the rotary embedding, per head or, if they are as large as all heads, over all of
    them; None where there are none.   kv: what this layer keeps in the cache.   place: where; set when the model's
    layers are put into groups.   keeps_kv: whether it has KV; the same for all of a class.
    """

    keeps_kv: ClassVar[bool] = True

    def __init__(
        self,
        hidden_size: int,
        heads: Heads,
        rotary: Rotary,
        window: int = 0,
        scale: float | None = None,
        softcap: float = 0.0,
        qkv_bias: bool = False,
        out_bias: bool = False,
    ) -> None:
        dim = heads.dim
        q_size, kv_size = heads.num_heads * dim, heads.num_kv_heads * dim
        parts = (
            Part("q_proj", q_size, unit=dim, rotary=True),
            Part("k_proj", kv_size, unit=dim, rotary=True, replicated=True),
            Part("v_proj", kv_size, unit=dim, replicated=True),
        )
        self.qkv = Linear(hidden_size, parts, qkv_bias, Axis.OUT)
        self.o_proj = Linear(q_size, hidden_size, out_bias, Axis.IN, unit=dim)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        self.rotary = rotary
        self.heads = heads
        self.window = window
        self.scale = dim**-0.5 if scale is None else scale
        self.softcap = softcap
        kind = KVGroupKind.WINDOW if window else KVGroupKind.FULL
        shape = KVShape(heads.num_kv_heads, dim, dim)
        self.kv: KVDeclaration | None = KVDeclaration(kind, window, shape) if self.keeps_kv else None
        self.place = KVPlace()

    def project(self, ops: ForwardOps, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, hidden] -> q, k, v [T, heads, head size], q and k normed where the model has norms for them."""
        heads = self.heads
        q, k, v = ops.split_qkv(self.qkv(ops, x), heads.num_heads, heads.num_kv_heads, heads.dim)
        if self.q_norm is not None:
            q = self.q_norm(ops, q)
        if self.k_norm is not None:
            k = self.k_norm(ops, k)
        return q, k, v

    def __call__(
        self,
        ops: ForwardOps,
        x: Tensor,
        residual: Tensor,
        batch: ForwardBatch,
        kv: Sequence[KVLayer],
        last: bool,
    ) -> tuple[Tensor, Tensor]:
        """x, residual [T, hidden] -> attention output and residual, of the tokens that continue.

        Writes the K and V of all tokens. last: this is the model's last layer, after which only the batch's tail is
        needed.
        """
        cache, metadata = kv[self.place.index], batch.metadata[self.place.group]
        q, k, v = self.project(ops, x)
        q = ops.rotary_write_kv(q, k, v, batch.positions, self.rotary.cos, self.rotary.sin, cache, metadata)
        if last:
            metadata = batch.tail.metadata[self.place.group]
            q, residual = (ops.select_rows(rows, batch.tail.index) for rows in (q, residual))
        attended = ops.attention(q, cache, metadata, self.scale, self.window, self.softcap)
        return self.o_proj(ops, attended), residual


class TwoSidedAttention(Attention):
    """The same without KV: every token attends to all tokens of its prompt, or to those less than `window` away."""

    keeps_kv = False

    def __call__(
        self,
        ops: ForwardOps,
        x: Tensor,
        residual: Tensor,
        batch: ForwardBatch,
        kv: Sequence[KVLayer],
        last: bool,
    ) -> tuple[Tensor, Tensor]:
        q, k, v = self.project(ops, x)
        q, k = ops.rotary(q, k, batch.positions, self.rotary.cos, self.rotary.sin)
        attended = ops.bidirectional_attention(q, k, v, batch.metadata[0], self.scale, self.window, self.softcap)
        if last:
            attended, residual = (ops.select_rows(rows, batch.tail.index) for rows in (attended, residual))
        return self.o_proj(ops, attended), residual
