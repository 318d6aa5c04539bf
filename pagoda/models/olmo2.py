"""OLMo 2: norms after attention and MLP instead of before, and q and k normed over all heads at once.

OLMo 3: with a window in three layers of four, whose rotary embedding is not scaled. GGUF has one name for both.
"""

from dataclasses import replace

from pagoda.models import llama
from pagoda.models.architecture import Architecture
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import (
    FULL,
    SLIDING,
    DecoderConfig,
    QKNorm,
    read_layer_types,
    windows_by_layer_types,
)
from pagoda.models.decoder_layers import PostNormLayer
from pagoda.models.gemma3 import read_layer_rope
from pagoda.models.naming import POST_NORM_GGUF

_FULL_EVERY = 4
_IS_OLMO3 = "is_olmo3"
"""Not in config.json: of a GGUF file."""


def _read_olmo2(config: ConfigReader) -> DecoderConfig:
    if config.flag(_IS_OLMO3, False):
        return _read_windows(config, "olmo2", 10_000.0)
    config.refuse("sliding_window")
    config.refuse("layer_types")
    return _read(config, "olmo2", None, 10_000.0)


def _read_olmo3(config: ConfigReader) -> DecoderConfig:
    return _read_windows(config.with_defaults({"sliding_window": 4096}), "olmo3", 500_000.0)


def _read_windows(config: ConfigReader, architecture: str, default_theta: float) -> DecoderConfig:
    windows = windows_by_layer_types(config, read_layer_types(config, _FULL_EVERY), config.integer("sliding_window"))
    of_window = read_layer_rope(config, SLIDING, "rope_theta", default_theta)
    by_kind = config.section("rope_parameters")
    if by_kind is not None:
        of_full = by_kind.section(FULL)
        if of_full is None:
            raise by_kind.wrong(FULL, "rope parameters")
        config = config.changed({"rope_parameters": of_full.values})
    return replace(_read(config, architecture, windows, default_theta), rope_window=of_window)


def _read(
    config: ConfigReader, architecture: str, windows: tuple[int, ...] | None, default_theta: float
) -> DecoderConfig:
    config.refuse("clip_qkv")
    decoder = llama.read(config.with_defaults({"rms_norm_eps": 1e-5}), architecture, windows, default_theta)
    return replace(decoder, layer=PostNormLayer, qk_norm=QKNorm.ALL_HEADS)


def _gguf_settings(config: ConfigReader) -> dict[str, object]:
    return {_IS_OLMO3: config.has("sliding_window")}


OLMO2 = Architecture(
    name="olmo2",
    title="OLMo 2",
    hf_names=("Olmo2ForCausalLM",),
    model=llama.Llama,
    read=_read_olmo2,
    gguf_names=("olmo2",),
    gguf=POST_NORM_GGUF,
    gguf_settings=_gguf_settings,
)
OLMO3 = Architecture(
    name="olmo3",
    title="OLMo 3",
    hf_names=("Olmo3ForCausalLM",),
    model=llama.Llama,
    read=_read_olmo3,
    gguf_names=("olmo2",),
)
