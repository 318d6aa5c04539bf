"""MiniMax-M2: experts in every layer, chosen by sigmoid and a bias of each, q and k normed over all heads at once, and
heads turned in part.
"""

from dataclasses import replace

from pagoda.layers.mlp import ExpertGroups
from pagoda.models.architecture import Architecture
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import DecoderConfig, QKNorm, read_decoder, read_experts
from pagoda.models.llama import Llama
from pagoda.models.mistral import MIXTRAL_TENSORS
from pagoda.models.naming import BARE, Naming


def read(config: ConfigReader) -> DecoderConfig:
    config.choice("scoring_func", ("sigmoid",), "sigmoid")
    config.expect("use_qk_norm", True)
    config.expect("qk_norm_type", "per_layer")
    config.expect("use_routing_bias", True)
    config.refuse("shared_intermediate_size", 0)
    config = config.changed({"head_dim": 128, **config.values})
    if config.has("rotary_dim"):  # in transformers, too, partial_rotary_factor goes first
        turned = config.integer("rotary_dim") / config.integer("head_dim")
        config = config.with_defaults({"partial_rotary_factor": turned})
    experts = read_experts(config, "intermediate_size", renormalize=True)
    return replace(
        read_decoder(config, "minimax_m2", default_theta=5_000_000.0, rotated=1.0),
        qk_norm=QKNorm.ALL_HEADS,
        experts=replace(experts, groups=ExpertGroups(sigmoid=True, has_bias=True)),
    )


_TENSORS = ((r"\.mlp\.choice_bias$", ".mlp.e_score_correction_bias"), *MIXTRAL_TENSORS)

MINIMAX_M2 = Architecture(
    name="minimax_m2",
    title="MiniMax-M2",
    hf_names=("MiniMaxM2ForCausalLM",),
    model=Llama,
    read=read,
    gguf_names=("minimax-m2",),
    experts=True,
    hf=(Naming(substitutions=_TENSORS), Naming(substitutions=BARE.substitutions + _TENSORS)),
)
