"""Qwen2 and Qwen2.5: Llama's shape with biases on q, k and v; some checkpoints put a window on their upper layers."""

from pagoda.models.architecture import (
    FULL,
    SLIDING,
    ArchConfig,
    Architecture,
    read_activation,
    read_spec,
    windows_by_layer_types,
)
from pagoda.models.config_reader import ConfigReader
from pagoda.models.read_rope import read_rope


def read(config: ConfigReader) -> ArchConfig:
    rope = read_rope(config)
    max_position = rope.max_position(config.integer("max_position_embeddings"))
    spec = read_spec(config, "qwen2", max_position, layer_windows(config))
    return ArchConfig(
        spec=spec,
        rms_norm_eps=config.not_negative("rms_norm_eps", 1e-6),
        activation=read_activation(config),
        rope_full=rope,
        rope_window=rope,
        attention_scale=spec.head_dim**-0.5,
        qkv_bias=True,
    )


def layer_windows(config: ConfigReader) -> tuple[int, ...]:
    """With `use_sliding_window`, those from layer `max_window_layers` on, unless `layer_types` lists them."""
    num_layers = config.num_layers()
    if not config.flag("use_sliding_window", False) or not config.has("sliding_window"):
        return windows_by_layer_types(config, config.texts("layer_types") or (FULL,) * num_layers, 0)
    first = config.number("max_window_layers", 28)
    by_index = tuple(SLIDING if layer >= first else FULL for layer in range(num_layers))
    return windows_by_layer_types(config, config.texts("layer_types") or by_index, config.integer("sliding_window"))


QWEN2 = Architecture(name="qwen2", hf_names=("Qwen2ForCausalLM",), gguf_name="qwen2", read=read)
