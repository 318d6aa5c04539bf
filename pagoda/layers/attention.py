"""Attention: fused q, k, v, a rotary embedding, the paged cache, and the output projection."""

from collections.abc import Sequence
from dataclasses import dataclass

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


Q_K_V = ("q_proj", "k_proj", "v_proj")


class Attention(Module):
    """Attention of the batch's tokens, causal over the cache or of a whole text to itself.

    rotary: None for a model that has positions elsewhere.
    causal: a token attends to those before it, which are in the cache: `kv` is what this layer keeps there. False: to
        all tokens of its text, which must all be in the batch; `kv` is None.
    window: only tokens less than so many positions away, 0 for all.   scale: multiplies scores, by default
        1 / sqrt(head size).   softcap: of scores, 0 is off.
    names: of q, k and v in the checkpoint; equal where it stores them as one.   out: the name of the output projection,
        None where that is its caller's.
    q_norm, k_norm: applied before the rotary embedding, per head or, if they are as large as all heads, over all of
        them; None where there are none.
    place: where in the cache; set when the model's layers are put into groups.
    """

    def __init__(
        self,
        hidden_size: int,
        heads: Heads,
        rotary: Rotary | None,
        causal: bool = True,
        window: int = 0,
        scale: float | None = None,
        softcap: float = 0.0,
        qkv_bias: bool = False,
        out_bias: bool = False,
        names: tuple[str, str, str] = Q_K_V,
        out: str | None = "o_proj",
    ) -> None:
        dim = heads.dim
        q_size, kv_size = heads.num_heads * dim, heads.num_kv_heads * dim
        q, k, v = names
        parts = (
            Part(q, q_size, unit=dim, rotary=rotary is not None),
            Part(k, kv_size, unit=dim, rotary=rotary is not None, replicated=True),
            Part(v, kv_size, unit=dim, replicated=True),
        )
        self.qkv = Linear(hidden_size, parts, qkv_bias, Axis.OUT)
        self.o_proj: Linear | None = None
        if out is not None:
            self.o_proj = Linear(q_size, (Part(out, hidden_size),), out_bias, Axis.IN, unit=dim)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        self.rotary = rotary
        self.heads = heads
        self.window = window
        self.scale = dim**-0.5 if scale is None else scale
        self.softcap = softcap
        kind = KVGroupKind.WINDOW if window else KVGroupKind.FULL
        shape = KVShape(heads.num_kv_heads, dim, dim)
        self.kv: KVDeclaration | None = KVDeclaration(kind, window, shape) if causal else None
        self.place = KVPlace()

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

        Writes the K and V of all tokens, if it is causal. last: this is the model's last layer, after which only the
        batch's tail is needed.
        """
        heads = self.heads
        q, k, v = ops.split_qkv(self.qkv(ops, x), heads.num_heads, heads.num_kv_heads, heads.dim)
        if self.q_norm is not None:
            q = self.q_norm(ops, q)
        if self.k_norm is not None:
            k = self.k_norm(ops, k)
        if self.kv is None:
            attended = self._attend_to_text(ops, q, k, v, batch)
            if last:
                attended, residual = (ops.select_rows(rows, batch.tail.index) for rows in (attended, residual))
        else:
            cache, metadata = kv[self.place.index], batch.metadata[self.place.group]
            q = self._write(ops, q, k, v, batch, cache)
            if last:
                metadata = batch.tail.metadata[self.place.group]
                q, residual = (ops.select_rows(rows, batch.tail.index) for rows in (q, residual))
            attended = ops.attention(q, cache, metadata, self.scale, self.window, self.softcap)
        return attended if self.o_proj is None else self.o_proj(ops, attended), residual

    def _attend_to_text(self, ops: ForwardOps, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch) -> Tensor:
        if self.rotary is not None:
            q, k = ops.rotary(q, k, batch.positions, self.rotary.cos, self.rotary.sin)
        return ops.bidirectional_attention(q, k, v, batch.metadata[0], self.scale, self.window, self.softcap)

    def _write(self, ops: ForwardOps, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch, cache: KVLayer) -> Tensor:
        """Write K and V to the cache, and return q as the cache's keys are: rotated or not."""
        metadata = batch.metadata[self.place.group]
        if self.rotary is None:
            ops.write_kv(k, v, cache, metadata)
            return q
        return ops.rotary_write_kv(q, k, v, batch.positions, self.rotary.cos, self.rotary.sin, cache, metadata)
