"""GPT-OSS: experts with biases and a limited activation, sinks in attention, a window in every other layer."""

from dataclasses import replace

from pagoda.layers.parameter import Parameter, Vector
from pagoda.layers.rotary import Rotary
from pagoda.models.architecture import Architecture
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import (
    DecoderConfig,
    read_decoder,
    read_experts,
    read_layer_types,
    windows_by_layer_types,
)
from pagoda.models.decoder_layers import DecoderAttention, LlamaLayer
from pagoda.models.llama import Llama
from pagoda.models.naming import Naming, gguf_naming
from pagoda.ops.batch import AttentionMetadata, KVLayer
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import Tensor


class SinkAttention(DecoderAttention):
    """Each head has a score of its own in the softmax, of no value."""

    def __init__(self, config: DecoderConfig, index: int, rotary: Rotary) -> None:
        super().__init__(config, index, rotary)
        self.sinks = Parameter[Tensor](Vector(self.heads.num_heads))

    def attend(self, ops: ForwardOps, q: Tensor, cache: KVLayer, metadata: AttentionMetadata) -> Tensor:
        how = self.scale, self.window, self.softcap, *self._bias()
        return ops.attention(q, cache, metadata, *how, self.sinks.value)


class GPTOSSLayer(LlamaLayer):
    attention = SinkAttention


def read(config: ConfigReader) -> DecoderConfig:
    config = config.with_defaults({"rms_norm_eps": 1e-5})
    if not config.has("rope_parameters") and not config.has("rope_scaling"):
        raise config.wrong("rope_scaling", "an object")
    windows = windows_by_layer_types(config, read_layer_types(config, 2), config.integer("sliding_window", 128))
    decoder = read_decoder(config, "gpt_oss", windows, 150_000.0)
    attention_bias = config.flag("attention_bias", True)
    return replace(
        decoder,
        layer=GPTOSSLayer,
        qkv_bias=attention_bias,
        attention_out_bias=attention_bias,
        experts=replace(
            read_experts(config, "intermediate_size", renormalize=True),
            bias=True,
            alpha=config.positive("swiglu_alpha", 1.702),
            limit=config.positive("swiglu_limit", 7.0),
            alternates=config.flag(_ALTERNATES, True),
        ),
    )


_ALTERNATES = "gate_and_up_alternate"
"""Not in config.json: whether an expert's gate and up are one tensor, as in safetensors."""


def _gguf_settings(config: ConfigReader) -> dict[str, object]:
    """Set what llama.cpp does not store: the bounds of YaRN are fractions, as in every GPT-OSS."""
    scaling = config.get("rope_scaling")
    assert scaling is None or isinstance(scaling, dict)
    return {_ALTERNATES: False, "rope_scaling": scaling and {**scaling, "truncate": False}}


GPT_OSS = Architecture(
    name="gpt_oss",
    title="GPT-OSS",
    hf_names=("GptOssForCausalLM",),
    model=Llama,
    read=read,
    hf=(
        Naming(
            substitutions=(
                (r"\.mlp\.gate\.", ".mlp.router."),
                (r"\.mlp\.experts\.(\d+)\.(\w+)\.weight$", r".mlp.experts.\2[\1]"),
                (r"\.mlp\.experts\.(\d+)\.(\w+)\.bias$", r".mlp.experts.\2_bias[\1]"),
            ),
            transposed=r"\.experts\.\w+_proj$",
        ),
    ),
    gguf_names=("gpt-oss",),
    experts=True,
    gguf=gguf_naming(
        {"post_attention_layernorm": "post_attention_norm", "self_attn.sinks": "attn_sinks.weight"},
    ),
    gguf_settings=_gguf_settings,
)
