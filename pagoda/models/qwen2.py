"""Qwen2 and Qwen2.5: a Llama with biases on q, k and v; some checkpoints put a window on their upper layers."""

from dataclasses import replace

from pagoda.models.architecture import Architecture
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import FULL, SLIDING, DecoderConfig, read_decoder, windows_by_layer_types
from pagoda.models.llama import Llama


def read(config: ConfigReader) -> DecoderConfig:
    return replace(read_decoder(config, "qwen2", layer_windows(config)), qkv_bias=True)


def layer_windows(config: ConfigReader) -> tuple[int, ...]:
    """With `use_sliding_window`, those from layer `max_window_layers` on, unless `layer_types` lists them."""
    num_layers = config.num_layers()
    if not config.flag("use_sliding_window", False) or not config.has("sliding_window"):
        return windows_by_layer_types(config, config.texts("layer_types") or (FULL,) * num_layers, 0)
    first = config.number("max_window_layers", 28)
    by_index = tuple(SLIDING if layer >= first else FULL for layer in range(num_layers))
    return windows_by_layer_types(config, config.texts("layer_types") or by_index, config.integer("sliding_window"))


QWEN2 = Architecture(name="qwen2", hf_names=("Qwen2ForCausalLM",), model=Llama, read=read, gguf_name="qwen2")
