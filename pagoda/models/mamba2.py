"""Mamba-2: recurrent layers alone, without attention and without MLPs (state-spaces, Codestral Mamba); and what models
have in common in which such layers are in the place of most attentions.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from math import inf

from pagoda.layers.mamba2 import Mamba2, Mamba2Shape
from pagoda.layers.rotary import Rotary
from pagoda.models.architecture import Architecture
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import DecoderConfig, read_decoder
from pagoda.models.decoder_layers import AnyAttention, LlamaLayer
from pagoda.models.llama import Llama
from pagoda.models.naming import Naming, gguf_naming
from pagoda.ops.batch import ForwardBatch, KVLayer
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import Tensor

_MAX_POSITION = 1 << 17
"""No setting says how long a sequence may be: the state of every length is as large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Config(DecoderConfig):
    """mamba: the shape of recurrent layers.   mamba_norm_eps: of their norms.   mamba_layers: their indices."""

    mamba: Mamba2Shape
    mamba_norm_eps: float
    mamba_layers: frozenset[int]

    @classmethod
    def of(cls, decoder: DecoderConfig, mamba: Mamba2Shape, norm_eps: float, layers: Iterable[int]) -> "Mamba2Config":
        """Return `decoder` with recurrent layers."""
        values = {field.name: getattr(decoder, field.name) for field in fields(decoder)}
        return cls(**values, mamba=mamba, mamba_norm_eps=norm_eps, mamba_layers=frozenset(layers))


class Mamba2Layer(LlamaLayer):
    """A norm and a Mamba2; x is added to the residual stream by the norm that follows it."""

    def __init__(self, config: DecoderConfig, index: int, rotary: Rotary) -> None:
        assert isinstance(config, Mamba2Config)
        self.post_attention_layernorm = config.norm()
        self.self_attn = Mamba2(config.spec.hidden_size, config.mamba, config.mamba_norm_eps)

    def __call__(
        self,
        ops: ForwardOps,
        x: Tensor,
        residual: Tensor | None,
        batch: ForwardBatch,
        kv: Sequence[KVLayer],
        last: bool,
    ) -> tuple[Tensor, Tensor]:
        """See LlamaLayer."""
        x, residual = self.post_attention_layernorm.add(ops, x, residual)
        return self.self_attn(ops, x, residual, batch, kv, last)


class HybridLayer(LlamaLayer):
    """LlamaLayer that may have a Mamba2 in place of attention."""

    def make_attention(self, config: DecoderConfig, index: int, rotary: Rotary) -> AnyAttention:
        assert isinstance(config, Mamba2Config)
        if index in config.mamba_layers:
            return Mamba2(config.spec.hidden_size, config.mamba, config.mamba_norm_eps)
        return super().make_attention(config, index, rotary)


def read(config: ConfigReader) -> Mamba2Config:
    config.choice("hidden_act", ("silu", "swish"), "silu")
    num_heads, head_dim = config.integer("num_heads", 128), config.integer("head_dim", 64)
    hidden_size = config.integer("hidden_size", 4096)
    if num_heads * head_dim != hidden_size * config.integer("expand", 2):
        raise config.wrong("num_heads", "hidden_size * expand / head_dim")
    decoder = read_decoder(
        config.changed({"num_attention_heads": num_heads, "num_key_value_heads": num_heads}).with_defaults(
            {
                "head_dim": head_dim,
                "hidden_size": hidden_size,
                "intermediate_size": num_heads * head_dim,
                "max_position_embeddings": _MAX_POSITION,
                "rms_norm_eps": config.not_negative("layer_norm_epsilon", 1e-5),
            }
        ),
        "mamba2",
    )
    shape = Mamba2Shape(
        num_heads,
        head_dim,
        config.integer("state_size", 128),
        config.integer("n_groups", 8),
        config.integer("conv_kernel", 4, most=64),
        config.flag("use_conv_bias", True),
        config.flag("use_bias", False),
        *read_limits(config),
    )
    if num_heads % shape.num_groups:
        raise config.wrong("n_groups", f"a divisor of num_heads = {num_heads}")
    changed = replace(decoder, layer=Mamba2Layer)
    return Mamba2Config.of(changed, shape, decoder.norm_eps, range(decoder.spec.num_layers))


def read_mamba_shape(config: ConfigReader, hidden_size: int, inner_size_key: str | None = None) -> Mamba2Shape:
    """Read the shape of the recurrent layers of a hybrid, by the names that most have.

    inner_size_key: of a setting that goes before `mamba_expand`.
    """
    config.choice("hidden_act", ("silu", "swish"), "silu")  # of the convolution, too
    inner_size, size_name = config.integer("mamba_expand", 2) * hidden_size, "mamba_expand * hidden_size"
    if inner_size_key is not None and config.has(inner_size_key):
        inner_size, size_name = config.integer(inner_size_key), inner_size_key
    num_heads = config.integer("mamba_n_heads", 128)
    if inner_size % num_heads:
        raise config.wrong("mamba_n_heads", f"a divisor of {size_name} = {inner_size}")
    head_dim = inner_size // num_heads
    if config.has("mamba_d_head") and config.get("mamba_d_head") not in ("auto", head_dim):
        raise config.wrong("mamba_d_head", f"'auto' or {size_name} / mamba_n_heads = {head_dim}")
    num_groups = config.integer("mamba_n_groups", 1)
    if num_heads % num_groups:
        raise config.wrong("mamba_n_groups", f"a divisor of mamba_n_heads = {num_heads}")
    return Mamba2Shape(
        num_heads,
        head_dim,
        config.integer("mamba_d_state", 256),
        num_groups,
        config.integer("mamba_d_conv", 4, most=64),
        config.flag("mamba_conv_bias", True),
        config.flag("mamba_proj_bias", False),
        *read_limits(config),
    )


def read_limits(config: ConfigReader) -> tuple[float, float]:
    """Return the least and the largest time step of a token."""
    if not config.has("time_step_limit"):
        return 0.0, inf
    match config.get("time_step_limit"):
        case [(int() | float()) as least, largest] if least >= 0:
            if largest in _INFINITE:
                return float(least), inf
            if isinstance(largest, int | float) and largest > least:
                return float(least), float(largest)
        case _:
            pass
    raise config.wrong("time_step_limit", "two numbers, the second of which may be Infinity")


_INFINITE = (inf, "inf", "Infinity", {"__float__": "Infinity"})
"""How configurations spell it."""


def mixer_names(name: str, path: str = "self_attn") -> tuple[tuple[str, str], ...]:
    """Return the substitutions for a Mamba2, or a GatedDelta. It is `path` in a layer, `name` in checkpoints."""
    return (
        (rf"\.{path}\.(in_proj\w*|out_proj)\.", rf".{name}.\1."),
        (rf"\.{path}\.taps$", f".{name}.conv1d.weight"),
        (rf"\.{path}\.bias$", f".{name}.conv1d.bias"),
        (rf"\.{path}\.rate$", f".{name}.A_log"),
        (rf"\.{path}\.dt_bias$", f".{name}.dt_bias"),
        (rf"\.{path}\.d$", f".{name}.D"),
        (rf"\.{path}\.norm$", f".{name}.norm.weight"),
    )


def gguf_mixer_names(path: str = "self_attn") -> dict[str, str]:
    """Return llama.cpp's names of a Mamba2, or of what a GatedDelta has in common with it, by path within a layer."""
    return {
        f"{path}.in_proj": "ssm_in",
        f"{path}.out_proj": "ssm_out",
        f"{path}.taps": "ssm_conv1d.weight",
        f"{path}.bias": "ssm_conv1d.bias",
        f"{path}.rate": "ssm_a",
        f"{path}.dt_bias": "ssm_dt.bias",
        f"{path}.d": "ssm_d",
        f"{path}.norm": "ssm_norm.weight",
    }


def gguf_shape(config: ConfigReader, *names: str) -> dict[str, object]:
    """Return the shape of recurrent layers in a GGUF's settings.

    names: that the architecture has for the number of heads, their size, the sizes of a state, of groups and of the
    convolution, and for whether that has a bias.
    """
    inner_size, num_heads = config.integer("ssm.inner_size"), config.integer("ssm.time_step_rank")
    if inner_size % num_heads:
        raise config.wrong("ssm.inner_size", f"a multiple of ssm.time_step_rank = {num_heads}")
    ours = ("ssm.state_size", "ssm.group_count", "ssm.conv_kernel", "ssm.conv_bias")
    values = (num_heads, inner_size // num_heads, *map(config.get, ours))
    return dict(zip(names, values, strict=True))


def gguf_expansion(config: ConfigReader) -> int:
    """Return how many times as wide as hidden states the values of recurrent layers are, in a GGUF's settings."""
    inner_size, hidden_size = config.integer("ssm.inner_size"), config.integer("hidden_size")
    if inner_size % hidden_size:
        raise config.wrong("ssm.inner_size", f"a multiple of embedding_length = {hidden_size}")
    return inner_size // hidden_size


HYBRID_SHAPE = (
    *("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv", "mamba_conv_bias"),
)
"""The names of most hybrids for `gguf_shape`."""


def _gguf_settings(config: ConfigReader) -> dict[str, object]:
    """Set what llama.cpp's files have for other models: no size of MLPs, and a length without a meaning."""
    shape = gguf_shape(config, "num_heads", "head_dim", "state_size", "n_groups", "conv_kernel", "use_conv_bias")
    return {
        **shape,
        "expand": gguf_expansion(config),
        **dict.fromkeys(("intermediate_size", "max_position_embeddings", "partial_rotary_factor")),
    }


MAMBA2 = Architecture(
    name="mamba2",
    title="Mamba-2",
    hf_names=("Mamba2ForCausalLM",),
    model=Llama,
    read=read,
    hf=(
        Naming(
            substitutions=(
                *mixer_names("mixer"),
                (r"\.post_attention_layernorm\.", ".norm."),
                (r"^model\.norm\.", "model.norm_f."),
                (r"^model\.embed_tokens\.", "model.embeddings."),
                (r"^model\.", "backbone."),
            )
        ),
    ),
    gguf_names=("mamba2",),
    gguf=gguf_naming({**gguf_mixer_names(), "post_attention_layernorm": "attn_norm"}),
    gguf_settings=_gguf_settings,
)
