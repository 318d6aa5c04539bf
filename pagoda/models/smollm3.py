"""SmolLM3: a Llama of which every fourth layer has no rotary embedding."""

from dataclasses import replace

from pagoda.models import llama
from pagoda.models.architecture import Architecture
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import FULL, SLIDING, DecoderConfig, windows_by_layer_types
from pagoda.models.naming import gguf_naming


def read(config: ConfigReader) -> DecoderConfig:
    config = config.with_defaults({"tie_word_embeddings": True})
    unrotated = frozenset(layer for layer, rotates in enumerate(read_rotates(config)) if not rotates)
    window, kinds = 0, (FULL,) * config.num_layers()
    if config.flag("use_sliding_window", False) and config.has("sliding_window"):
        window = config.integer("sliding_window")
        kinds = tuple(SLIDING if layer in unrotated else FULL for layer in range(config.num_layers()))
    windows = windows_by_layer_types(config, config.texts("layer_types") or kinds, window)
    return replace(llama.read(config, "smollm3", windows, 2_000_000.0), unrotated_layers=unrotated)


def read_rotates(config: ConfigReader) -> tuple[int, ...]:
    """Return 0 for each layer without a rotary embedding."""
    num_layers, interval = config.num_layers(), config.integer("no_rope_layer_interval", 4)
    if not config.has("no_rope_layers"):
        return tuple((layer + 1) % interval for layer in range(num_layers))
    stated = config.ids("no_rope_layers")
    if len(stated) < num_layers:
        raise config.wrong("no_rope_layers", f"a number for each of the {num_layers} layers")
    return stated[:num_layers]


SMOLLM3 = Architecture(
    name="smollm3",
    title="SmolLM3",
    hf_names=("SmolLM3ForCausalLM",),
    model=llama.Llama,
    read=read,
    gguf_names=("smollm3",),
    gguf=gguf_naming(interleaved_rotary=True),
)
