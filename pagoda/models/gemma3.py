"""Gemma 3, text: five layers with a window to one with full attention, q and k normed, four norms a layer.

EmbeddingGemma is one whose tokens attend to both sides.

Multimodal checkpoints (`text_config`) are served as text models; their vision tower is not loaded.
"""

from functools import partial

from pagoda.base.pooling import PoolingKind, PoolingPlan
from pagoda.layers.rope_config import RopeConfig
from pagoda.models.architecture import Architecture
from pagoda.models.config_reader import ConfigReader, read_rope_parameters
from pagoda.models.decoder_config import (
    FULL,
    SLIDING,
    DecoderConfig,
    QKNorm,
    read_activation,
    read_spec,
    windows_by_layer_types,
)
from pagoda.models.gemma2 import GGUF, gguf_query_scalar
from pagoda.models.naming import MULTIMODAL
from pagoda.models.norm_placement import SandwichDecoder

# Google's configs omit settings that equal the first release; these are its values.
_DEFAULTS: dict[str, object] = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "sliding_window_pattern": 6,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
_LAYERS_OF_27B = 62


class EmbeddingGemma(SandwichDecoder):
    """Its tokens attend to both sides, so that it embeds texts and generates nothing."""

    is_causal = False
    generates = False
    pooling = PoolingPlan(PoolingKind.MEAN)


def _model(config: DecoderConfig) -> SandwichDecoder:
    return EmbeddingGemma(config) if config.bidirectional else SandwichDecoder(config)


def read(config: ConfigReader) -> DecoderConfig:
    config = config.text_settings().with_defaults(_DEFAULTS)
    bidirectional = config.flag("use_bidirectional_attention", False)
    spec = read_spec(
        config, "gemma3", config.integer("max_position_embeddings"), _layer_windows(config, bidirectional), True
    )
    attention_bias = config.flag("attention_bias", False)
    return DecoderConfig(
        spec=spec,
        norm_eps=config.not_negative("rms_norm_eps", 1e-6),
        activation=read_activation(config, "hidden_activation", "gelu_pytorch_tanh"),
        rope_full=_read_rope(config, FULL, "rope_theta", 1_000_000.0),
        rope_window=_read_rope(config, SLIDING, "rope_local_base_freq", 10_000.0),
        attention_scale=config.positive("query_pre_attn_scalar") ** -0.5,
        attention_softcap=config.not_negative("attn_logit_softcapping", 0.0),
        logit_softcap=config.not_negative("final_logit_softcapping", 0.0),
        embedding_scale=spec.hidden_size**0.5,
        unit_offset_norms=True,
        qk_norm=QKNorm.HEAD,
        qkv_bias=attention_bias,
        attention_out_bias=attention_bias,
        bidirectional=bidirectional,
    )


def _layer_windows(config: ConfigReader, bidirectional: bool) -> tuple[int, ...]:
    pattern = config.integer("_sliding_window_pattern", config.integer("sliding_window_pattern"))
    num_layers = config.num_layers()
    by_pattern = tuple(SLIDING if (layer + 1) % pattern else FULL for layer in range(num_layers))
    window = config.integer("sliding_window")
    if bidirectional:  # the setting counts both sides; less than this many tokens away on either
        window = window // 2 + 1
    return windows_by_layer_types(config, config.texts("layer_types") or by_pattern, window)


def _read_rope(config: ConfigReader, layer_type: str, theta_key: str, default_theta: float) -> RopeConfig:
    """The newer form has a set of parameters per layer type; in the older one `rope_scaling` is of the full layers."""
    nested = config.section("rope_parameters")
    parameters = nested.section(layer_type) if nested else None
    if parameters is None and layer_type == FULL:
        parameters = config.section("rope_scaling")
    parameters = parameters or ConfigReader({}, config.origin)
    theta = parameters.number("rope_theta", config.number(theta_key, default_theta))
    return read_rope_parameters(parameters, theta, config.integer("max_position_embeddings"))


GEMMA3 = Architecture(
    name="gemma3",
    hf_names=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    model=_model,
    read=read,
    hf=MULTIMODAL,
    gguf_name="gemma3",
    gguf=GGUF,
    gguf_settings=partial(gguf_query_scalar, _LAYERS_OF_27B),
)
