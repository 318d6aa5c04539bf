"""Qwen3: Llama's shape with q and k normed per head before the rotary embedding."""

from dataclasses import replace

from pagoda.models.architecture import (
    GGUF_LAYER,
    HF_LAYER,
    ArchConfig,
    Architecture,
    gguf_keys,
    hf_keys,
    read_activation,
    read_spec,
)
from pagoda.models.config_reader import ConfigReader
from pagoda.models.qwen2 import layer_windows
from pagoda.models.read_rope import read_rope


def read(config: ConfigReader) -> ArchConfig:
    rope = read_rope(config)
    max_position = rope.max_position(config.integer("max_position_embeddings"))
    spec = read_spec(config, "qwen3", max_position, layer_windows(config))
    attention_bias = config.flag("attention_bias", False)
    return ArchConfig(
        spec=spec,
        rms_norm_eps=config.not_negative("rms_norm_eps", 1e-6),
        activation=read_activation(config),
        rope_full=rope,
        rope_window=rope,
        attention_scale=spec.head_dim**-0.5,
        qkv_bias=attention_bias,
        attention_out_bias=config.flag("attention_out_bias", attention_bias),
    )


QWEN3 = Architecture(
    name="qwen3",
    hf_names=("Qwen3ForCausalLM",),
    gguf_name="qwen3",
    read=read,
    hf_keys=(hf_keys(replace(HF_LAYER, q_norm="self_attn.q_norm", k_norm="self_attn.k_norm")),),
    gguf_keys=gguf_keys(replace(GGUF_LAYER, q_norm="attn_q_norm", k_norm="attn_k_norm")),
)
