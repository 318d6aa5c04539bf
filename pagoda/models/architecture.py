"""Architecture: a decoder-only model described as data. One small file a model says what differs; the rest is here.

No torch: `pagoda plan` reads a model's facts without loading it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pagoda.base.abbreviate import abbreviate
from pagoda.base.errors import ConfigError
from pagoda.base.model_spec import ModelSpec
from pagoda.layers.activation import Activation
from pagoda.layers.rope_config import RopeConfig
from pagoda.models.config_reader import ConfigReader

FULL, SLIDING = "full_attention", "sliding_attention"
_MOST_POSITIONS = 1 << 26


@dataclass(frozen=True, slots=True)
class ArchConfig:
    """Everything the decoder needs to know besides its weights.

    rope_full, rope_window: of layers with full attention, and of layers with a window (equal in most models).
    attention_scale: what scores are multiplied with.   softcaps: 0 is off.
    unit_offset_norms: norms multiply with 1 + weight.
    """

    spec: ModelSpec
    rms_norm_eps: float
    activation: Activation
    rope_full: RopeConfig
    rope_window: RopeConfig
    attention_scale: float
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    embedding_scale: float = 1.0
    unit_offset_norms: bool = False
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False


@dataclass(frozen=True, slots=True)
class LayerKeys:
    """Names of one layer's tensors, behind the layer's prefix and before ".weight" or ".bias".

    A linear layer is a tuple of parts that are stacked along the output dimension: q, k, v become one multiplication,
    gate and up another. A checkpoint that stores them fused already has one part.
    """

    attention_norm: str
    qkv: tuple[str, ...]
    attention_out: tuple[str, ...]
    mlp_norm: str
    gate_up: tuple[str, ...]
    down: tuple[str, ...]
    q_norm: str | None = None
    k_norm: str | None = None
    post_attention_norm: str | None = None
    post_mlp_norm: str | None = None


@dataclass(frozen=True, slots=True)
class CheckpointKeys:
    """Names of a checkpoint's tensors.

    layer_prefix: with `{layer}` for the index.   interleaved_qk: q and k rows are stored in llama.cpp's order,
    pairs (0, D/2), (1, D/2 + 1), ... side by side in each head.   norms_plus_one: the stored norm weights include the
    1 of `unit_offset_norms`, as llama.cpp's do.
    """

    embedding: str
    layer_prefix: str
    layer: LayerKeys
    final_norm: str
    lm_head: str
    interleaved_qk: bool = False
    norms_plus_one: bool = False


HF_LAYER = LayerKeys(
    attention_norm="input_layernorm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    attention_out=("self_attn.o_proj",),
    mlp_norm="post_attention_layernorm",
    gate_up=("mlp.gate_proj", "mlp.up_proj"),
    down=("mlp.down_proj",),
)
GGUF_LAYER = LayerKeys(
    attention_norm="attn_norm",
    qkv=("attn_q", "attn_k", "attn_v"),
    attention_out=("attn_output",),
    mlp_norm="ffn_norm",
    gate_up=("ffn_gate", "ffn_up"),
    down=("ffn_down",),
)


def hf_keys(layer: LayerKeys = HF_LAYER, prefix: str = "model.", lm_head: str = "lm_head") -> CheckpointKeys:
    """The names that transformers gives."""
    return CheckpointKeys(
        embedding=f"{prefix}embed_tokens",
        layer_prefix=f"{prefix}layers.{{layer}}.",
        layer=layer,
        final_norm=f"{prefix}norm",
        lm_head=lm_head,
    )


def gguf_keys(layer: LayerKeys = GGUF_LAYER, interleaved_qk: bool = False) -> CheckpointKeys:
    """The names that llama.cpp gives."""
    return CheckpointKeys(
        embedding="token_embd",
        layer_prefix="blk.{layer}.",
        layer=layer,
        final_norm="output_norm",
        lm_head="output",
        interleaved_qk=interleaved_qk,
        norms_plus_one=True,
    )


def _no_extras(values: Mapping[str, object]) -> dict[str, object]:
    return {}


@dataclass(frozen=True, slots=True)
class Architecture:
    """One kind of model.

    hf_names: what config.json may say in `architectures`.   gguf_name: `general.architecture` of a GGUF, None where
    llama.cpp has no name of its own for it.   read: settings in the words of config.json -> ArchConfig.
    hf_keys: the forms a safetensors checkpoint may have; the first whose embedding is there is taken.
    gguf_extras: settings that llama.cpp knows by heart instead of storing them, given those it stores.
    """

    name: str
    hf_names: tuple[str, ...]
    read: Callable[[ConfigReader], ArchConfig]
    gguf_name: str | None = None
    hf_keys: tuple[CheckpointKeys, ...] = (hf_keys(),)
    gguf_keys: CheckpointKeys = field(default_factory=gguf_keys)
    gguf_extras: Callable[[Mapping[str, object]], dict[str, object]] = _no_extras


def read_spec(
    config: ConfigReader,
    architecture: str,
    max_position: int,
    layer_windows: tuple[int, ...] | None = None,
    tie_embeddings: bool = False,
) -> ModelSpec:
    """The shapes, in the words most checkpoints share.

    layer_windows: None is full attention everywhere.   tie_embeddings: what holds when the checkpoint does not say.
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


def windows_by_layer_types(config: ConfigReader, layer_types: tuple[str, ...], window: int) -> tuple[int, ...]:
    """Per layer 0 or `window`. Raises ConfigError for a layer type that is not supported."""
    for layer, kind in enumerate(layer_types):
        if kind not in (FULL, SLIDING):
            raise ConfigError(
                f"{config.origin}: layer_types[{layer}] {abbreviate(kind)} is not supported; "
                f"supported: {FULL}, {SLIDING}"
            )
    return tuple(window if kind == SLIDING else 0 for kind in layer_types)


def read_activation(config: ConfigReader, key: str = "hidden_act", default: str = "silu") -> Activation:
    """The MLP's activation. Raises ConfigError for one that is not supported."""
    known = {"silu": Activation.SILU, "swish": Activation.SILU, "gelu_pytorch_tanh": Activation.GELU_TANH}
    return known[config.choice(key, tuple(known), default)]
