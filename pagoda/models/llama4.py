"""Llama 4: most layers attend within chunks of the text; the others to all of it, without a rotary embedding and with
queries that grow with their position. In some layers or in all, experts whose input the router scales, and a shared
one.

Of a checkpoint that also sees, the vision tower is not loaded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from pagoda.layers.mlp import MoE
from pagoda.layers.norm import RMSNorm
from pagoda.layers.rope_config import RopeConfig
from pagoda.layers.rotary import Rotary
from pagoda.models.architecture import Architecture
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import FULL, DecoderConfig, read_decoder, read_experts
from pagoda.models.decoder_layers import DecoderAttention, LlamaLayer
from pagoda.models.llama import Llama, LlamaModel
from pagoda.models.naming import MULTIMODAL
from pagoda.models.smollm3 import read_rotates
from pagoda.ops.batch import AttentionMetadata, ForwardBatch, KVLayer
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import Tensor

CHUNKED = "chunked_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama4Config(DecoderConfig):
    """has_qk_norm: of layers with a rotary embedding.   temperature: what multiplies the queries of others, if anything
    does.
    """

    has_qk_norm: bool
    temperature: RopeConfig | None


class Llama4Attention(DecoderAttention):
    """Attention to the query's own chunk, or to all.   temperature: of a layer without a rotary embedding."""

    temperature: Rotary | None = None

    def __init__(self, config: DecoderConfig, index: int, rotary: Rotary) -> None:
        assert isinstance(config, Llama4Config)
        super().__init__(config, index, rotary)
        if config.has_qk_norm and self.rotary is not None:
            # Norms without a weight and the rotary embedding can change places: here they come after it.
            self.q_norm, self.k_norm = (
                RMSNorm(self.heads.dim, config.norm_eps, unit_offset=True, zeros=True) for _ in range(2)
            )

    def write(self, ops: ForwardOps, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch, cache: KVLayer) -> Tensor:
        if self.temperature is not None:
            factors = self.temperature.query_factors
            assert factors is not None
            q = ops.scale_rows(q, ops.embedding(batch.positions, factors))
        return super().write(ops, q, k, v, batch, cache)

    def attend(self, ops: ForwardOps, q: Tensor, cache: KVLayer, metadata: AttentionMetadata) -> Tensor:
        return ops.attention(q, cache, metadata, self.scale, -self.window)


class InputScaledMoE(MoE):
    """Each expert reads x times the sigmoid of its logit."""

    def route(self, ops: ForwardOps, x: Tensor) -> tuple[Tensor, Tensor]:
        return ops.route(ops.logits(x, self.gate.weight.value), self.config.top_k, renormalize=False, sigmoid=True)


class Llama4Layer(LlamaLayer):
    attention = Llama4Attention

    def __init__(self, config: DecoderConfig, index: int, rotary: Rotary) -> None:
        super().__init__(config, index, rotary)
        if isinstance(self.mlp, MoE):
            self.mlp = InputScaledMoE(config.spec.hidden_size, config.experts)


class Llama4Model(LlamaModel):
    def __init__(self, config: Llama4Config) -> None:
        super().__init__(config)
        if config.temperature is None:
            return
        temperature = Rotary(config.temperature, 0)
        for layer in self.layers:
            assert isinstance(layer.self_attn, Llama4Attention)
            if layer.self_attn.rotary is None:
                layer.self_attn.temperature = temperature


class Llama4(Llama):
    body = Llama4Model
    cpu_only = "attention within chunks"


def read(config: ConfigReader) -> Llama4Config:
    text = config.text_settings()
    text = text.with_defaults({"rms_norm_eps": 1e-5, "intermediate_size_mlp": 16_384, "num_experts_per_tok": 1})
    layers = range(text.num_layers())
    rotates = read_rotates(text)
    inner_size = text.integer("intermediate_size")
    experts = read_experts(text, "intermediate_size", renormalize=False)
    experts = replace(experts, shared_size=inner_size, scales_input=True)
    wide = text.changed({"intermediate_size": text.integer("intermediate_size_mlp")})
    decoder = read_decoder(wide, "llama4", _windows(text, rotates), 500_000.0, interleaved=True)
    step = text.integer("interleave_moe_layer_step", 1)
    with_experts = text.ids("moe_layers") if text.has("moe_layers") else layers[step - 1 :: step]
    temperature = RopeConfig(
        query_beta=text.not_negative("attn_scale", 0.1),
        query_shift=1,
        original_max_position=text.integer("floor_scale", 8192),
    )
    is_tuned = text.flag("attn_temperature_tuning", True) and temperature.query_beta > 0
    bias = text.flag("attention_bias", False)
    decoder = replace(
        decoder,
        layer=Llama4Layer,
        unrotated_layers=frozenset(at for at in layers if not rotates[at]),
        qkv_bias=bias,
        attention_out_bias=bias,
        experts=experts,
        dense_layers=frozenset(layers).difference(with_experts),
    )
    return Llama4Config(
        has_qk_norm=text.flag("use_qk_norm", True),
        temperature=temperature if is_tuned else None,
        **{field.name: getattr(decoder, field.name) for field in fields(decoder)},
    )


def _windows(config: ConfigReader, rotates: Sequence[int]) -> tuple[int, ...]:
    """Return the positions of a chunk per layer, 0 where a layer attends to all."""
    kinds = config.texts("layer_types") or tuple(CHUNKED if of_layer else FULL for of_layer in rotates)
    if len(kinds) != len(rotates) or not set(kinds) <= {CHUNKED, FULL}:
        raise config.wrong("layer_types", f"{CHUNKED} or {FULL} for each of the {len(rotates)} layers")
    if CHUNKED not in kinds:
        return (0,) * len(kinds)
    chunk = config.integer("attention_chunk_size", 8192)
    return tuple(chunk if kind == CHUNKED else 0 for kind in kinds)


_TENSORS = (
    (r"\.mlp\.gate\.", ".feed_forward.router."),
    (r"\.mlp\.experts\.(\d+)\.(?:gate|up)_proj\.weight$", r".feed_forward.experts.gate_up_proj[\1]"),
    (r"\.mlp\.experts\.(\d+)\.down_proj\.weight$", r".feed_forward.experts.down_proj[\1]"),
    (r"\.mlp\.", ".feed_forward."),
)

LLAMA4 = Architecture(
    name="llama4",
    title="Llama 4",
    hf_names=("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
    model=Llama4,
    read=read,
    hf=tuple(
        replace(of_all, substitutions=(*_TENSORS, *of_all.substitutions), transposed=r"\.experts\.\w+_proj$")
        for of_all in MULTIMODAL
    ),
)
