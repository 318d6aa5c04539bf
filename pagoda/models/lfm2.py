"""LFM2, and LFM2-MoE: short convolutions in most layers, attention in the others."""

from dataclasses import dataclass, fields, replace

from pagoda.base.errors import ConfigError
from pagoda.base.model_spec import ModelSpec
from pagoda.layers.mlp import ExpertGroups
from pagoda.layers.rotary import Rotary
from pagoda.layers.short_conv import ShortConv
from pagoda.models.architecture import Architecture
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import FULL, RECURRENT, DecoderConfig, QKNorm, read_decoder, read_experts
from pagoda.models.decoder_layers import AnyAttention, LlamaLayer
from pagoda.models.llama import Llama
from pagoda.models.naming import Naming, gguf_naming

_CONV = "conv"
_MOST_TAPS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Lfm2Config(DecoderConfig):
    """conv_layers: indices of the layers with a convolution.   num_taps, conv_bias: see ShortConv."""

    conv_layers: frozenset[int]
    num_taps: int
    conv_bias: bool


class Lfm2Layer(LlamaLayer):
    """LlamaLayer that may have a short convolution in place of attention."""

    def make_attention(self, config: DecoderConfig, index: int, rotary: Rotary) -> AnyAttention:
        assert isinstance(config, Lfm2Config)
        if index in config.conv_layers:
            return ShortConv(config.spec.hidden_size, config.num_taps, config.conv_bias)
        return super().make_attention(config, index, rotary)


def read(config: ConfigReader) -> Lfm2Config:
    if config.has("block_ff_dim"):  # in transformers, too, it goes first
        config = config.changed({"intermediate_size": config.get("block_ff_dim")})
    decoder = _read(config, "lfm2")
    return replace(decoder, spec=replace(decoder.spec, intermediate_size=_intermediate_size(config, decoder.spec)))


def _read_moe(config: ConfigReader) -> Lfm2Config:
    decoder, num_dense = _read(config, "lfm2_moe"), config.number("num_dense_layers", 2)
    groups = ExpertGroups(
        sigmoid=True,
        has_bias=config.flag("use_expert_bias", True),
        factor=config.positive("routed_scaling_factor", 1.0),
    )
    experts = read_experts(config, "moe_intermediate_size", config.flag("norm_topk_prob", True))
    return replace(
        decoder,
        experts=replace(experts, groups=groups),
        dense_layers=frozenset(layer for layer in range(decoder.spec.num_layers) if layer < num_dense),
    )


def _read(config: ConfigReader, architecture: str) -> Lfm2Config:
    config = config.with_defaults({"rms_norm_eps": config.not_negative("norm_eps", 1e-5)})
    if config.has("tie_embedding"):  # in transformers, too, it goes first
        config = config.changed({"tie_word_embeddings": config.get("tie_embedding")})
    decoder = read_decoder(config, architecture, default_theta=1_000_000.0, tie_embeddings=True)
    num_taps = config.integer("conv_L_cache", 3, most=_MOST_TAPS)
    if num_taps < 2:
        raise config.wrong("conv_L_cache", "at least 2")
    layer_types = _layer_types(config, decoder.spec.num_layers)
    changed = replace(decoder, layer=Lfm2Layer, qk_norm=QKNorm.HEAD)
    return Lfm2Config(
        **{field.name: getattr(changed, field.name) for field in fields(changed)},
        conv_layers=frozenset(index for index, kind in enumerate(layer_types) if kind == _CONV),
        num_taps=num_taps,
        conv_bias=config.flag("conv_bias", False),
    )


def _layer_types(config: ConfigReader, num_layers: int) -> tuple[str, ...]:
    """Return the type of each layer; the older spelling names the indices of those with attention."""
    if (types := config.texts("layer_types")) is None:
        full = config.ids("full_attn_idxs") if config.has("full_attn_idxs") else range(num_layers)
        types = tuple(FULL if index in full else _CONV for index in range(num_layers))
    if len(types) != num_layers or not {FULL, _CONV}.issuperset(types):
        raise config.wrong("layer_types", f"{num_layers} times {FULL} or {_CONV}")
    return types


def _intermediate_size(config: ConfigReader, spec: ModelSpec) -> int:
    """Return the size inside of MLPs, which the checkpoint may leave to be computed."""
    size = spec.intermediate_size
    if not config.flag("block_auto_adjust_ff_dim", True):
        return size
    unit = config.integer("block_multiple_of", 256)
    size = int(config.positive("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    if not size:
        raise ConfigError(f"{config.origin}: intermediate_size = {spec.intermediate_size} leaves MLPs without elements")
    return -(-size // unit) * unit


_NAMES = (
    (r"^model\.norm\.", "model.embedding_norm."),
    (r"\.input_layernorm\.", ".operator_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.self_attn\.(in|out)_proj\.", r".conv.\1_proj."),
    (r"\.self_attn\.taps$", ".conv.conv.weight"),
    (r"\.self_attn\.bias$", ".conv.conv.bias"),
    (r"\.self_attn\.o_proj\.", ".self_attn.out_proj."),
    (r"\.self_attn\.([qk])_norm\.", r".self_attn.\1_layernorm."),
    (r"\.mlp\.", ".feed_forward."),
    (r"\.gate_proj\.", ".w1."),
    (r"\.up_proj\.", ".w3."),
    (r"\.down_proj\.", ".w2."),
    (r"\.choice_bias$", ".expert_bias"),
)


def _gguf_settings(config: ConfigReader) -> dict[str, object]:
    """Set what llama.cpp's files have in another form: the final size inside of MLPs; layers without KV heads."""
    config.refuse("sliding_window")  # of every attention, in llama.cpp
    types = config.texts("layer_types") or ()
    return {
        "block_auto_adjust_ff_dim": False,
        "layer_types": [_CONV if kind == RECURRENT else kind for kind in types] or None,
    }


def _gguf_settings_of_moe(config: ConfigReader) -> dict[str, object]:
    config.choice("scoring_func", ("sigmoid",), "sigmoid")
    num_dense = config.number("first_k_dense_replace", 0)
    return {**_gguf_settings(config), "num_dense_layers": num_dense}


_IN_GGUF = gguf_naming(
    {
        "self_attn.in_proj": "shortconv.in_proj",
        "self_attn.out_proj": "shortconv.out_proj",
        "self_attn.taps": "shortconv.conv.weight",
    }
)
_GGUF = replace(_IN_GGUF, names={**(_IN_GGUF.names or {}), "model.norm": "token_embd_norm"})
_HF = (Naming(substitutions=_NAMES), Naming(substitutions=(*_NAMES, (r"^model\.", ""))))

LFM2 = Architecture(
    name="lfm2",
    title="LFM2",
    hf_names=("Lfm2ForCausalLM",),
    model=Llama,
    read=read,
    hf=_HF,
    gguf_names=("lfm2",),
    gguf=_GGUF,
    gguf_settings=_gguf_settings,
)
LFM2_MOE = Architecture(
    name="lfm2_moe",
    title="LFM2-MoE",
    hf_names=("Lfm2MoeForCausalLM",),
    model=Llama,
    read=_read_moe,
    hf=_HF,
    gguf_names=("lfm2moe",),
    experts=True,
    gguf=_GGUF,
    gguf_settings=_gguf_settings_of_moe,
)
