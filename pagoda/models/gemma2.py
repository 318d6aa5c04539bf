"""Gemma 2: windows in every other layer, soft caps on scores and logits, four norms a layer."""

from pagoda.models.architecture import Architecture
from pagoda.models.config_reader import ConfigReader, read_rope
from pagoda.models.decoder_config import (
    DecoderConfig,
    Norm,
    read_activation,
    read_layer_types,
    read_spec,
    windows_by_layer_types,
)
from pagoda.models.decoder_layers import SandwichLayer
from pagoda.models.llama import Llama
from pagoda.models.naming import gguf_naming

_CAPS: dict[str, object] = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
# Google's configs omit settings that equal the first release; these are its values. A cap that is null is off.
_DEFAULTS: dict[str, object] = {
    "vocab_size": 256_000,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
_LAYERS_OF_27B = 46

GGUF = gguf_naming(
    {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    }
)


def read(config: ConfigReader) -> DecoderConfig:
    config.refuse("use_bidirectional_attention")
    config = config.changed({**_CAPS, **config.values}).with_defaults(_DEFAULTS)
    windows = windows_by_layer_types(config, read_layer_types(config, 2), config.integer("sliding_window"))
    rope = read_rope(config)
    max_position = rope.max_position(config.integer("max_position_embeddings"))
    spec = read_spec(config, "gemma2", max_position, windows, tie_embeddings=True)
    attention_bias = config.flag("attention_bias", False)
    return DecoderConfig(
        spec=spec,
        norm_eps=config.not_negative("rms_norm_eps", 1e-6),
        activation=read_activation(config, "hidden_activation", "gelu_pytorch_tanh"),
        rope_full=rope,
        rope_window=rope,
        attention_scale=config.positive("query_pre_attn_scalar") ** -0.5,
        attention_softcap=config.not_negative("attn_logit_softcapping", 0.0),
        logit_softcap=config.not_negative("final_logit_softcapping", 0.0),
        embedding_scale=spec.hidden_size**0.5,
        layer=SandwichLayer,
        norm_kind=Norm.RMS_UNIT_OFFSET,
        qkv_bias=attention_bias,
        attention_out_bias=attention_bias,
    )


def gguf_query_scalar(layers_of_27b: int, config: ConfigReader) -> dict[str, object]:
    """Set what llama.cpp does not store: queries are scaled by the size of a head, of the 27B by another."""
    if config.num_layers() == layers_of_27b:
        return {"query_pre_attn_scalar": config.integer("hidden_size") // config.integer("num_attention_heads")}
    return {"query_pre_attn_scalar": config.integer("head_dim")}


def _gguf_settings(config: ConfigReader) -> dict[str, object]:
    caps = {key: config.get(key) if config.has(key) else default for key, default in _CAPS.items()}
    return caps | gguf_query_scalar(_LAYERS_OF_27B, config)


GEMMA2 = Architecture(
    name="gemma2",
    title="Gemma 2",
    hf_names=("Gemma2ForCausalLM",),
    model=Llama,
    read=read,
    gguf_names=("gemma2",),
    gguf=GGUF,
    gguf_settings=_gguf_settings,
)
