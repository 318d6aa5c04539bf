"""The layers of decoders: attention and an MLP, with norms before them, after them, or both; or with both of them
computing from the same state.
"""

from collections.abc import Sequence
from typing import ClassVar, TypeAlias

from pagoda.layers.attention import FUSED_Q_K_V, Q_K_V, Attention, SharedKVAttention
from pagoda.layers.gated_delta import GatedDelta
from pagoda.layers.latent_attention import LatentAttention
from pagoda.layers.mamba2 import Mamba2
from pagoda.layers.mlp import GatedMLP, MoE, PlainMLP
from pagoda.layers.module import Module
from pagoda.layers.norm import RMSNorm
from pagoda.layers.rotary import Rotary
from pagoda.layers.short_conv import ShortConv
from pagoda.models.decoder_config import DecoderConfig, QKNorm
from pagoda.ops.batch import ForwardBatch, KVLayer
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import Tensor

AnyAttention: TypeAlias = Attention | LatentAttention | SharedKVAttention | ShortConv | Mamba2 | GatedDelta
"""What mixes a layer's tokens."""


class DecoderAttention(Attention):
    """The attention of layer `index`, as the config says."""

    def __init__(self, config: DecoderConfig, index: int, rotary: Rotary) -> None:
        heads = config.heads_of(index)

        def norm(num_heads: int) -> RMSNorm | None:
            if config.qk_norm is QKNorm.NONE:
                return None
            made = config.norm(heads.dim * (num_heads if config.qk_norm is QKNorm.ALL_HEADS else 1))
            assert isinstance(made, RMSNorm)
            return made

        super().__init__(
            config.spec.hidden_size,
            heads,
            rotary,
            causal=not config.bidirectional,
            window=config.spec.layer_windows[index],
            scale=config.attention_scale,
            softcap=config.attention_softcap,
            qkv_bias=config.qkv_bias,
            out_bias=config.attention_out_bias,
            names=FUSED_Q_K_V if config.fused_qkv else Q_K_V,
            q_norm=norm(heads.num_heads),
            k_norm=norm(heads.num_kv_heads),
        )
        if index in config.unrotated_layers:
            self.rotary = None


def mlp_of(config: DecoderConfig, index: int) -> GatedMLP | PlainMLP | MoE:
    """Return the MLP of layer `index`, or its experts."""
    spec = config.spec
    if config.experts.num_experts and index not in config.dense_layers:
        return MoE(spec.hidden_size, config.experts)
    sizes = spec.hidden_size, spec.intermediate_size
    if config.plain_mlp:
        return PlainMLP(*sizes, config.activation, config.mlp_bias)
    gate, up = ("gate_up_proj",) * 2 if config.fused_gate_up else ("gate_proj", "up_proj")
    return GatedMLP(*sizes, config.activation, config.mlp_bias, (gate, up, "down_proj"))


class LlamaLayer(Module):
    """Attention and an MLP, each after a norm; x is added to the residual stream by the norm that follows it.

    attention: its class, where `make_attention` does not say another.
    """

    attention: ClassVar[type[DecoderAttention]] = DecoderAttention

    def __init__(self, config: DecoderConfig, index: int, rotary: Rotary) -> None:
        self.input_layernorm = config.norm()
        self.self_attn = self.make_attention(config, index, rotary)
        self.post_attention_layernorm = config.norm()
        self.mlp = mlp_of(config, index)

    def make_attention(self, config: DecoderConfig, index: int, rotary: Rotary) -> AnyAttention:
        """Return the attention of layer `index`."""
        return self.attention(config, index, rotary)

    def __call__(
        self,
        ops: ForwardOps,
        x: Tensor,
        residual: Tensor | None,
        batch: ForwardBatch,
        kv: Sequence[KVLayer],
        last: bool,
    ) -> tuple[Tensor, Tensor]:
        """x [T, hidden], not yet added to the residual stream -> the same for the tokens that continue."""
        x, residual = self.input_layernorm.add(ops, x, residual)
        x, residual = self.self_attn(ops, x, residual, batch, kv, last)
        x, residual = self.post_attention_layernorm.add(ops, x, residual)
        return self.mlp(ops, x), residual


class SandwichLayer(LlamaLayer):
    """Four norms: attention and MLP are each followed by one before their output joins the residual stream."""

    def __init__(self, config: DecoderConfig, index: int, rotary: Rotary) -> None:
        super().__init__(config, index, rotary)
        self.pre_feedforward_layernorm = config.norm()
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
        x = self.feed_forward(ops, x, residual)
        return self.post_feedforward_layernorm(ops, x), residual

    def feed_forward(self, ops: ForwardOps, x: Tensor, residual: Tensor) -> Tensor:
        """x: the residual stream, normed."""
        return self.mlp(ops, x)


class PostNormLayer(LlamaLayer):
    """Attention and MLP compute with the residual stream as it is; a norm follows each of them."""

    def __init__(self, config: DecoderConfig, index: int, rotary: Rotary) -> None:
        self.self_attn = self.make_attention(config, index, rotary)
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
    """The MLP computes from the residual stream as it is in front of the attention, which also joins it."""

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
            x = ops.select_rows(x, batch.outputs.index)
        return ops.add(self.mlp(ops, x), attended), residual


class SharedNormLayer(ParallelLayer):
    """Attention and MLP compute from the same state, normed once."""

    def __init__(self, config: DecoderConfig, index: int, rotary: Rotary) -> None:
        super().__init__(config, index, rotary)
        self.post_attention_layernorm = self.input_layernorm
