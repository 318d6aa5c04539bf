"""DecoderConfig: the configuration of a decoder-only model, and the functions that read it for several models."""

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from pagoda.base.abbreviate import abbreviate
from pagoda.base.errors import ConfigError
from pagoda.base.model_spec import ModelSpec
from pagoda.layers.attention import Heads
from pagoda.layers.mlp import ExpertsConfig
from pagoda.layers.norm import LayerNorm, RMSNorm
from pagoda.layers.rope_config import RopeConfig, RopeType
from pagoda.models.config_reader import ConfigReader, read_rope
from pagoda.ops.declare import Activation

if TYPE_CHECKING:
    from pagoda.models.decoder_layers import LlamaLayer

FULL, SLIDING, RECURRENT, MLP = "full_attention", "sliding_attention", "linear_attention", "mlp"
"""Types of layers. One of type MLP has nothing else."""

_MOST_POSITIONS = 1 << 26
MOST_EXPERTS = 4096
_NO_EXPERTS = ExpertsConfig()
_ACTIVATIONS = {
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "relu": Activation.RELU,
    "relu2": Activation.RELU_SQUARED,
    "tanh": Activation.TANH,
}


class QKNorm(Enum):
    """What an attention norms q and k over."""

    NONE = "none"
    HEAD = "each head"
    ALL_HEADS = "all heads at once"


class Norm(Enum):
    """The norms of hidden states and, but for LayerNorms, of q and k."""

    RMS = "RMSNorm"
    RMS_UNIT_OFFSET = "RMSNorm that multiplies by 1 + weight"
    RMS_WITHOUT_WEIGHT = "RMSNorm without a weight"
    LAYER = "LayerNorm"
    LAYER_WITHOUT_BIAS = "LayerNorm without a bias"


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Facts that differ between decoders.

    rope_full, rope_window: of layers with full attention, and of layers with a window (equal in most models).
    attention_scale: multiplies scores.   softcaps: 0 is off.   logit_scale: multiplies logits.
    embedding_scale, input_scale: see Embedding.
    layer: the class of the layers, None for LlamaLayer.
    unrotated_layers: indices of the layers whose attention has no rotary embedding.
    fused_qkv, fused_gate_up: the checkpoint stores q, k and v as one matrix, gate and up as one.
    plain_mlp: MLPs are not gated.
    experts: in place of the MLP, if there are any.   dense_layers: indices of the layers with an MLP even so.
    bidirectional: tokens attend to later ones, too (EmbeddingGemma).
    """

    spec: ModelSpec
    norm_eps: float
    activation: Activation
    rope_full: RopeConfig
    rope_window: RopeConfig
    attention_scale: float
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    logit_scale: float = 1.0
    embedding_scale: float = 1.0
    input_scale: float = 1.0
    layer: "type[LlamaLayer] | None" = None
    norm_kind: Norm = Norm.RMS
    qk_norm: QKNorm = QKNorm.NONE
    unrotated_layers: frozenset[int] = frozenset()
    fused_qkv: bool = False
    fused_gate_up: bool = False
    plain_mlp: bool = False
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    experts: ExpertsConfig = _NO_EXPERTS
    dense_layers: frozenset[int] = frozenset()
    bidirectional: bool = False

    @property
    def heads(self) -> Heads:
        return Heads(self.spec.num_heads, self.spec.num_kv_heads, self.spec.head_dim)

    def heads_of(self, index: int) -> Heads:
        """Return the heads of layer `index`."""
        return self.heads

    def norm(self, size: int = 0) -> RMSNorm | LayerNorm:
        """Return a norm of so many elements, by default of the hidden states."""
        size = size or self.spec.hidden_size
        if self.norm_kind in (Norm.LAYER, Norm.LAYER_WITHOUT_BIAS):
            return LayerNorm(size, self.norm_eps, self.norm_kind is Norm.LAYER)
        without = self.norm_kind is Norm.RMS_WITHOUT_WEIGHT
        return RMSNorm(size, self.norm_eps, without or self.norm_kind is Norm.RMS_UNIT_OFFSET, zeros=without)


def read_decoder(
    config: ConfigReader,
    architecture: str,
    windows: tuple[int, ...] | None = None,
    default_theta: float = 10_000.0,
    rotated: float | None = None,
    interleaved: bool = False,
    tie_embeddings: bool = False,
    layer_norm_eps: str | None = None,
    plain_mlp: bool = False,
    default_activation: str = "silu",
) -> DecoderConfig:
    """Read a Llama, or one of the many models with the same setting names; without biases.

    windows: per layer, None for full attention everywhere.   rotated, interleaved: see `read_rope`.
    tie_embeddings: the default of the setting.   layer_norm_eps: the name of the setting of a model with LayerNorms.
    plain_mlp: its MLPs have no gate.
    """
    rope = read_rope(config, default_theta, rotated, interleaved)
    max_position = rope.max_position(config.integer("max_position_embeddings"))
    spec = read_spec(config, architecture, max_position, windows, tie_embeddings)
    turned = rope.num_rotated(spec.head_dim)
    if turned % 2 or not turned:
        raise ConfigError(
            f"{config.origin}: partial_rotary_factor = {rope.rotated} turns {turned} elements of heads of "
            f"{spec.head_dim}; rotary embedding needs an even number"
        )
    if rope.rope_type is RopeType.LONGROPE:
        counts = {len(rope.short_factors), len(rope.long_factors)}
        if counts != {turned // 2}:
            raise ConfigError(f"{config.origin}: short_factor and long_factor must have {turned // 2} numbers each")
    return DecoderConfig(
        spec=spec,
        norm_eps=config.not_negative(layer_norm_eps or "rms_norm_eps", 1e-5 if layer_norm_eps else 1e-6),
        activation=read_activation(config, default=default_activation),
        rope_full=rope,
        rope_window=rope,
        attention_scale=spec.head_dim**-0.5,
        norm_kind=Norm.RMS if layer_norm_eps is None else Norm.LAYER,
        plain_mlp=plain_mlp,
    )


def read_text_settings(config: ConfigReader, *model_types: str) -> ConfigReader:
    """Return the settings of the text model of one that sees; whether its embedding is tied is said for the whole.

    model_types: that are supported. Raises ConfigError for another.
    """
    text = config.text_settings()
    text.choice("model_type", model_types, model_types[0])
    tied = config.flag("tie_word_embeddings", False)
    return text.changed({"tie_word_embeddings": tied})


def num_layers_without_drafters(config: ConfigReader) -> int:
    """Return the number of layers in a GGUF's settings, without those of draft heads, which llama.cpp counts."""
    num_drafters = config.get("num_nextn_predict_layers")
    return config.num_layers() - (num_drafters if isinstance(num_drafters, int) else 0)


def read_experts(config: ConfigReader, inner_size_key: str, renormalize: bool) -> ExpertsConfig:
    """Read the experts of a model, which must be SiLU-gated. Raises ConfigError if top_k exceeds their number."""
    config.choice("hidden_act", ("silu", "swish"), "silu")
    # transformers accepts both names.
    count_key = "num_local_experts" if config.has("num_local_experts") else "num_experts"
    num_experts, top_k = config.integer(count_key, most=MOST_EXPERTS), config.integer("num_experts_per_tok")
    if top_k > num_experts:
        raise ConfigError(f"{config.origin}: num_experts_per_tok = {top_k} is more than {count_key} = {num_experts}")
    return ExpertsConfig(num_experts, top_k, config.integer(inner_size_key), renormalize)


def read_spec(
    config: ConfigReader,
    architecture: str,
    max_position: int,
    layer_windows: tuple[int, ...] | None = None,
    tie_embeddings: bool = False,
) -> ModelSpec:
    """Read the shapes, by the names that most checkpoints share.

    layer_windows: None is full attention everywhere.   tie_embeddings: the default of the setting.
    """
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(f"{config.origin}: {num_heads} attention heads do not divide by {num_kv_heads} KV heads")
    hidden_size = config.integer("hidden_size")
    if not config.has("head_dim") and hidden_size % num_heads:
        raise ConfigError(f"{config.origin}: hidden_size {hidden_size} does not divide by {num_heads} attention heads")
    head_dim = config.integer("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise ConfigError(f"{config.origin}: head_dim {head_dim} is odd; rotary embedding needs an even one")
    if max_position > _MOST_POSITIONS:
        raise ConfigError(f"{config.origin}: {max_position} positions; at most {_MOST_POSITIONS} are supported")
    num_layers = config.num_layers()
    bos = config.ids("bos_token_id")
    windows = layer_windows if layer_windows is not None else (0,) * num_layers
    return ModelSpec(
        architecture=architecture,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        layer_windows=tuple(0 if window >= max_position else window for window in windows),
        eos_token_ids=config.ids("eos_token_id"),
        bos_token_id=bos[0] if bos else None,
        tie_embeddings=config.flag("tie_word_embeddings", tie_embeddings),
        torch_dtype=config.text("dtype", config.text("torch_dtype", "bfloat16")),
    )


def read_layer_types(config: ConfigReader, full_every: int) -> tuple[str, ...]:
    """Return `layer_types`. Without them, every `full_every`-th layer has full attention, and the others a window."""
    by_index = (SLIDING if (layer + 1) % full_every else FULL for layer in range(config.num_layers()))
    return config.texts("layer_types") or tuple(by_index)


def windows_by_layer_types(config: ConfigReader, layer_types: tuple[str, ...], window: int) -> tuple[int, ...]:
    """Return 0 or `window` per layer.   window: 0 if none is set.

    Raises ConfigError for an unsupported layer type, for a layer with a window if none is set, and if there are not as
    many types as layers.
    """
    if len(layer_types) != (num_layers := config.num_layers()):
        raise ConfigError(f"{config.origin}: layer_types has {len(layer_types)} entries for {num_layers} layers")
    for layer, kind in enumerate(layer_types):
        if kind not in (FULL, SLIDING):
            raise ConfigError(
                f"{config.origin}: layer_types[{layer}] {abbreviate(kind)} is not supported; "
                f"supported: {FULL}, {SLIDING}"
            )
        if kind == SLIDING and not window:
            raise ConfigError(f"{config.origin}: layer_types[{layer}] is {SLIDING}, but there is no sliding_window")
    return tuple(window if kind == SLIDING else 0 for kind in layer_types)


def read_activation(config: ConfigReader, key: str = "hidden_act", default: str = "silu") -> Activation:
    """Return an activation function. Raises ConfigError for an unsupported one."""
    return _ACTIVATIONS[config.choice(key, tuple(_ACTIVATIONS), default)]
