"""Attention: fused q, k, v, a rotary embedding, the paged cache, and the output projection."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pagoda.core.kv import KVGroupKind, KVShape
from pagoda.layers.distance_bias import DistanceBias
from pagoda.layers.kv import KVDeclaration, KVPlace
from pagoda.layers.linear import Linear
from pagoda.layers.module import Module
from pagoda.layers.norm import RMSNorm
from pagoda.layers.parameter import Axis, Matrix, Part
from pagoda.layers.rotary import Rotary
from pagoda.layers.sharding import heads_of
from pagoda.ops.batch import AttentionMetadata, ForwardBatch, KVLayer
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import RankGroup, Tensor


@dataclass(frozen=True, slots=True)
class Heads:
    """num_heads: of queries.   num_kv_heads: divides them.   dim: of one head."""

    num_heads: int
    num_kv_heads: int
    dim: int

    def shape_of_kv(self) -> KVShape:
        return KVShape(self.num_kv_heads, self.dim, self.dim)


ENCODER_STATES = "encoder_states"
"""Input of a model with cross attention, in the steps in which the encoder input of a row enters the cache:
[encoder tokens, size], with a row for each slot of the metadata of the groups of cross attention."""

Q_K_V = ("q_proj", "k_proj", "v_proj")
FUSED_Q_K_V = ("qkv_proj", "qkv_proj", "qkv_proj")


class Attention(Module):
    """Attention of the batch's tokens, causal over the cache or of a whole text to itself.

    rotary: None for a model that has positions elsewhere; set to None where the layer does not apply it.
    causal: a token attends to those before it, which are in the cache: `kv` is what this layer keeps there. False: to
        all tokens of its text, which must all be in the batch; `kv` is None.
    window: only tokens less than so many positions away, 0 for all.   scale: multiplies scores, by default
        1 / sqrt(head size).   softcap: of scores, 0 is off.
    names: of q, k and v in the checkpoint; equal where it stores them as one.
    k_bias: False where only q and v have the bias.   out: the name of the output projection, None where that is its
        caller's.
    q_norm, k_norm: applied before the rotary embedding; None where there are none. Of the size of a head: to each. As
        large as all heads: over all of them, so that every rank computes all of q, k and v.
    distance_bias: added to scores, and shared by layers; set where there is one.
    place: where in the cache; set when the model's layers are put into groups. Of one that is not causal: the group
        says which of the batch's metadata has the texts, or parts of them, whose tokens attend to each other.
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
        k_bias: bool = True,
        out: str | None = "o_proj",
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
    ) -> None:
        dim = heads.dim
        q_size, kv_size = heads.num_heads * dim, heads.num_kv_heads * dim
        q, k, v = names
        rope = None if rotary is None else rotary.rope
        parts = (
            Part(q, q_size, unit=dim, rotary=rope),
            Part(k, kv_size, unit=dim, rotary=rope, replicated=True, has_bias=k_bias),
            Part(v, kv_size, unit=dim, replicated=True),
        )
        for norm in (q_norm, k_norm):
            if norm is not None and rope is not None:
                norm.follow_heads(rope, dim)
        norms_all_heads = q_norm is not None and q_norm.size > dim
        self.qkv = Linear(hidden_size, self.stored_parts(parts), qkv_bias, None if norms_all_heads else Axis.OUT)
        self.o_proj: Linear | None = None
        if out is not None:
            self.o_proj = Linear(q_size, (Part(out, hidden_size),), out_bias, Axis.IN, unit=dim)
        self.q_norm, self.k_norm = q_norm, k_norm
        self.rotary = rotary
        self.distance_bias: DistanceBias | None = None
        self.first_head = 0  # of all ranks' heads
        self.heads = self.computed_heads = heads
        self.first_heads: tuple[int, int] | None = None
        self.window = window
        self.scale = dim**-0.5 if scale is None else scale
        self.softcap = softcap
        kind = KVGroupKind.WINDOW if window else KVGroupKind.FULL
        self.kv: KVDeclaration | None = KVDeclaration(kind, window, heads.shape_of_kv()) if causal else None
        self.place = KVPlace()

    def stored_parts(self, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        """Return the parts of q, k and v as a checkpoint has them, where a family's differ from these."""
        return parts

    def divide(self, ranks: RankGroup, group: int) -> None:
        """Attend with some heads. Ranks share KV heads if there are fewer of them; each keeps its own in the cache."""
        matrix = self.qkv.weight.declared
        assert isinstance(matrix, Matrix)
        at_k = max(1, len(matrix.parts) - 2)  # there may be a gate before it, and no v after it
        q, k = (heads_of(self.qkv.weight, part, ranks) for part in (0, at_k))
        self.heads = Heads(len(q), len(k), self.heads.dim)
        self.first_head = q.start
        if matrix.shard is None:
            self.first_heads = q.start, k.start
        else:
            self.computed_heads = self.heads
        if self.kv is not None:
            self.kv = replace(self.kv, shape=self.heads.shape_of_kv())

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
        batch's output rows are needed.
        """
        q, k, v = self.project(ops, x)
        if self.q_norm is not None:
            q = self.q_norm(ops, q)
        if self.k_norm is not None:
            k = self.k_norm(ops, k)
        if self.first_heads is not None:
            q, k, v = self._own_heads(ops, q, k, v, *self.first_heads)
        if self.kv is None:
            attended = self._attend_to_text(ops, q, k, v, batch)
            if last:
                attended, residual = batch.outputs.of(ops.select_rows, attended, residual)
        else:
            cache, metadata = kv[self.place.index], batch.metadata[self.place.group]
            q = self.write(ops, q, k, v, batch, cache)
            if last:
                metadata = batch.outputs.metadata[self.place.group]
                q, residual = batch.outputs.of(ops.select_rows, q, residual)
            attended = self.attend(ops, q, cache, metadata)
        return attended if self.o_proj is None else self.o_proj(ops, attended), residual

    def project(self, ops: ForwardOps, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v of all heads that this rank computes, before `q_norm` and `k_norm`."""
        heads = self.computed_heads
        return ops.split_qkv(self.qkv(ops, x), heads.num_heads, heads.num_kv_heads, heads.dim)

    def _own_heads(
        self, ops: ForwardOps, q: Tensor, k: Tensor, v: Tensor, first: int, first_kv: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return this rank's heads of all that were computed."""
        heads, dim = self.heads, self.heads.dim
        k, v = (ops.select_heads(x, first_kv * dim, heads.num_kv_heads, dim) for x in (k, v))
        return ops.select_heads(q, first * dim, heads.num_heads, dim), k, v

    def attend(self, ops: ForwardOps, q: Tensor, cache: KVLayer, metadata: AttentionMetadata) -> Tensor:
        """Return what this rank's heads attend to in the cache."""
        return ops.attention(q, cache, metadata, self.scale, self.window, self.softcap, *self._bias())

    def _attend_to_text(self, ops: ForwardOps, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch) -> Tensor:
        if self.rotary is not None:
            q, k = ops.rotary(q, k, batch.positions, self.rotary.cos, self.rotary.sin)
        metadata = batch.metadata[self.place.group]
        return ops.bidirectional_attention(q, k, v, metadata, self.scale, self.window, self.softcap, *self._bias())

    def _bias(self) -> tuple[Tensor | None, int]:
        """Return the op's arguments `bias` and `first`."""
        return None if self.distance_bias is None else self.distance_bias.table, self.first_head

    def write(self, ops: ForwardOps, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch, cache: KVLayer) -> Tensor:
        """Write K and V to the cache, and return q as the cache's keys are: rotated or not."""
        metadata = batch.metadata[self.place.group]
        if self.rotary is None:
            ops.write_kv(k, v, cache, metadata)
            return q
        if self.rotary.query_factors is not None:
            q = ops.scale_rows(q, ops.embedding(batch.positions, self.rotary.query_factors))
        return ops.rotary_write_kv(q, k, v, batch.positions, self.rotary.cos, self.rotary.sin, cache, metadata)


class SharedKVAttention(Module):
    """Causal attention to what another attention keeps in the cache: it has queries of its own and no K and V.

    heads, rotary, window: as the other's.   source: the other, which computes before it; set once both exist.
    """

    source: Attention

    def __init__(
        self,
        hidden_size: int,
        heads: Heads,
        rotary: Rotary,
        window: int,
        scale: float,
        q_norm: RMSNorm,
        bias: bool = False,
        out_bias: bool = False,
    ) -> None:
        dim, size = heads.dim, heads.num_heads * heads.dim
        self.q = Linear(hidden_size, (Part("q_proj", size, unit=dim, rotary=rotary.rope),), bias, Axis.OUT)
        self.o_proj = Linear(size, (Part("o_proj", hidden_size),), out_bias, Axis.IN, unit=dim)
        self.q_norm, self.rotary = q_norm, rotary
        self.num_heads, self.dim, self.window, self.scale = heads.num_heads, dim, window, scale

    def divide(self, ranks: RankGroup, group: int) -> None:
        """Attend with some heads. See Attention.divide."""
        self.num_heads = len(heads_of(self.q.weight, 0, ranks))

    def __call__(
        self,
        ops: ForwardOps,
        x: Tensor,
        residual: Tensor,
        batch: ForwardBatch,
        kv: Sequence[KVLayer],
        last: bool,
    ) -> tuple[Tensor, Tensor]:
        """See Attention. Writes nothing to the cache."""
        place = self.source.place
        q = self.q_norm(ops, ops.select_heads(self.q(ops, x), 0, self.num_heads, self.dim))
        # The op rotates keys, too, and there are none: one head stands for them.
        q, _ = ops.rotary(q, ops.select_heads(q, 0, 1, self.dim), batch.positions, self.rotary.cos, self.rotary.sin)
        metadata = batch.metadata[place.group]
        if last:
            metadata = batch.outputs.metadata[place.group]
            q, residual = batch.outputs.of(ops.select_rows, q, residual)
        return self.o_proj(ops, ops.attention(q, kv[place.index], metadata, self.scale, self.window)), residual


class CrossAttention(Module):
    """Attention of the batch's tokens to the encoder's outputs of their request, whose K and V are in the cache.

    They are written in the steps that bring these outputs (ENCODER_STATES). `batch.metadata` of its group has every
    token as a row of its own, which reads all of its request's encoder tokens.
    states_size: elements of an encoder output.   bias: of all projections, but of k only with `k_bias`.
    scale: multiplies scores, by default 1 / sqrt(head size).   out: the name of the output projection.
    """

    def __init__(
        self,
        hidden_size: int,
        heads: Heads,
        states_size: int,
        scale: float | None = None,
        bias: bool = True,
        k_bias: bool = True,
        names: tuple[str, str, str] = Q_K_V,
        out: str = "o_proj",
    ) -> None:
        dim = heads.dim
        q_size, kv_size = heads.num_heads * dim, heads.num_kv_heads * dim
        q, k, v = names
        self.q = Linear(hidden_size, (Part(q, q_size, unit=dim),), bias, Axis.OUT)
        parts = (
            Part(k, kv_size, unit=dim, replicated=True, has_bias=k_bias),
            Part(v, kv_size, unit=dim, replicated=True),
        )
        self.kv_proj = Linear(states_size, parts, bias, Axis.OUT)
        self.o_proj = Linear(q_size, (Part(out, hidden_size),), bias, Axis.IN, unit=dim)
        self.heads = heads
        self.scale = dim**-0.5 if scale is None else scale
        self.kv: KVDeclaration | None = KVDeclaration(KVGroupKind.CROSS, 0, heads.shape_of_kv())
        self.place = KVPlace()

    def divide(self, ranks: RankGroup, group: int) -> None:
        """Attend with some heads. See Attention.divide."""
        num_heads, num_kv_heads = (len(heads_of(of.weight, 0, ranks)) for of in (self.q, self.kv_proj))
        self.heads = Heads(num_heads, num_kv_heads, self.heads.dim)
        self.kv = KVDeclaration(KVGroupKind.CROSS, 0, self.heads.shape_of_kv())

    def __call__(self, ops: ForwardOps, x: Tensor, batch: ForwardBatch, kv: Sequence[KVLayer], last: bool) -> Tensor:
        """x [T, hidden] -> the same shape.   last: its rows are the batch's output rows."""
        heads, dim, cache = self.heads, self.heads.dim, kv[self.place.index]
        metadata = batch.metadata[self.place.group]
        states = batch.inputs.get(ENCODER_STATES)
        if states is not None:
            _, k, v = ops.split_qkv(self.kv_proj(ops, states.tensor), 0, heads.num_kv_heads, dim)
            ops.write_kv(k, v, cache, metadata)
        q, _, _ = ops.split_qkv(self.q(ops, x), heads.num_heads, 0, dim)
        if last:
            metadata = batch.outputs.metadata[self.place.group]
        return self.o_proj(ops, ops.attention(q, cache, metadata, self.scale))
