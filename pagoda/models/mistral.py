"""Mistral: Llama's shape, with a sliding window in every layer where the checkpoint has one.

A Mistral in a GGUF calls itself "llama" and is read as one.
"""

from pagoda.models.architecture import ArchConfig, Architecture, read_activation, read_spec
from pagoda.models.config_reader import ConfigReader
from pagoda.models.read_rope import read_rope


def read(config: ConfigReader) -> ArchConfig:
    config.refuse("layer_types")
    rope = read_rope(config)
    window = config.integer("sliding_window") if config.has("sliding_window") else 0
    windows = (window,) * config.num_layers()
    max_position = rope.max_position(config.integer("max_position_embeddings"))
    spec = read_spec(config, "mistral", max_position, windows)
    return ArchConfig(
        spec=spec,
        rms_norm_eps=config.not_negative("rms_norm_eps", 1e-6),
        activation=read_activation(config),
        rope_full=rope,
        rope_window=rope,
        attention_scale=spec.head_dim**-0.5,
    )


MISTRAL = Architecture(name="mistral", hf_names=("MistralForCausalLM",), read=read)
