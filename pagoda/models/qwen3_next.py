"""Qwen3-Next: the gated delta rule in place of most attentions; the others are gated; experts, and one that all share.

The layers of Qwen3.5 are the same, with other names for what goes into the delta rule.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from pagoda.layers.gated_delta import DeltaShape, GatedDelta
from pagoda.layers.mlp import ExpertsConfig
from pagoda.layers.parameter import Part
from pagoda.layers.rotary import Rotary
from pagoda.models.architecture import Architecture
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import (
    FULL,
    RECURRENT,
    DecoderConfig,
    Norm,
    QKNorm,
    num_layers_without_drafters,
    read_decoder,
    read_experts,
)
from pagoda.models.decoder_layers import AnyAttention, DecoderAttention, LlamaLayer
from pagoda.models.llama import Llama
from pagoda.models.mamba2 import gguf_mixer_names, gguf_shape, mixer_names
from pagoda.models.naming import Naming, gguf_naming
from pagoda.models.qwen import read_dense_layers
from pagoda.ops.batch import ForwardBatch, KVLayer
from pagoda.ops.declare import Activation
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import Tensor

_BY_GROUP = (*("in_proj_qkvz",) * 4, *("in_proj_ba",) * 2)
_BY_PART = (*("in_proj_qkv",) * 3, "in_proj_z", *("in_proj_ba",) * 2)
_ALTERNATING = frozenset(_BY_GROUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaConfig(DecoderConfig):
    """delta: the shape of recurrent layers.   delta_layers: their indices.   delta_names: see GatedDelta."""

    delta: DeltaShape
    delta_layers: frozenset[int]
    delta_names: tuple[str, ...]


class GatedAttention(DecoderAttention):
    """Attention whose output is multiplied by a sigmoid; the checkpoint has a head's query, then its gate."""

    def stored_parts(self, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        q, *others = parts
        q = replace(q, alternates=True)
        return (q, replace(q, rotary=None), *others)

    def __call__(
        self,
        ops: ForwardOps,
        x: Tensor,
        residual: Tensor,
        batch: ForwardBatch,
        kv: Sequence[KVLayer],
        last: bool,
    ) -> tuple[Tensor, Tensor]:
        heads, dim, y = self.heads, self.heads.dim, self.qkv(ops, x)
        size, kv_size = heads.num_heads * dim, heads.num_kv_heads * dim
        q, gate = ops.select_heads(y, 0, heads.num_heads, dim), ops.select_heads(y, size, 1, size)
        k, v = (ops.select_heads(y, 2 * size + at, heads.num_kv_heads, dim) for at in (0, kv_size))
        assert self.q_norm is not None
        assert self.k_norm is not None
        assert self.o_proj is not None
        cache, metadata = kv[self.place.index], batch.metadata[self.place.group]
        q = self.write(ops, self.q_norm(ops, q), self.k_norm(ops, k), v, batch, cache)
        if last:
            metadata = batch.outputs.metadata[self.place.group]
            q, gate, residual = batch.outputs.of(ops.select_rows, q, gate, residual)
        attended = self.attend(ops, q, cache, metadata)
        return self.o_proj(ops, ops.multiply(attended, ops.activate(gate, Activation.SIGMOID))), residual


class DeltaLayer(LlamaLayer):
    """LlamaLayer with a gated attention, or the gated delta rule in its place."""

    def make_attention(self, config: DecoderConfig, index: int, rotary: Rotary) -> AnyAttention:
        assert isinstance(config, DeltaConfig)
        if index not in config.delta_layers:
            return GatedAttention(config, index, rotary)
        return GatedDelta(config.spec.hidden_size, config.delta, config.norm_eps, config.delta_names, _ALTERNATING)


def read_delta(config: ConfigReader, architecture: str, names: tuple[str, ...]) -> DeltaConfig:
    """Read a model of these layers, without experts.   names: see GatedDelta."""
    config.choice("hidden_act", ("silu", "swish"), "silu")
    config.expect("attn_output_gate", True)
    config.choice("mamba_ssm_dtype", ("float32",), "float32")
    decoder = read_decoder(config.with_defaults({"head_dim": 256}), architecture, rotated=0.25)
    with_bias, num_layers = config.flag("attention_bias", False), decoder.spec.num_layers
    changed = replace(
        decoder,
        layer=DeltaLayer,
        norm_kind=Norm.RMS_UNIT_OFFSET,
        qk_norm=QKNorm.HEAD,
        qkv_bias=with_bias,
        attention_out_bias=with_bias,
    )
    every = config.integer("full_attention_interval", 4)
    types = config.texts("layer_types") or [FULL if not (at + 1) % every else RECURRENT for at in range(num_layers)]
    if len(types) != num_layers or not {FULL, RECURRENT}.issuperset(types):
        raise config.wrong("layer_types", f"{num_layers} times {FULL} or {RECURRENT}")
    return DeltaConfig(
        **{field.name: getattr(changed, field.name) for field in fields(changed)},
        delta=_read_shape(config),
        delta_layers=frozenset(index for index, kind in enumerate(types) if kind == RECURRENT),
        delta_names=names,
    )


def _read_shape(config: ConfigReader) -> DeltaShape:
    num_heads, num_groups = config.integer("linear_num_value_heads", 32), config.integer("linear_num_key_heads", 16)
    if num_heads % num_groups:
        raise config.wrong("linear_num_key_heads", f"a divisor of linear_num_value_heads = {num_heads}")
    key_dim, value_dim = config.integer("linear_key_head_dim", 128), config.integer("linear_value_head_dim", 128)
    num_taps = config.integer("linear_conv_kernel_dim", 4, most=64)
    if num_taps < 2:
        raise config.wrong("linear_conv_kernel_dim", "at least 2")
    tiled = num_groups < num_heads and config.flag("tiled_heads", False)
    return DeltaShape(num_heads, num_groups, key_dim, value_dim, num_taps, tiled)


def read_shared_experts(config: ConfigReader, renormalize: bool) -> ExpertsConfig:
    """Read experts next to one that every token has, behind a sigmoid."""
    experts = read_experts(config, "moe_intermediate_size", renormalize)
    return replace(experts, shared_size=config.integer("shared_expert_intermediate_size", 512), shared_gate=True)


def read(config: ConfigReader) -> DeltaConfig:
    decoder = read_delta(config, "qwen3_next", _BY_GROUP if config.flag("by_group", True) else _BY_PART)
    experts = read_shared_experts(config, config.flag("norm_topk_prob", True))
    return replace(decoder, experts=experts, dense_layers=read_dense_layers(config))


def gguf_settings(config: ConfigReader) -> dict[str, object]:
    """Set what llama.cpp's files say in another way; leave out the layers of draft heads, which it counts."""
    types, num_layers = config.texts("layer_types"), num_layers_without_drafters(config)
    shape = gguf_shape(
        config,
        "linear_num_value_heads",
        "linear_value_head_dim",
        "linear_key_head_dim",
        "linear_num_key_heads",
        "linear_conv_kernel_dim",
        "conv_bias",
    )
    shared_size = config.get("expert_shared_feed_forward_length")
    return {
        **shape,
        "num_hidden_layers": num_layers,
        "layer_types": [*types[:num_layers]] if types else None,
        "intermediate_size": config.get("intermediate_size") or shared_size,
        "shared_expert_intermediate_size": shared_size,
    }


def _gguf_settings(config: ConfigReader) -> dict[str, object]:
    """The first files had what goes into the delta rule as config.json's checkpoints do."""
    own = {"by_group": config.get("ssm.by_group"), "norm_topk_prob": config.flag("norm_topk_prob", True)}
    return {**gguf_settings(config), **own}


LAYER_NAMES = mixer_names("linear_attn")
_GGUF = gguf_naming(
    {
        **gguf_mixer_names(),
        "post_attention_layernorm": "post_attention_norm",
        "self_attn.in_proj_qkvz": "ssm_in",
        "self_attn.in_proj_qkv": "attn_qkv",
        "self_attn.in_proj_z": "attn_gate",
        "self_attn.in_proj_ba": "ssm_ba",
        "self_attn.in_proj_b": "ssm_beta",
        "self_attn.in_proj_a": "ssm_alpha",
        "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    }
)
GGUF = replace(_GGUF, by_part=False)
"""Queries and their gates alternate, as in other checkpoints."""

QWEN3_NEXT = Architecture(
    name="qwen3_next",
    title="Qwen3-Next",
    hf_names=("Qwen3NextForCausalLM",),
    model=Llama,
    read=read,
    hf=(Naming(substitutions=LAYER_NAMES), Naming(substitutions=(*LAYER_NAMES, (r"^model\.", "")))),
    gguf_names=("qwen3next",),
    experts=True,
    gguf=GGUF,
    gguf_settings=_gguf_settings,
)
