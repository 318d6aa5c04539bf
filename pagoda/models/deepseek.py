"""DeepSeek-V2 and V3: latent attention, many small experts of which a token takes some, and a shared one.

V2 chooses experts by softmax, where set in the best groups of them; V3 by sigmoid and a bias of each expert, in groups.
"""

import math
from dataclasses import dataclass, fields, replace

from pagoda.base.errors import ConfigError
from pagoda.layers.latent_attention import LatentAttention, LatentHeads
from pagoda.layers.mlp import ExpertGroups, ExpertsConfig
from pagoda.layers.rope_config import RopeType
from pagoda.layers.rotary import Rotary
from pagoda.models.architecture import Architecture
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import DecoderConfig, read_decoder, read_experts
from pagoda.models.decoder_layers import LlamaLayer
from pagoda.models.llama import Llama
from pagoda.models.naming import Naming
from pagoda.ops.shape_rules import PANEL_ROWS


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSeekConfig(DecoderConfig):
    """latent: the sizes of the attention."""

    latent: LatentHeads


class DeepSeekLayer(LlamaLayer):
    def make_attention(self, config: DecoderConfig, index: int, rotary: Rotary) -> LatentAttention:
        assert isinstance(config, DeepSeekConfig)
        return LatentAttention(
            config.spec.hidden_size, config.latent, rotary, config.attention_scale, config.attention_out_bias
        )


def _read_v2(config: ConfigReader) -> DecoderConfig:
    config = with_names_of_others(config.with_defaults({"n_shared_experts": 2, "first_k_dense_replace": 0}))
    config.choice("scoring_func", ("softmax",), "softmax")
    config.refuse("norm_topk_prob")
    config.refuse("mlp_bias")
    groups = ExpertGroups()
    if config.choice("topk_method", ("greedy", "group_limited_greedy"), "greedy") == "group_limited_greedy":
        groups = ExpertGroups(config.integer("n_group"), config.integer("topk_group"))
    return read_latent(config, "deepseek_v2", groups, renormalize=False, interleaved=True)


def _read_v3(config: ConfigReader) -> DecoderConfig:
    defaults = {"num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3, "n_group": 8}
    config = config.with_defaults({**defaults, "topk_group": 4, "routed_scaling_factor": 2.5})
    config = with_names_of_others(config)
    config.choice("scoring_func", ("sigmoid",), "sigmoid")
    config.choice("topk_method", ("noaux_tc",), "noaux_tc")
    groups = ExpertGroups(config.integer("n_group"), config.integer("topk_group"), best=2, sigmoid=True, has_bias=True)
    renormalize, interleaved = config.flag("norm_topk_prob", True), config.flag("rope_interleave", True)
    return read_latent(config, "deepseek_v3", groups, renormalize, interleaved)


def with_names_of_others(config: ConfigReader) -> ConfigReader:
    """Return the settings with the names that other models have for them, also."""
    # `head_dim`, where it is stated, is the size of the part that is turned.
    own = {
        "head_dim": config.integer("qk_rope_head_dim", 64),
        "num_key_value_heads": None,
        "num_local_experts": config.get("n_routed_experts"),
    }
    return config.changed(own)


def read_latent(
    config: ConfigReader, architecture: str, groups: ExpertGroups, renormalize: bool, interleaved: bool
) -> DecoderConfig:
    """Read a model with latent attention and experts in groups. Raises ConfigError."""
    config.refuse("moe_layer_freq", 1)
    decoder = read_decoder(config, architecture, interleaved=interleaved)
    heads = LatentHeads(
        num_heads=decoder.spec.num_heads,
        latent=config.integer("kv_lora_rank", 512),
        plain=config.integer("qk_nope_head_dim", 128),
        rotated=decoder.spec.head_dim,
        value=config.integer("v_head_dim", 128),
        query_rank=config.integer("q_lora_rank") if config.has("q_lora_rank") else 0,
    )
    multiples = {
        "kv_lora_rank": (heads.latent, PANEL_ROWS), "v_head_dim": (heads.value, PANEL_ROWS),
        "qk_rope_head_dim": (heads.rotated, 16),
    }  # fmt: skip
    for key, (size, unit) in multiples.items():
        if size % unit:
            raise ConfigError(f"{config.origin}: {key} = {size} is not supported; supported: multiples of {unit}")
    if heads.rotated >= heads.latent:
        raise ConfigError(
            f"{config.origin}: qk_rope_head_dim = {heads.rotated} is not supported; supported: less than kv_lora_rank, "
            f"{heads.latent}"
        )
    num_dense = config.number("first_k_dense_replace")
    changed = replace(
        decoder,
        layer=DeepSeekLayer,
        attention_scale=(heads.plain + heads.rotated) ** -0.5 * _score_factor(config, decoder),
        attention_out_bias=config.flag("attention_bias", False),
        experts=read_experts_in_groups(config, groups, renormalize),
        dense_layers=frozenset(layer for layer in range(decoder.spec.num_layers) if layer < num_dense),
    )
    return DeepSeekConfig(latent=heads, **{field.name: getattr(changed, field.name) for field in fields(changed)})


def read_experts_in_groups(config: ConfigReader, groups: ExpertGroups, renormalize: bool) -> ExpertsConfig:
    """Read experts of which a token takes those of its best groups, and a shared one. Raises ConfigError."""
    experts = read_experts(config, "moe_intermediate_size", renormalize)
    size, best = experts.num_experts // groups.count, groups.best
    if experts.num_experts % groups.count or size < best:
        raise ConfigError(
            f"{config.origin}: n_group = {groups.count} does not divide n_routed_experts = {experts.num_experts} into "
            f"groups of {best} or more"
        )
    if groups.top > groups.count or experts.top_k > groups.top * size:
        raise ConfigError(
            f"{config.origin}: topk_group = {groups.top} of n_group = {groups.count} groups of {size} experts does not "
            f"fit num_experts_per_tok = {experts.top_k}"
        )
    factor = config.positive("routed_scaling_factor", 1.0)
    return replace(
        experts,
        groups=replace(groups, factor=factor),
        shared_size=experts.inner_size * config.integer("n_shared_experts"),
    )


def _score_factor(config: ConfigReader, decoder: DecoderConfig) -> float:
    """Return what YaRN multiplies scores by, besides what it multiplies the rotated parts by."""
    rope = config.section("rope_parameters") or config.section("rope_scaling")
    if rope is None or decoder.rope_full.rope_type is RopeType.DEFAULT:
        return 1.0
    weight, factor = rope.not_negative("mscale_all_dim", 0.0), decoder.rope_full.factor
    return (0.1 * weight * math.log(factor) + 1.0) ** 2 if weight and factor > 1 else 1.0


TENSORS = (
    (r"\.mlp\.shared_expert\.", ".mlp.shared_experts."),
    (r"\.mlp\.choice_bias$", ".mlp.gate.e_score_correction_bias"),
)
NAMINGS = (Naming(substitutions=TENSORS), Naming(substitutions=(*TENSORS, (r"^model\.", ""))))

DEEPSEEK_V2 = Architecture(
    name="deepseek_v2", title="DeepSeek-V2", hf_names=("DeepseekV2ForCausalLM",), model=Llama, read=_read_v2, hf=NAMINGS
)
DEEPSEEK_V3 = Architecture(
    name="deepseek_v3", title="DeepSeek-V3", hf_names=("DeepseekV3ForCausalLM",), model=Llama, read=_read_v3, hf=NAMINGS
)
