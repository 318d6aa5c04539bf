"""LFM2: short convolutions in most layers, attention in the others."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pagoda.base.errors import ConfigError
from pagoda.base.model_spec import ModelSpec
from pagoda.layers.rotary import Rotary
from pagoda.layers.short_conv import ShortConv
from pagoda.models.architecture import Architecture
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import FULL, DecoderConfig, QKNorm, read_decoder
from pagoda.models.decoder_layers import LlamaLayer, mlp_of
from pagoda.models.llama import Llama, LlamaModel
from pagoda.models.naming import Naming
from pagoda.ops.batch import ForwardBatch, KVLayer
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import Tensor

_CONV = "conv"
_MOST_TAPS = 64


@dataclass(frozen=True, slots=True)
class Lfm2Config(DecoderConfig):
    """conv_layers: indices of the layers with a convolution.   num_taps, conv_bias: see ShortConv."""

    conv_layers: frozenset[int] = frozenset()
    num_taps: int = 3
    conv_bias: bool = False


class ConvLayer(LlamaLayer):
    """LlamaLayer with a short convolution in place of attention."""

    def __init__(self, config: Lfm2Config, index: int) -> None:
        self.input_layernorm = config.norm()
        self.conv = ShortConv(config.spec.hidden_size, config.num_taps, config.conv_bias)
        self.post_attention_layernorm = config.norm()
        self.mlp = mlp_of(config, index)

    def __call__(
        self,
        ops: ForwardOps,
        x: Tensor,
        residual: Tensor | None,
        batch: ForwardBatch,
        kv: Sequence[KVLayer],
        last: bool,
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm.add(ops, x, residual)
        x, residual = self.conv(ops, x, residual, batch, kv, last)
        x, residual = self.post_attention_layernorm.add(ops, x, residual)
        return self.mlp(ops, x), residual


class Lfm2Model(LlamaModel):
    def make_layer(self, config: DecoderConfig, index: int, rotary: Rotary) -> LlamaLayer:
        assert isinstance(config, Lfm2Config)
        return ConvLayer(config, index) if index in config.conv_layers else super().make_layer(config, index, rotary)


class Lfm2(Llama):
    body = Lfm2Model


def read(config: ConfigReader) -> Lfm2Config:
    config = config.with_defaults({"rms_norm_eps": config.not_negative("norm_eps", 1e-5)})
    for name, alias in (("tie_word_embeddings", "tie_embedding"), ("intermediate_size", "block_ff_dim")):
        if config.has(alias):  # in transformers, too, it goes first
            config = config.changed({name: config.get(alias)})
    decoder = read_decoder(config, "lfm2", default_theta=1_000_000.0, tie_embeddings=True)
    num_taps = config.integer("conv_L_cache", 3, most=_MOST_TAPS)
    if num_taps < 2:
        raise config.wrong("conv_L_cache", "at least 2")
    layer_types = _layer_types(config, decoder.spec.num_layers)
    values = {name: getattr(decoder, name) for name in DecoderConfig.__dataclass_fields__}
    return replace(
        Lfm2Config(**values),
        spec=replace(decoder.spec, intermediate_size=_intermediate_size(config, decoder.spec)),
        qk_norm=QKNorm.HEAD,
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


LFM2 = Architecture(
    name="lfm2",
    hf_names=("Lfm2ForCausalLM",),
    model=Lfm2,
    read=read,
    hf=(
        Naming(
            substitutions=(
                (r"^model\.norm\.", "model.embedding_norm."),
                (r"\.input_layernorm\.", ".operator_norm."),
                (r"\.post_attention_layernorm\.", ".ffn_norm."),
                (r"\.self_attn\.o_proj\.", ".self_attn.out_proj."),
                (r"\.self_attn\.([qk])_norm\.", r".self_attn.\1_layernorm."),
                (r"\.conv\.taps$", ".conv.conv.weight"),
                (r"\.conv\.bias$", ".conv.conv.bias"),
                (r"\.mlp\.gate_proj\.", ".feed_forward.w1."),
                (r"\.mlp\.up_proj\.", ".feed_forward.w3."),
                (r"\.mlp\.down_proj\.", ".feed_forward.w2."),
            )
        ),
    ),
)
