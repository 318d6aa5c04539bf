"""Gemma 4, text: heads of another size in layers with full attention, normed values, and scaled layers.

Small ones have layers at the end without K and V of their own, and an input of each layer made from the token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pagoda.base.errors import ConfigError
from pagoda.base.model_spec import ModelSpec
from pagoda.base.ranks import RankPlace
from pagoda.layers.attention import Attention, Heads, SharedKVAttention
from pagoda.layers.linear import Embedding, Linear
from pagoda.layers.mlp import ExpertsConfig
from pagoda.layers.norm import RMSNorm
from pagoda.layers.parameter import Parameter, Part, Vector
from pagoda.layers.rope_config import RopeConfig, RopeType
from pagoda.layers.rotary import Rotary
from pagoda.models.architecture import Architecture
from pagoda.models.config_reader import ConfigReader, read_rope_parameters
from pagoda.models.decoder_config import (
    FULL,
    SLIDING,
    DecoderConfig,
    QKNorm,
    read_activation,
    read_layer_types,
    read_spec,
    windows_by_layer_types,
)
from pagoda.models.decoder_layers import DecoderAttention, SandwichLayer
from pagoda.models.gemma3 import read_layer_rope
from pagoda.models.gemma4_moe import NAMINGS, Gemma4Experts, read_gemma4_experts
from pagoda.models.llama import Llama, LlamaModel
from pagoda.ops.batch import ForwardBatch, Input, KVLayer
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import RankGroup, Tensor

LAYER_INPUTS = "layer_inputs"
"""Input that the model adds to its batch: [T, layers, size]."""

# Those of transformers. Counts that may be 0 are read by `_count`.
_DEFAULTS: dict[str, object] = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Config(DecoderConfig):
    """full_heads: of layers with full attention.   full_k_is_v: they have no matrix for v, which is k before its norm.

    num_shared: layers at the end that attend to the K and V of the last layer of their kind before them.
    wide_shared: their MLPs are twice as wide.   input_size: of what each layer gets of the token, 0 for none.
    input_vocab: tokens that have it.   layer_experts: next to the MLP of each layer, None for none.
    """

    full_heads: Heads
    full_k_is_v: bool = False
    num_shared: int = 0
    wide_shared: bool = False
    input_size: int = 0
    input_vocab: int = 0
    layer_experts: ExpertsConfig | None = None

    @property
    def num_own(self) -> int:
        """Layers with K and V of their own."""
        return self.spec.num_layers - self.num_shared

    def heads_of(self, index: int) -> Heads:
        return self.heads if self.spec.layer_windows[index] else self.full_heads


class Gemma4Attention(DecoderAttention):
    """Heads of v are normed, without a weight."""

    def __init__(self, config: Gemma4Config, index: int, rotary: Rotary) -> None:
        self.k_is_v = config.full_k_is_v and not config.spec.layer_windows[index]
        super().__init__(config, index, rotary)
        self.v_norm = RMSNorm(self.heads.dim, config.norm_eps, unit_offset=True, zeros=True)

    def stored_parts(self, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        return parts[:2] if self.k_is_v else parts

    def project(self, ops: ForwardOps, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if not self.k_is_v:
            q, k, v = super().project(ops, x)
            return q, k, self.v_norm(ops, v)
        heads, y = self.computed_heads, self.qkv(ops, x)
        k = ops.select_heads(y, heads.num_heads * heads.dim, heads.num_kv_heads, heads.dim)
        return ops.select_heads(y, 0, heads.num_heads, heads.dim), k, self.v_norm(ops, k)


class Gemma4Layer(SandwichLayer):
    """A layer whose results are scaled; before that, the token's own input of the layer may be added."""

    def __init__(self, config: DecoderConfig, index: int, rotary: Rotary) -> None:
        assert isinstance(config, Gemma4Config)
        spec = config.spec
        if index >= config.num_own and config.wide_shared:
            wide = replace(spec, intermediate_size=2 * spec.intermediate_size)
            super().__init__(replace(config, spec=wide), index, rotary)
        else:
            super().__init__(config, index, rotary)
        self.moe = None if config.layer_experts is None else Gemma4Experts(config, config.layer_experts)
        self.layer_scalar = Parameter[float](Vector(1, is_number=True))
        self.index, self.input_size, self.activation = index, config.input_size, config.activation
        self.per_layer_input_gate: Linear | None = None
        self.per_layer_projection: Linear | None = None
        if config.input_size:
            self.per_layer_input_gate = Linear(spec.hidden_size, config.input_size)
            self.per_layer_projection = Linear(config.input_size, spec.hidden_size)
            self.post_per_layer_input_norm = config.norm()

    def make_attention(self, config: DecoderConfig, index: int, rotary: Rotary) -> Attention | SharedKVAttention:
        assert isinstance(config, Gemma4Config)
        if index < config.num_own:
            return Gemma4Attention(config, index, rotary)
        spec, heads = config.spec, config.heads_of(index)
        return SharedKVAttention(
            spec.hidden_size,
            heads,
            rotary,
            spec.layer_windows[index],
            config.attention_scale,
            RMSNorm(heads.dim, config.norm_eps),
            config.qkv_bias,
            config.attention_out_bias,
        )

    def __call__(
        self,
        ops: ForwardOps,
        x: Tensor,
        residual: Tensor | None,
        batch: ForwardBatch,
        kv: Sequence[KVLayer],
        last: bool,
    ) -> tuple[Tensor, Tensor]:
        x, residual = super().__call__(ops, x, residual, batch, kv, last)
        if self.per_layer_input_gate is not None and self.per_layer_projection is not None:
            given, size = batch.inputs[LAYER_INPUTS].tensor, self.input_size
            given = ops.select_heads(given, self.index * size, 1, size)
            if last:
                given = ops.select_rows(given, batch.outputs.index)
            residual = ops.add(x, residual)
            gate = ops.activate(self.per_layer_input_gate(ops, residual), self.activation)
            x = self.post_per_layer_input_norm(ops, self.per_layer_projection(ops, ops.multiply(gate, given)))
        factor = self.layer_scalar.value
        return ops.scale(x, factor), ops.scale(residual, factor)

    def feed_forward(self, ops: ForwardOps, x: Tensor, residual: Tensor) -> Tensor:
        y = self.mlp(ops, x)
        return y if self.moe is None else self.moe(ops, y, residual)


class Gemma4Model(LlamaModel):
    """Layers of which the last ones may read what earlier ones keep, and may have inputs of their own."""

    def __init__(self, config: Gemma4Config) -> None:
        super().__init__(config)
        windows, own = config.spec.layer_windows, range(config.num_own)
        for index in range(config.num_own, len(windows)):
            attention = self.layers[index].self_attn
            source = self.layers[max(at for at in own if windows[at] == windows[index])].self_attn
            assert isinstance(attention, SharedKVAttention)
            assert isinstance(source, Attention)
            attention.source = source
        self.config, size = config, len(windows) * config.input_size
        self.embed_tokens_per_layer: Embedding | None = None
        if size:
            self.embed_tokens_per_layer = Embedding(config.input_vocab, size, config.input_size**0.5)
            self.per_layer_model_projection = Linear(config.spec.hidden_size, size)
            self.per_layer_projection_norm = RMSNorm(config.input_size, config.norm_eps)

    def take_stage(self, place: RankPlace, ranks: RankGroup, is_tied: bool) -> None:
        """Raises ConfigError if layers read what only another stage has, also."""
        config = self.config
        for key, value in (
            ("num_kv_shared_layers", config.num_shared),
            ("hidden_size_per_layer_input", config.input_size),
        ):
            if value:
                raise ConfigError(
                    f"pipeline_parallel_size={place.num_stages}: a model with {key} = {value} cannot be divided into "
                    f"stages; leave it out, or take tensor_parallel_size={place.num_stages} instead"
                )
        super().take_stage(place, ranks, is_tied)

    def with_layer_inputs(self, ops: ForwardOps, x: Tensor, batch: ForwardBatch) -> ForwardBatch:
        if self.embed_tokens_per_layer is None:
            return batch
        spec, size = self.config.spec, self.config.input_size
        of_token = ops.select_heads(self.embed_tokens_per_layer(ops, batch.token_ids), 0, spec.num_layers, size)
        made = ops.scale(self.per_layer_model_projection(ops, x), spec.hidden_size**-0.5)
        made = self.per_layer_projection_norm(ops, ops.select_heads(made, 0, spec.num_layers, size))
        both = ops.scale(ops.add(made, of_token), 2.0**-0.5)
        return replace(batch, inputs={**batch.inputs, LAYER_INPUTS: Input(both)})


class Gemma4(Llama):
    body = Gemma4Model

    def __init__(self, config: Gemma4Config) -> None:
        super().__init__(config)
        self.takes_embeds = not config.input_size  # a layer's input is looked up by the token


def read(config: ConfigReader) -> Gemma4Config:
    config = config.text_settings().with_defaults(_DEFAULTS)
    config.refuse("use_bidirectional_attention", "vision")  # which concerns the tokens of images alone
    max_position = config.integer("max_position_embeddings")
    types = read_layer_types(config, 6)
    window = config.integer("sliding_window", most=max_position - 1)
    windows = windows_by_layer_types(config, (*types[:-1], FULL), window)  # the last one is full, whatever it says
    spec = read_spec(config, "gemma4", max_position, windows, tie_embeddings=True)
    num_shared, own_windows = _count(config, "num_kv_shared_layers", 0), windows
    if num_shared:
        own_windows = windows[:-num_shared]
        if not set(own_windows) >= set(windows):
            raise ConfigError(
                f"{config.origin}: num_kv_shared_layers = {num_shared} leaves no layer of some type in layer_types "
                "with K and V"
            )
    input_size = _count(config, "hidden_size_per_layer_input", 256)
    input_vocab = config.integer("vocab_size_per_layer_input", 262_144)
    if input_size and input_vocab < spec.vocab_size:
        raise ConfigError(
            f"{config.origin}: vocab_size_per_layer_input = {input_vocab} is less than vocab_size = {spec.vocab_size}"
        )
    k_is_v, attention_bias = config.flag("attention_k_eq_v", False), config.flag("attention_bias", False)
    return Gemma4Config(
        spec=spec,
        norm_eps=config.not_negative("rms_norm_eps", 1e-6),
        activation=read_activation(config, "hidden_activation", "gelu_pytorch_tanh"),
        rope_full=_read_full_rope(config),
        rope_window=read_layer_rope(config, SLIDING, "rope_theta", 10_000.0),
        attention_scale=1.0,
        logit_softcap=config.not_negative("final_logit_softcapping", 0.0),
        embedding_scale=spec.hidden_size**0.5,
        layer=Gemma4Layer,
        qk_norm=QKNorm.HEAD,
        full_heads=_read_full_heads(config, spec, k_is_v),
        full_k_is_v=k_is_v,
        qkv_bias=attention_bias,
        attention_out_bias=attention_bias,
        num_shared=num_shared,
        wide_shared=config.flag("use_double_wide_mlp", False),
        input_size=input_size,
        input_vocab=input_vocab,
        layer_experts=read_gemma4_experts(config),
    )


def _count(config: ConfigReader, key: str, default: int) -> int:
    """Return an integer that may be 0."""
    return 0 if config.get(key) == 0 else config.integer(key, default)


def _read_full_heads(config: ConfigReader, spec: ModelSpec, k_is_v: bool) -> Heads:
    """Return the heads of layers with full attention.

    Released checkpoints have settings for them. In place of these, transformers writes how layers differ.
    """
    common = Heads(spec.num_heads, spec.num_kv_heads, spec.head_dim)
    given = config.section("per_layer_config")
    if given is None:
        num_kv_heads = config.integer("num_global_key_value_heads", spec.num_kv_heads) if k_is_v else spec.num_kv_heads
        full = Heads(spec.num_heads, num_kv_heads, config.integer("global_head_dim"))
    else:
        by_layer = dict.fromkeys(range(spec.num_layers), common)
        for key in given.values:
            layer = given.section(key)
            if layer is None or not key.isdigit() or int(key) not in by_layer:
                raise given.wrong(key, f"settings of a layer, 0 to {spec.num_layers - 1}")
            for other in layer.values.keys() - {"head_dim", "num_key_value_heads"}:
                layer.refuse(other)
            by_layer[int(key)] = Heads(
                spec.num_heads,
                layer.integer("num_key_value_heads", common.num_kv_heads),
                layer.integer("head_dim", common.dim),
            )
        full = by_layer[spec.num_layers - 1]
        if any(heads != (common if spec.layer_windows[at] else full) for at, heads in by_layer.items()):
            raise ConfigError(f"{given.origin}: layers of one type differ, which is not supported")
    if spec.num_heads % full.num_kv_heads or full.dim % 2:
        raise ConfigError(
            f"{config.origin}: {spec.num_heads} heads with {full.num_kv_heads} KV heads of {full.dim} elements in "
            "layers with full attention; KV heads must divide the others, and their size be even"
        )
    return full


def _read_full_rope(config: ConfigReader) -> RopeConfig:
    nested = config.section("rope_parameters")
    parameters = nested.section(FULL) if nested else None
    if parameters is None or parameters.get("rope_type") != RopeType.PROPORTIONAL.value:
        return read_layer_rope(config, FULL, "rope_theta", 1_000_000.0)
    proportion = parameters.positive("partial_rotary_factor", 1.0)
    if proportion > 1:
        raise ConfigError(f"{parameters.origin}: partial_rotary_factor = {proportion}, expected at most 1")
    linear = ConfigReader({"rope_type": "linear", "factor": parameters.number("factor", 1.0)}, parameters.origin)
    rope = read_rope_parameters(
        linear, parameters.number("rope_theta", 1_000_000.0), config.integer("max_position_embeddings")
    )
    return replace(rope, rope_type=RopeType.PROPORTIONAL, proportion=proportion)


GEMMA4 = Architecture(
    name="gemma4",
    title="Gemma 4",
    hf_names=("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
    model=Gemma4,
    read=read,
    hf=NAMINGS,
)
