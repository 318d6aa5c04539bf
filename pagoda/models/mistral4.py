"""Mistral 4: a DeepSeek-V3 whose experts are chosen by softmax, and whose queries are scaled by their position."""

from pagoda.base.errors import ConfigError
from pagoda.layers.mlp import ExpertGroups
from pagoda.models.architecture import Architecture
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import DecoderConfig
from pagoda.models.deepseek import TENSORS, read_latent, with_names_of_others
from pagoda.models.llama import Llama
from pagoda.models.naming import MULTIMODAL, STACKED_EXPERTS, Naming

_DEFAULTS: dict[str, object] = {
    "kv_lora_rank": 256,
    "q_lora_rank": 1024,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 0,
    "n_group": 1,
    "topk_group": 1,
}


def read(config: ConfigReader) -> DecoderConfig:
    config = config.changed({**_DEFAULTS, **config.values})
    turned, plain = config.integer("qk_rope_head_dim"), config.integer("qk_nope_head_dim")
    rope = config.section("rope_parameters") or config.section("rope_scaling")
    if rope is None:
        raise config.wrong("rope_parameters", "an object")
    rope.choice("rope_type" if rope.has("rope_type") else "type", ("yarn",))
    share = rope.number("partial_rotary_factor", turned / (turned + plain))
    if round(share * (turned + plain)) != turned:
        raise ConfigError(
            f"{rope.origin}: partial_rotary_factor = {share}, expected qk_rope_head_dim = {turned} of {turned + plain}"
        )
    # Of the part of a head that is turned, which is what the attention takes for a head, it is all.
    config = config.changed({"rope_parameters": {**rope.values, "partial_rotary_factor": None}, "rope_scaling": None})
    groups = ExpertGroups(config.integer("n_group"), config.integer("topk_group"), best=2)
    renormalize, interleaved = config.flag("norm_topk_prob", True), config.flag("rope_interleave", True)
    return read_latent(with_names_of_others(config), "mistral4", groups, renormalize, interleaved)


EXPERTS = (*TENSORS, *STACKED_EXPERTS)
NAMINGS = tuple(Naming(substitutions=(*EXPERTS, *of_all.substitutions)) for of_all in MULTIMODAL)

MISTRAL4 = Architecture(
    name="mistral4",
    title="Mistral 4",
    hf_names=("Mistral4ForCausalLM",),
    model=Llama,
    read=read,
    hf=NAMINGS,
)
