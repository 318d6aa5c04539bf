"""Llama 2 and 3, SmolLM2, and all that share their shape."""

from pagoda.models.architecture import ArchConfig, Architecture, gguf_keys, read_activation, read_spec
from pagoda.models.config_reader import ConfigReader
from pagoda.models.read_rope import read_rope


def read(config: ConfigReader) -> ArchConfig:
    rope = read_rope(config)
    spec = read_spec(config, "llama", rope.max_position(config.integer("max_position_embeddings")))
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
        mlp_bias=config.flag("mlp_bias", False),
    )


LLAMA = Architecture(
    name="llama",
    hf_names=("LlamaForCausalLM",),
    gguf_name="llama",
    read=read,
    gguf_keys=gguf_keys(interleaved_qk=True),
)
