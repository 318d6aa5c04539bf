"""ERNIE 4.5: a Llama that turns pairs of neighbours. With experts: some layers have them, chosen by softmax and a bias
of each, and an MLP that every token has.
"""

from dataclasses import replace

from pagoda.layers.mlp import ExpertGroups
from pagoda.models.architecture import Architecture
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import DecoderConfig, read_decoder, read_experts
from pagoda.models.llama import Llama
from pagoda.models.naming import Naming


def _read(config: ConfigReader, architecture: str) -> DecoderConfig:
    config = config.with_defaults({"rms_norm_eps": 1e-5})
    return read_decoder(config, architecture, default_theta=500_000.0, interleaved=True, tie_embeddings=True)


def _read_dense(config: ConfigReader) -> DecoderConfig:
    bias = config.flag("use_bias", False)
    decoder = _read(config.changed({"head_dim": 128, **config.values}), "ernie4_5")
    return replace(decoder, qkv_bias=bias, attention_out_bias=bias, mlp_bias=bias)


def _read_moe(config: ConfigReader) -> DecoderConfig:
    config.refuse("use_bias")
    config.choice("scoring_func", ("softmax",), "softmax")
    decoder = _read(config, "ernie4_5_moe")
    names = {
        "num_local_experts": config.integer("moe_num_experts", 64),
        "num_experts_per_tok": config.integer("moe_k", 6),
    }
    experts = read_experts(config.changed(names), "moe_intermediate_size", renormalize=True)
    num_shared = config.not_negative("moe_num_shared_experts", 2)
    first, every = config.not_negative("moe_layer_start_index", 1), config.integer("moe_layer_interval", 1)
    last = config.number("moe_layer_end_index", -1)
    last = decoder.spec.num_layers - 1 if last == -1 else last
    return replace(
        decoder,
        experts=replace(experts, groups=ExpertGroups(has_bias=True), shared_size=int(num_shared) * experts.inner_size),
        dense_layers=frozenset(
            at for at in range(decoder.spec.num_layers) if not first <= at <= last or (at + 1) % every
        ),
    )


def _gguf_settings(config: ConfigReader) -> dict[str, object]:
    return {
        "moe_num_experts": config.get("num_experts"),
        "moe_k": config.get("num_experts_per_tok"),
        "moe_num_shared_experts": config.get("n_shared_experts") or 0,
        "moe_layer_start_index": config.get("first_k_dense_replace") or 0,
    }


ERNIE4_5 = Architecture(
    name="ernie4_5",
    title="ERNIE 4.5",
    hf_names=("Ernie4_5ForCausalLM",),
    model=Llama,
    read=_read_dense,
    gguf_names=("ernie4_5",),
)
_TENSORS = (
    (r"\.mlp\.shared_expert\.", ".mlp.shared_experts."),
    (r"\.mlp\.choice_bias$", ".mlp.moe_statics.e_score_correction_bias[0]"),
)
ERNIE4_5_MOE = Architecture(
    name="ernie4_5_moe",
    title="ERNIE 4.5 MoE",
    hf_names=("Ernie4_5_MoeForCausalLM",),
    model=Llama,
    read=_read_moe,
    gguf_names=("ernie4_5-moe",),
    experts=True,
    gguf_settings=_gguf_settings,
    hf=(Naming(substitutions=_TENSORS), Naming(substitutions=(*_TENSORS, (r"^model\.", "")))),
)
