"""EXAONE 4: norms after attention and MLP instead of before, q and k normed per head.

With windows (the 32B): layers with full attention have no rotary embedding.
"""

from dataclasses import replace

from pagoda.models.architecture import Architecture
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import (
    FULL,
    DecoderConfig,
    QKNorm,
    read_decoder,
    read_layer_types,
    windows_by_layer_types,
)
from pagoda.models.decoder_layers import PostNormLayer
from pagoda.models.llama import Llama
from pagoda.models.naming import POST_NORM_GGUF


def read(config: ConfigReader) -> DecoderConfig:
    config = config.with_defaults({"rms_norm_eps": 1e-5})
    window = config.integer("sliding_window") if config.has("sliding_window") else 0
    layer_types = read_layer_types(config, config.integer("sliding_window_pattern", 4) if window else 1)
    windows = windows_by_layer_types(config, layer_types, window)
    unrotated = frozenset(layer for layer, kind in enumerate(layer_types) if window and kind == FULL)
    decoder = read_decoder(config, "exaone4", windows)
    return replace(decoder, layer=PostNormLayer, qk_norm=QKNorm.HEAD, unrotated_layers=unrotated)


EXAONE4 = Architecture(
    name="exaone4",
    title="EXAONE 4",
    hf_names=("Exaone4ForCausalLM",),
    model=Llama,
    read=read,
    gguf_names=("exaone4",),
    gguf=POST_NORM_GGUF,
)
