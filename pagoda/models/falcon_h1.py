"""Falcon-H1: attention and Mamba-2 in each layer, side by side, and multipliers of what goes in and comes out."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from pagoda.layers.linear import Linear
from pagoda.layers.mamba2 import Mamba2
from pagoda.layers.module import Module
from pagoda.layers.parameter import Axis, Parameter, Part, Taps
from pagoda.layers.rotary import Rotary
from pagoda.models import llama
from pagoda.models.architecture import Architecture
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import DecoderConfig
from pagoda.models.decoder_layers import DecoderAttention, LlamaLayer
from pagoda.models.mamba2 import (
    HYBRID_SHAPE,
    Mamba2Config,
    gguf_mixer_names,
    gguf_shape,
    mixer_names,
    read_mamba_shape,
)
from pagoda.models.naming import Naming, gguf_naming
from pagoda.ops.batch import ForwardBatch, KVLayer
from pagoda.ops.declare import Activation
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Multipliers:
    """Of what attention, Mamba-2, the gate and the MLP take (`_in`, `gate`) and give (`_out`).

    mamba: of the parts that its first projection gives: z, x, b, c and the time steps.
    """

    attention_in: float
    attention_out: float
    mamba_in: float
    mamba_out: float
    gate: float
    mlp_out: float
    mamba: tuple[float, float, float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class FalconH1Config(Mamba2Config):
    """folded: the weights are stored multiplied.   mamba_out_bias: of Mamba-2's last projection.

    mamba_normed: it has a norm.   gate_first: see Mamba2.
    """

    multipliers: Multipliers
    mamba_out_bias: bool
    mamba_normed: bool
    gate_first: bool
    folded: bool


class FalconMamba2(Mamba2):
    """Mamba2 with multipliers. Without a norm, its gate multiplies the values as they are."""

    def __init__(self, config: FalconH1Config) -> None:
        hidden_size, shape = config.spec.hidden_size, config.mamba
        super().__init__(hidden_size, shape, config.mamba_norm_eps, config.gate_first)
        self.z_factor, x, b, c, self.dt_factor = config.multipliers.mamba
        # The convolution takes each channel by itself, so that its taps can have the multipliers of its inputs.
        of_group = shape.num_groups * shape.state_size
        factors = ((shape.inner_size, x), (of_group, b), (of_group, c))
        self.taps = Parameter[Tensor](Taps(shape.conv_size, shape.num_taps, factors))
        self.out_proj = Linear(shape.inner_size, (Part("out_proj", hidden_size),), config.mamba_out_bias)
        if not config.mamba_normed:
            self.norm = None

    def project(self, ops: ForwardOps, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z, xbc, dt = super().project(ops, x)
        return ops.scale(z, self.z_factor), xbc, ops.scale(dt, self.dt_factor)

    def gate(self, ops: ForwardOps, y: Tensor, z: Tensor) -> Tensor:
        return ops.multiply(y, ops.activate(z, Activation.SILU)) if self.norm is None else super().gate(ops, y, z)


class FalconMLP(Module):
    """down(silu(gate(x)) * up(x)), with multipliers of the gate and of what it gives."""

    def __init__(self, config: FalconH1Config) -> None:
        hidden_size, inner_size, bias = config.spec.hidden_size, config.spec.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(hidden_size, inner_size, bias, Axis.OUT)
        self.up_proj = Linear(hidden_size, inner_size, bias, Axis.OUT)
        self.down_proj = Linear(inner_size, hidden_size, bias, Axis.IN)
        self.factors, self.activation = config.multipliers, config.activation

    def __call__(self, ops: ForwardOps, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        gate = ops.activate(ops.scale(self.gate_proj(ops, x), self.factors.gate), self.activation)
        return ops.scale(self.down_proj(ops, ops.multiply(gate, self.up_proj(ops, x))), self.factors.mlp_out)


class FalconH1Layer(LlamaLayer):
    """The sum of attention and Mamba-2, which compute from the same state, then an MLP; each after a norm."""

    def __init__(self, config: DecoderConfig, index: int, rotary: Rotary) -> None:
        assert isinstance(config, FalconH1Config)
        self.input_layernorm = config.norm()
        self.mamba = FalconMamba2(config)
        self.self_attn = DecoderAttention(config, index, rotary)
        self.post_attention_layernorm = config.norm()
        self.feed_forward = FalconMLP(config)
        self.factors = config.multipliers

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
        factors = self.factors
        x, residual = self.input_layernorm.add(ops, x, residual)
        mixed, _ = self.mamba(ops, ops.scale(x, factors.mamba_in), residual, batch, kv, last)
        x, residual = self.self_attn(ops, ops.scale(x, factors.attention_in), residual, batch, kv, last)
        x = ops.add(ops.scale(mixed, factors.mamba_out), ops.scale(x, factors.attention_out))
        x, residual = self.post_attention_layernorm.add(ops, x, residual)
        return self.feed_forward(ops, x), residual


def read(config: ConfigReader) -> FalconH1Config:
    decoder = llama.read(config.with_defaults({"rms_norm_eps": 1e-5, "tie_word_embeddings": False}), "falcon_h1")
    decoder = replace(
        decoder,
        embedding_scale=config.number("embedding_multiplier", 1.0),
        attention_scale=decoder.attention_scale * config.number("key_multiplier", 1.0),
        logit_scale=config.number("lm_head_multiplier", 1.0),
        layer=FalconH1Layer,
    )
    gate, mlp_out = _numbers(config, "mlp_multipliers", 2)
    z, x, b, c, dt = _numbers(config, "ssm_multipliers", 5)
    multipliers = Multipliers(
        attention_in=config.number("attention_in_multiplier", 1.0),
        attention_out=config.number("attention_out_multiplier", 1.0),
        mamba_in=config.number("ssm_in_multiplier", 1.0),
        mamba_out=config.number("ssm_out_multiplier", 1.0),
        gate=gate,
        mlp_out=mlp_out,
        mamba=(z, x, b, c, dt),
    )
    return FalconH1Config(
        **{field.name: getattr(decoder, field.name) for field in fields(decoder)},
        mamba=read_mamba_shape(config, decoder.spec.hidden_size, "mamba_d_ssm"),
        mamba_norm_eps=decoder.norm_eps,
        mamba_layers=frozenset(range(decoder.spec.num_layers)),
        multipliers=multipliers,
        mamba_out_bias=config.flag("projectors_bias", False),
        mamba_normed=config.flag("mamba_rms_norm", False),
        gate_first=not config.flag("mamba_norm_before_gate", True),
        folded=config.flag("multipliers_folded", False),
    )


def _numbers(config: ConfigReader, key: str, count: int) -> tuple[float, ...]:
    """Return a list of so many positive numbers, ones where there is none."""
    found = config.numbers(key) if config.has(key) else (1.0,) * count
    if len(found) != count:
        raise config.wrong(key, f"{count} positive numbers")
    return found


class FalconH1(llama.Llama):
    """A Llama whose adapters would need the multipliers that its weights may already have."""

    def __init__(self, config: FalconH1Config) -> None:
        super().__init__(config)
        self.takes_adapters = not config.folded


def _gguf_settings(config: ConfigReader) -> dict[str, object]:
    """Set what follows from llama.cpp's computation: it has weights with the multipliers, and norms what is gated."""
    return {
        **gguf_shape(config, *HYBRID_SHAPE),
        "mamba_d_ssm": config.get("ssm.inner_size"),
        "mamba_rms_norm": config.get("ssm.norm"),
        "mamba_norm_before_gate": False,
        "multipliers_folded": True,
    }


FALCON_H1 = Architecture(
    name="falcon_h1",
    title="Falcon-H1",
    hf_names=("FalconH1ForCausalLM",),
    model=FalconH1,
    read=read,
    hf=(
        Naming(
            substitutions=(
                *mixer_names("mamba", "mamba"),
                (r"^model\.norm\.", "model.final_layernorm."),
                (r"\.post_attention_layernorm\.", ".pre_ff_layernorm."),
            )
        ),
    ),
    gguf_names=("falcon-h1",),
    gguf=gguf_naming(
        {
            **gguf_mixer_names("mamba"),
            "post_attention_layernorm.weight": "ffn_norm",
            "feed_forward.gate_proj": "ffn_gate",
            "feed_forward.up_proj": "ffn_up",
            "feed_forward.down_proj": "ffn_down",
        }
    ),
    gguf_settings=_gguf_settings,
)
