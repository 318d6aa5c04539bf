"""Cohere's Command-R: attention and MLP in parallel after one LayerNorm without a bias, logits times a factor, pairs of
neighbours turned. Command R7B (Cohere2): three layers with a window to one with full attention, which has no rotary
embedding.
"""

from dataclasses import replace

from pagoda.models.architecture import Architecture
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import (
    FULL,
    DecoderConfig,
    Norm,
    read_decoder,
    read_layer_types,
    windows_by_layer_types,
)
from pagoda.models.decoder_layers import SharedNormLayer
from pagoda.models.llama import Llama


def _read(
    config: ConfigReader, architecture: str, default_theta: float, windows: tuple[int, ...] | None = None
) -> DecoderConfig:
    attention_bias = config.flag("attention_bias", False)
    decoder = read_decoder(
        config,
        architecture,
        windows,
        default_theta=default_theta,
        interleaved=True,
        tie_embeddings=True,
        layer_norm_eps="layer_norm_eps",
    )
    return replace(
        decoder,
        norm_kind=Norm.LAYER_WITHOUT_BIAS,
        layer=SharedNormLayer,
        qkv_bias=attention_bias,
        attention_out_bias=attention_bias,
        logit_scale=config.positive("logit_scale", 0.0625),
    )


def _read_cohere(config: ConfigReader) -> DecoderConfig:
    config.refuse("use_qk_norm")
    return _read(config, "cohere", 500_000.0)


def _read_cohere2(config: ConfigReader) -> DecoderConfig:
    kinds = read_layer_types(config, config.integer("sliding_window_pattern", 4))
    windows = windows_by_layer_types(config, kinds, config.integer("sliding_window", 4096))
    unrotated = frozenset(layer for layer, kind in enumerate(kinds) if kind == FULL)
    return replace(_read(config, "cohere2", 10_000.0, windows), unrotated_layers=unrotated)


COHERE = Architecture(
    name="cohere",
    title="Command-R",
    hf_names=("CohereForCausalLM",),
    model=Llama,
    read=_read_cohere,
    gguf_names=("command-r",),
)
COHERE2 = Architecture(
    name="cohere2", title="Command R7B", hf_names=("Cohere2ForCausalLM",), model=Llama, read=_read_cohere2
)
