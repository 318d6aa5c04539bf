"""Nemotron-H: each layer is Mamba-2, attention without positions, an MLP, or experts; MLPs square a ReLU, ungated."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from pagoda.layers.linear import Linear
from pagoda.layers.mamba2 import Mamba2, Mamba2Shape
from pagoda.layers.mlp import ExpertGroups, ExpertsConfig, PlainMLP, StackedExperts
from pagoda.layers.module import Module
from pagoda.layers.parameter import Parameter, Vector
from pagoda.layers.rotary import Rotary
from pagoda.models.architecture import Architecture
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import DecoderConfig, num_layers_without_drafters, read_decoder
from pagoda.models.decoder_layers import DecoderAttention, LlamaLayer
from pagoda.models.deepseek import read_experts_in_groups
from pagoda.models.llama import Llama
from pagoda.models.mamba2 import Mamba2Config, gguf_mixer_names, gguf_shape, mixer_names, read_limits
from pagoda.models.naming import Naming, gguf_naming
from pagoda.ops.batch import ForwardBatch, KVLayer
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import Tensor

_MAMBA, _ATTENTION, _MLP, _EXPERTS = "linear_attention", "full_attention", "mlp", "moe"
_KINDS = {kind: kind for kind in (_MAMBA, _ATTENTION, _MLP, _EXPERTS)} | {"mamba": _MAMBA, "attention": _ATTENTION}
"""Spellings of a layer's kind."""
_LETTERS = {"M": _MAMBA, "*": _ATTENTION, "-": _MLP, "E": _EXPERTS}
"""Kinds of layers in the older spelling, a letter for each layer."""
_OLDER_NAMES = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_limit": "time_step_limit",
    "mamba_conv_bias": "use_conv_bias",
}
"""Settings of the first checkpoints. In transformers, too, they go first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NemotronHConfig(Mamba2Config):
    """kinds: of the layers.   latent_size: of what experts take and give, 0 for the hidden size."""

    kinds: tuple[str, ...]
    latent_size: int


class NemotronMoE(Module):
    """Experts without gates that compute in a smaller space, where set, and an MLP that every token has as well."""

    def __init__(self, config: NemotronHConfig) -> None:
        hidden_size, experts = config.spec.hidden_size, config.experts
        self.gate = Linear(hidden_size, experts.num_experts, quantizable=False)
        self.choice_bias = Parameter[Tensor](Vector(experts.num_experts, is_float32=True))
        self.fc1_latent_proj: Linear | None = None
        self.fc2_latent_proj: Linear | None = None
        if config.latent_size:
            self.fc1_latent_proj = Linear(hidden_size, config.latent_size, config.mlp_bias)
        self.experts = StackedExperts(config.latent_size or hidden_size, experts, config.activation, gated=False)
        if config.latent_size:
            self.fc2_latent_proj = Linear(config.latent_size, hidden_size, config.mlp_bias)
        self.shared_experts = PlainMLP(hidden_size, experts.shared_size, config.activation, config.mlp_bias)
        self.config = experts

    def __call__(self, ops: ForwardOps, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        chosen = self.config.route_in_groups(ops, ops.logits(x, self.gate.weight.value), self.choice_bias.value)
        y = self.experts(ops, x if self.fc1_latent_proj is None else self.fc1_latent_proj(ops, x), chosen)
        y = y if self.fc2_latent_proj is None else self.fc2_latent_proj(ops, y)
        return ops.add(y, self.shared_experts(ops, x))


class NemotronHLayer(LlamaLayer):
    """A norm and a mixer; x is added to the residual stream by the norm that follows it."""

    def __init__(self, config: DecoderConfig, index: int, rotary: Rotary) -> None:
        assert isinstance(config, NemotronHConfig)
        spec = config.spec
        self.post_attention_layernorm = config.norm()
        self.mixer: Mamba2 | DecoderAttention | PlainMLP | NemotronMoE
        match config.kinds[index]:
            case "linear_attention":
                self.mixer = Mamba2(spec.hidden_size, config.mamba, config.mamba_norm_eps)
            case "full_attention":
                self.mixer = DecoderAttention(config, index, rotary)
            case "mlp":
                self.mixer = PlainMLP(spec.hidden_size, spec.intermediate_size, config.activation, config.mlp_bias)
            case _:
                self.mixer = NemotronMoE(config)

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
        if isinstance(self.mixer, Mamba2 | DecoderAttention):
            return self.mixer(ops, x, residual, batch, kv, last)
        if last:
            x, residual = batch.outputs.of(ops.select_rows, x, residual)
        return self.mixer(ops, x), residual


def read(config: ConfigReader) -> NemotronHConfig:
    kinds = _read_kinds(config)
    config = config.changed({new: config.get(old) for old, new in _OLDER_NAMES.items() if config.has(old)})
    for key in ("attention_bias", "sliding_window", "mamba_proj_bias", "tie_word_embeddings"):
        config.refuse(key)
    config.choice("mlp_hidden_act", ("relu2",), "relu2")
    config.choice("mamba_hidden_act", ("silu", "swish"), "silu")
    config = config.changed(
        {
            "num_hidden_layers": len(kinds),
            "num_local_experts": config.integer("n_routed_experts", 8),
            "rms_norm_eps": config.not_negative("layer_norm_epsilon", 1e-5),
        }
    ).with_defaults(
        {
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 21504,
            "max_position_embeddings": 4096,
        }
    )
    decoder = read_decoder(config, "nemotron_h", plain_mlp=True, default_activation="relu2")
    decoder = replace(
        decoder,
        layer=NemotronHLayer,
        unrotated_layers=frozenset(range(len(kinds))),
        mlp_bias=config.flag("mlp_bias", False),
        experts=_read_experts(config) if _EXPERTS in kinds else decoder.experts,
    )
    return NemotronHConfig(
        **{field.name: getattr(decoder, field.name) for field in fields(decoder)},
        mamba=_read_mamba(config),
        mamba_norm_eps=decoder.norm_eps,
        mamba_layers=frozenset(index for index, kind in enumerate(kinds) if kind == _MAMBA),
        kinds=kinds,
        latent_size=config.integer("moe_latent_size") if config.has("moe_latent_size") else 0,
    )


def _read_kinds(config: ConfigReader) -> tuple[str, ...]:
    """Return the kind of each layer, by name or by a pattern of letters."""
    for key in ("layers_block_type", "layer_types"):
        if (kinds := config.texts(key)) is not None:
            if not kinds or not _KINDS.keys() >= set(kinds):
                raise config.wrong(key, f"a list of {', '.join(_KINDS)}")
            return tuple(_KINDS[kind] for kind in kinds)
    pattern = config.text("hybrid_override_pattern")
    if not pattern or not _LETTERS.keys() >= set(pattern):
        raise config.wrong("hybrid_override_pattern", f"a string of {' '.join(_LETTERS)}")
    return tuple(_LETTERS[letter] for letter in pattern)


def _read_experts(config: ConfigReader) -> ExpertsConfig:
    groups = ExpertGroups(
        config.integer("n_group", 1), config.integer("topk_group", 1), best=2, sigmoid=True, has_bias=True
    )
    experts = read_experts_in_groups(
        config.with_defaults({"n_shared_experts": 1}), groups, config.flag("norm_topk_prob", True)
    )
    return replace(experts, shared_size=config.integer("moe_shared_expert_intermediate_size", 7688))


def _read_mamba(config: ConfigReader) -> Mamba2Shape:
    num_heads, num_groups = config.integer("mamba_num_heads", 128), config.integer("n_groups", 8)
    if num_heads % num_groups:
        raise config.wrong("n_groups", f"a divisor of mamba_num_heads = {num_heads}")
    return Mamba2Shape(
        num_heads,
        config.integer("mamba_head_dim", 64),
        config.integer("ssm_state_size", 128),
        num_groups,
        config.integer("conv_kernel", 4, most=64),
        config.flag("use_conv_bias", True),
        config.flag("use_bias", False),
        *read_limits(config),
    )


_NAMES = (
    *mixer_names("mixer", "mixer"),
    (r"\.choice_bias$", ".gate.e_score_correction_bias"),
    (r"\.post_attention_layernorm\.", ".norm."),
    (r"^model\.norm\.", "model.norm_f."),
    (r"^model\.embed_tokens\.", "model.embeddings."),
)


def _gguf_settings(config: ConfigReader) -> dict[str, object]:
    """Set what llama.cpp's files say in another way; leave out the layers of draft heads, which it counts."""
    kinds, num_layers = config.texts("layer_types") or (), num_layers_without_drafters(config)
    num_experts = config.get("num_experts")
    if not config.has("topk_group"):
        config.refuse("n_group", 0, 1)
    epsilon = config.get("rms_norm_eps")
    names = ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel", "use_conv_bias")
    return {
        **gguf_shape(config, *names),
        "layers_block_type": [_EXPERTS if kind == _MLP and num_experts else kind for kind in kinds[:num_layers]]
        or None,
        "layer_types": None,
        "layer_norm_epsilon": config.get("layer_norm_eps") if epsilon is None else epsilon,
        "partial_rotary_factor": None,
        "n_routed_experts": num_experts,
        "n_group": config.get("n_group") or 1,
        "topk_group": config.get("topk_group") or 1,
        "norm_topk_prob": config.flag("norm_topk_prob", False),
        "routed_scaling_factor": config.get("routed_scaling_factor") or 1.0,
        "moe_shared_expert_intermediate_size": config.get("expert_shared_feed_forward_length"),
    }


_IN_GGUF = {
    **gguf_mixer_names("mixer"),
    "post_attention_layernorm": "attn_norm",
    **{f"mixer.{name}_proj": f"attn_{stored}" for name, stored in zip("qkvo", ("q", "k", "v", "output"), strict=True)},
    "mixer.gate": "ffn_gate_inp",
    "mixer.choice_bias": "exp_probs_b.bias",
    "mixer.fc1_latent_proj": "ffn_latent_down",
    "mixer.fc2_latent_proj": "ffn_latent_up",
    **{f"mixer.{name}_proj": f"ffn_{name}" for name in ("up", "down")},
    **{f"mixer.experts.*.{name}_proj": f"ffn_{name}_exps" for name in ("up", "down")},
    **{f"mixer.shared_experts.{name}_proj": f"ffn_{name}_shexp" for name in ("up", "down")},
}
NEMOTRON_H = Architecture(
    name="nemotron_h",
    title="Nemotron-H",
    hf_names=("NemotronHForCausalLM",),
    model=Llama,
    read=read,
    hf=(Naming(substitutions=(*_NAMES, (r"^model\.", "backbone."))), Naming(substitutions=_NAMES)),
    gguf_names=("nemotron_h", "nemotron_h_moe"),
    experts=None,
    gguf=gguf_naming(_IN_GGUF),
    gguf_settings=_gguf_settings,
)
