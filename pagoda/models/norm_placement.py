"""Decoders whose norms are elsewhere than Llama's: after attention and MLP, too, or only there; or before both of
them, which then compute from the same state.
"""

from collections.abc import Sequence

from pagoda.layers.rotary import Rotary
from pagoda.models.decoder_config import DecoderConfig
from pagoda.models.llama import Llama, LlamaLayer, attention_of, mlp_of
from pagoda.ops.batch import ForwardBatch, KVLayer
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import Tensor


class SandwichLayer(LlamaLayer):
    """Four norms: attention and MLP are each followed by one before their output joins the residual stream."""

    def __init__(self, config: DecoderConfig, index: int, rotary: Rotary) -> None:
        self.input_layernorm = config.norm()
        self.self_attn = attention_of(config, index, rotary)
        self.post_attention_layernorm = config.norm()
        self.pre_feedforward_layernorm = config.norm()
        self.mlp = mlp_of(config, index)
        self.post_feedforward_layernorm = config.norm()

    def __call__(
        self,
        ops: ForwardOps,
        x: Tensor,
        residual: Tensor | None,
        batch: ForwardBatch,
        kv: Sequence[KVLayer],
        last: bool,
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm.add(ops, x, residual)
        x, residual = self.self_attn(ops, x, residual, batch, kv, last)
        x = self.post_attention_layernorm(ops, x)
        x, residual = self.pre_feedforward_layernorm.add(ops, x, residual)
        x = self.mlp(ops, x)
        return self.post_feedforward_layernorm(ops, x), residual


class PostNormLayer(LlamaLayer):
    """Attention and MLP compute with the residual stream as it is; a norm follows each of them."""

    def __init__(self, config: DecoderConfig, index: int, rotary: Rotary) -> None:
        self.self_attn = attention_of(config, index, rotary)
        self.post_attention_layernorm = config.norm()
        self.mlp = mlp_of(config, index)
        self.post_feedforward_layernorm = config.norm()

    def __call__(
        self,
        ops: ForwardOps,
        x: Tensor,
        residual: Tensor | None,
        batch: ForwardBatch,
        kv: Sequence[KVLayer],
        last: bool,
    ) -> tuple[Tensor, Tensor]:
        stream = x if residual is None else ops.add(x, residual)
        x, stream = self.self_attn(ops, stream, stream, batch, kv, last)
        stream = ops.add(self.post_attention_layernorm(ops, x), stream)
        x = self.mlp(ops, stream)
        return self.post_feedforward_layernorm(ops, x), stream


class ParallelLayer(LlamaLayer):
    """The MLP computes from the residual stream as it is in front of the attention, which also joins it; two norms."""

    def __call__(
        self,
        ops: ForwardOps,
        x: Tensor,
        residual: Tensor | None,
        batch: ForwardBatch,
        kv: Sequence[KVLayer],
        last: bool,
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm.add(ops, x, residual)
        attended, residual = self.self_attn(ops, x, residual, batch, kv, last)
        if self.post_attention_layernorm is not self.input_layernorm:
            x = self.post_attention_layernorm(ops, residual)
        elif last:
            x = ops.select_rows(x, batch.tail.index)
        return ops.add(self.mlp(ops, x), attended), residual


class OneNormLayer(ParallelLayer):
    """A parallel layer with one norm, for attention and MLP."""

    def __init__(self, config: DecoderConfig, index: int, rotary: Rotary) -> None:
        super().__init__(config, index, rotary)
        self.post_attention_layernorm = self.input_layernorm


class ParallelDecoder(Llama):
    layer = ParallelLayer


class OneNormDecoder(Llama):
    layer = OneNormLayer


class SandwichDecoder(Llama):
    layer = SandwichLayer


class PostNormDecoder(Llama):
    layer = PostNormLayer
