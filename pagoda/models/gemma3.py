"""Gemma 3, text: five layers with a window to one with full attention, q and k normed, four norms a layer.

EmbeddingGemma is one whose tokens attend to both sides.

Gemma 3 with its tower: a SigLIP, whose patches are averaged, normed and projected. The tokens of an image attend to all
of it. `Gemma3ForCausalLM` in place of a checkpoint's architecture serves its text model alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isqrt

from pagoda.base.errors import ConfigError
from pagoda.base.model_spec import ModelSpec
from pagoda.base.pooling import PoolingKind, PoolingPlan
from pagoda.layers.linear import Linear
from pagoda.layers.module import Module, keep_floats
from pagoda.layers.norm import RMSNorm
from pagoda.layers.parameter import Part
from pagoda.layers.rope_config import RopeConfig
from pagoda.models.architecture import Architecture
from pagoda.models.config_reader import ConfigReader, read_rope_parameters
from pagoda.models.decoder_config import (
    FULL,
    SLIDING,
    DecoderConfig,
    Norm,
    QKNorm,
    read_activation,
    read_layer_types,
    read_spec,
    windows_by_layer_types,
)
from pagoda.models.decoder_layers import SandwichLayer
from pagoda.models.gemma2 import GGUF, gguf_query_scalar
from pagoda.models.llama import Llama
from pagoda.models.naming import MULTIMODAL, Naming
from pagoda.models.siglip import JOINED, Siglip, SiglipConfig, SiglipEncoder, read_siglip
from pagoda.ops.batch import ForwardBatch, KVLayer
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import Tensor

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
_SIGLIP: dict[str, object] = {"hidden_size": 768, "num_attention_heads": 12, "patch_size": 16}


class EmbeddingGemma(Llama):
    """Its tokens attend to both sides, so that it embeds texts and generates nothing."""

    is_causal = False
    generates = False
    pooling = PoolingPlan(PoolingKind.MEAN)


@dataclass(frozen=True, slots=True)
class Gemma3VisionConfig:
    """spec: of the text model.   factor: patches that become one token, in each direction."""

    spec: ModelSpec
    text: DecoderConfig
    vision: SiglipConfig
    factor: int


class Projector(Module):
    """The mean of a token's patches to its embedding."""

    def __init__(self, vision: SiglipConfig, outputs: int) -> None:
        self.mm_soft_emb_norm = RMSNorm(vision.hidden_size, vision.norm_eps, unit_offset=True)
        self.mm_input_projection = Linear(vision.hidden_size, (Part("mm_input_projection", outputs),))

    def __call__(self, ops: ForwardOps, x: Tensor) -> Tensor:
        return self.mm_input_projection(ops, self.mm_soft_emb_norm(ops, x))


class Gemma3Encoder(SiglipEncoder):
    whole_items = True

    def __init__(self, config: Gemma3VisionConfig) -> None:
        super().__init__(config.vision, config.factor, config.spec)
        self.vision_tower = Siglip(config.vision)
        self.multi_modal_projector = Projector(config.vision, self.output_size)
        keep_floats(self)

    def forward(self, ops: ForwardOps, batch: ForwardBatch, kv: Sequence[KVLayer]) -> Tensor:
        x = self.vision_tower(ops, batch)
        return self.multi_modal_projector(ops, ops.mean_rows(x, batch.inputs[JOINED].tensor))


class Gemma3WithVision(Llama):
    def __init__(self, config: Gemma3VisionConfig) -> None:
        super().__init__(replace(config.text, spec=config.spec))
        self.vision = Gemma3Encoder(config)

    @property
    def media_encoder(self) -> Gemma3Encoder:
        return self.vision


def _model(config: DecoderConfig | Gemma3VisionConfig) -> Llama:
    if isinstance(config, Gemma3VisionConfig):
        return Gemma3WithVision(config)
    return EmbeddingGemma(config) if config.bidirectional else Llama(config)


def _read(config: ConfigReader) -> DecoderConfig | Gemma3VisionConfig:
    text, vision = read(config), config.section("vision_config")
    if vision is None or config.texts("architectures") != (_WITH_VISION,):
        return text
    tower, tokens = read_siglip(vision.with_defaults(_SIGLIP)), config.integer("mm_tokens_per_image", 256)
    across = isqrt(tokens)
    if across * across != tokens or tower.side % across:
        raise ConfigError(
            f"{config.origin}: mm_tokens_per_image = {tokens} is not a square whose side divides {tower.side} patches"
        )
    return Gemma3VisionConfig(text.spec, text, tower, tower.side // across)


_WITH_VISION = "Gemma3ForConditionalGeneration"


def _with_tower(text: tuple[str, str], tower: str, inner: str) -> Naming:
    """Return the naming of a checkpoint with a tower.

    text: turns names of the text model into stored ones.   tower, inner: stand before the names of the tower and the
    projector, and between the tower's own name and those of its layers.
    """
    return Naming(
        substitutions=(
            text,
            (r"^vision\.vision_tower\.", f"{tower}vision_tower.{inner}"),
            (r"^vision\.", tower),
            (r"mm_input_projection\.weight$", "mm_input_projection_weight"),
        ),
        transposed="mm_input_projection_weight$",
    )


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
        rope_full=read_layer_rope(config, FULL, "rope_theta", 1_000_000.0),
        rope_window=read_layer_rope(config, SLIDING, "rope_local_base_freq", 10_000.0),
        attention_scale=config.positive("query_pre_attn_scalar") ** -0.5,
        attention_softcap=config.not_negative("attn_logit_softcapping", 0.0),
        logit_softcap=config.not_negative("final_logit_softcapping", 0.0),
        embedding_scale=spec.hidden_size**0.5,
        layer=SandwichLayer,
        norm_kind=Norm.RMS_UNIT_OFFSET,
        qk_norm=QKNorm.HEAD,
        qkv_bias=attention_bias,
        attention_out_bias=attention_bias,
        bidirectional=bidirectional,
    )


def _layer_windows(config: ConfigReader, bidirectional: bool) -> tuple[int, ...]:
    pattern = config.integer("_sliding_window_pattern", config.integer("sliding_window_pattern"))
    window = config.integer("sliding_window")
    if bidirectional:  # the setting counts both sides; less than this many tokens away on either
        window = window // 2 + 1
    return windows_by_layer_types(config, read_layer_types(config, pattern), window)


def read_layer_rope(config: ConfigReader, layer_type: str, theta_key: str, default_theta: float) -> RopeConfig:
    """The newer form has a set of parameters per layer type; in the older one `rope_scaling` is of the full layers."""
    nested = config.section("rope_parameters")
    parameters = nested.section(layer_type) if nested else None
    if parameters is None and layer_type == FULL:
        parameters = config.section("rope_scaling")
    parameters = parameters or ConfigReader({}, config.origin)
    theta = parameters.number("rope_theta", config.number(theta_key, default_theta))
    return read_rope_parameters(parameters, theta, config.integer("max_position_embeddings"))


def _gguf_settings(config: ConfigReader) -> dict[str, object]:
    """Set what llama.cpp does not store; without a window, all layers have full attention."""
    windows = {} if config.has("sliding_window") else {"layer_types": [FULL] * config.num_layers()}
    return windows | gguf_query_scalar(_LAYERS_OF_27B, config)


GEMMA3 = Architecture(
    name="gemma3",
    title="Gemma 3",
    hf_names=("Gemma3ForCausalLM", _WITH_VISION),
    model=_model,
    read=_read,
    hf=(
        *MULTIMODAL,
        *(_with_tower((r"^(model|lm_head)\.", r"language_model.\1."), "", inner) for inner in ("vision_model.", "")),
        *(_with_tower((r"^model\.", "model.language_model."), "model.", inner) for inner in ("vision_model.", "")),
    ),
    gguf_names=("gemma3",),
    gguf=GGUF,
    gguf_settings=_gguf_settings,
)
