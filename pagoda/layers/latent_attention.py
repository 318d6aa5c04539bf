"""Multi-head latent attention (DeepSeek-V2): what the cache keeps of a token is one latent vector for all heads."""

from collections.abc import Sequence
from dataclasses import dataclass

from pagoda.core.kv import KVGroupKind, KVShape
from pagoda.layers.kv import KVDeclaration, KVPlace
from pagoda.layers.linear import Linear
from pagoda.layers.module import Module
from pagoda.layers.norm import RMSNorm
from pagoda.layers.parameter import Axis, Matrix, Parameter, Part, StoredBlock
from pagoda.layers.rotary import Rotary
from pagoda.layers.sharding import divide_weight, heads_of
from pagoda.ops.batch import ForwardBatch, KVLayer
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import LinearWeight, RankGroup, Tensor

_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """Sizes of latent attention.

    latent: of what a token's keys and values of all heads are made from.   plain, rotated: the parts of a head's query
    and key that are not turned, and that are; all heads share the rotated part of the key.   value: of a head's value.
    query_rank: size of what queries are made from, 0 for the hidden state itself.
    """

    num_heads: int
    latent: int
    plain: int
    rotated: int
    value: int
    query_rank: int = 0


class HeadLinear(Module):
    """A matrix of its own for each head: [T, H, inputs] -> [T, H * outputs].

    It is a part of the heads' rows of the tensor that is stored as `name`.   block: which rows those of a head are.
    """

    takes_adapters = False  # of the stored tensor, which no layer multiplies as it is

    def __init__(self, num_heads: int, inputs: int, outputs: int, name: str, block: StoredBlock) -> None:
        part = Part(name, num_heads * outputs, unit=outputs, block=block)
        self.weight = Parameter[LinearWeight](Matrix((part,), inputs, shard=Axis.OUT, quantizable=False))

    def divide(self, ranks: RankGroup, group: int) -> None:
        """Hold the matrices of some heads."""
        divide_weight(self.weight, ranks, group)

    def __call__(self, ops: ForwardOps, x: Tensor) -> Tensor:
        return ops.linear_by_head(x, self.weight.value)


class LatentAttention(Module):
    """Causal attention whose keys and values are linear in a latent vector, which the cache keeps in their place.

    A head's score is q . (W h) for the latent h: it is computed as (W' q) . h, so that all heads attend to one key, the
    latent and the rotated part of the key. Its output is a sum of latents, of which the head's values are made.
    Prefill and decode compute this alike. Every rank keeps the latents.
    bias: of the projections whose outputs are not divided by heads.   scale: multiplies scores.
    """

    def __init__(self, hidden_size: int, heads: LatentHeads, rotary: Rotary, scale: float, bias: bool = False) -> None:
        plain, rotated, value, latent = heads.plain, heads.rotated, heads.value, heads.latent
        self.q_a_proj: Linear | None = None
        self.q_a_layernorm: RMSNorm | None = None
        if heads.query_rank:
            self.q_a_proj = Linear(hidden_size, heads.query_rank, bias)
            self.q_a_layernorm = RMSNorm(heads.query_rank, _NORM_EPS)
        name = "q_b_proj" if heads.query_rank else "q_proj"
        of_query = (
            Part(name, heads.num_heads * plain, unit=plain, alternates=True),
            Part(name, heads.num_heads * rotated, unit=rotated, rotary=rotary.rope, alternates=True),
        )
        self.q = Linear(heads.query_rank or hidden_size, of_query, shard=Axis.OUT)
        stored = "kv_a_proj_with_mqa"
        of_key = (Part(stored, latent), Part(stored, rotated, unit=rotated, rotary=rotary.rope))
        self.kv_a = Linear(hidden_size, of_key, bias)
        self.kv_a_layernorm = RMSNorm(latent, _NORM_EPS)
        of_head = plain + value
        self.q_up = HeadLinear(heads.num_heads, plain, latent, "kv_b_proj", StoredBlock(0, of_head, True))
        self.v_up = HeadLinear(heads.num_heads, latent, value, "kv_b_proj", StoredBlock(plain, of_head))
        self.o_proj = Linear(heads.num_heads * value, (Part("o_proj", hidden_size),), bias, Axis.IN, unit=value)
        self.rotary, self.heads, self.scale = rotary, heads, scale
        self.num_heads = heads.num_heads
        self.kv: KVDeclaration | None = KVDeclaration(KVGroupKind.FULL, 0, KVShape(1, rotated, latent))
        self.place = KVPlace()

    def divide(self, ranks: RankGroup, group: int) -> None:
        """Attend with some heads."""
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
        """See Attention. Writes the latents of all tokens."""
        heads, num_heads = self.heads, self.num_heads
        cache, metadata = kv[self.place.index], batch.metadata[self.place.group]
        of_key = self.kv_a(ops, x)
        latent = self.kv_a_layernorm(ops, ops.select_heads(of_key, 0, 1, heads.latent))
        k = ops.select_heads(of_key, heads.latent, 1, heads.rotated)
        if self.q_a_proj is not None and self.q_a_layernorm is not None:
            x = self.q_a_layernorm(ops, self.q_a_proj(ops, x))
        q = self.q(ops, x)
        if self.rotary.query_factors is not None:
            q = ops.scale_rows(q, ops.embedding(batch.positions, self.rotary.query_factors))
        turned = ops.select_heads(q, num_heads * heads.plain, num_heads, heads.rotated)
        cos, sin = self.rotary.cos, self.rotary.sin
        turned = ops.rotary_write_kv(turned, k, latent, batch.positions, cos, sin, cache, metadata)
        if last:
            metadata = batch.outputs.metadata[self.place.group]
            q, turned, residual = batch.outputs.of(ops.select_rows, q, turned, residual)
        q = self.q_up(ops, ops.select_heads(q, 0, num_heads, heads.plain))
        q = ops.select_heads(q, 0, num_heads, heads.latent)
        attended = ops.latent_attention(q, turned, cache, metadata, self.scale)
        return self.o_proj(ops, self.v_up(ops, attended)), residual
