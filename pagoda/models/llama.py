"""Llama 2 and 3, SmolLM2, and all that share their shape."""

from collections.abc import Sequence
from dataclasses import replace

from pagoda.layers.attention import Attention
from pagoda.layers.kv import place_kv
from pagoda.layers.linear import Embedding, LMHead
from pagoda.layers.mlp import GatedMLP, MoE
from pagoda.layers.module import Module
from pagoda.layers.norm import RMSNorm
from pagoda.layers.rotary import Rotary
from pagoda.models.architecture import Architecture
from pagoda.models.base import Model
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import DecoderConfig, read_decoder
from pagoda.models.naming import gguf_naming
from pagoda.ops.batch import ForwardBatch, KVLayer
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import Tensor


def attention_of(
    config: DecoderConfig, index: int, rotary: Rotary, causal: bool = True, norms_all_heads: bool = False
) -> Attention:
    """Return the attention of layer `index`."""
    return Attention(
        config.spec.hidden_size,
        config.heads,
        rotary,
        causal,
        window=config.spec.layer_windows[index],
        scale=config.attention_scale,
        softcap=config.attention_softcap,
        qkv_bias=config.qkv_bias,
        out_bias=config.attention_out_bias,
        norms_all_heads=norms_all_heads,
    )


class LlamaLayer(Module):
    """Attention and a gated MLP, each after a norm; x is added to the residual stream by the norm that follows it."""

    def __init__(self, config: DecoderConfig, index: int, rotary: Rotary) -> None:
        spec, eps = config.spec, config.rms_norm_eps
        self.input_layernorm = RMSNorm(spec.hidden_size, eps)
        self.self_attn = attention_of(config, index, rotary)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, eps)
        self.mlp: GatedMLP | MoE = GatedMLP(
            spec.hidden_size, spec.intermediate_size, config.activation, config.mlp_bias
        )

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


class LlamaModel(Module):
    """Token ids to final hidden states."""

    def __init__(self, config: DecoderConfig, layer: type[LlamaLayer]) -> None:
        spec = config.spec
        full = window = Rotary(config.rope_full, spec.head_dim)
        if config.rope_window != config.rope_full:
            window = Rotary(config.rope_window, spec.head_dim, scaled_by_checkpoint=False)
        self.embed_tokens = Embedding(spec.vocab_size, spec.hidden_size, config.embedding_scale)
        self.layers = [layer(config, index, window if size else full) for index, size in enumerate(spec.layer_windows)]
        self.norm = RMSNorm(spec.hidden_size, config.rms_norm_eps, config.unit_offset_norms)

    def __call__(self, ops: ForwardOps, batch: ForwardBatch, kv: Sequence[KVLayer]) -> Tensor:
        """[num_tail, hidden], normed."""
        x, residual = self.embed_tokens.of_batch(ops, batch), None
        layers = self.layers[: batch.num_layers] if batch.num_layers else self.layers
        for layer in layers:
            x, residual = layer(ops, x, residual, batch, kv, last=layer is layers[-1])
        return self.norm.add(ops, x, residual)[0]


class Llama(Model):
    """The model and its head. Models that differ in their layers name another layer class."""

    layer: type[LlamaLayer] = LlamaLayer
    takes_embeds = True

    def __init__(self, config: DecoderConfig) -> None:
        spec = config.spec
        self.spec = spec
        self.model = LlamaModel(config, self.layer)
        tied = self.model.embed_tokens if spec.tie_embeddings else None
        self.lm_head = LMHead(spec.hidden_size, spec.vocab_size, tied, config.logit_softcap)
        self.kv_groups = place_kv(self)

    def forward(self, ops: ForwardOps, batch: ForwardBatch, kv: Sequence[KVLayer]) -> Tensor:
        return self.model(ops, batch, kv)

    def compute_logits(self, ops: ForwardOps, hidden: Tensor) -> Tensor:
        return self.lm_head(ops, hidden)


def read(config: ConfigReader) -> DecoderConfig:
    attention_bias = config.flag("attention_bias", False)
    return replace(
        read_decoder(config, "llama"),
        qkv_bias=attention_bias,
        attention_out_bias=config.flag("attention_out_bias", attention_bias),
        mlp_bias=config.flag("mlp_bias", False),
    )


LLAMA = Architecture(
    name="llama",
    hf_names=("LlamaForCausalLM",),
    model=Llama,
    read=read,
    gguf_name="llama",
    gguf=gguf_naming(interleaved_rotary=True),
)
