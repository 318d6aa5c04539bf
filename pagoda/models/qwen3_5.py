"""Qwen3.5, text: the layers of Qwen3-Next with an MLP, or in Qwen3.5-MoE with experts.

A text has one position per token, so that the runs of pairs that images turn by others (`mrope_section`) are turned as
one rotary embedding turns them.
"""

from dataclasses import replace

from pagoda.models.architecture import Architecture
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import read_text_settings
from pagoda.models.llama import Llama
from pagoda.models.naming import MULTIMODAL, Naming
from pagoda.models.qwen3_next import LAYER_NAMES, DeltaConfig, read_delta, read_shared_experts

_NAMES = (*("in_proj_qkv",) * 3, "in_proj_z", "in_proj_b", "in_proj_a")


def read(config: ConfigReader) -> DeltaConfig:
    return read_delta(read_text_settings(config, "qwen3_5_text"), "qwen3_5", _NAMES)


def read_moe(config: ConfigReader) -> DeltaConfig:
    text = read_text_settings(config, "qwen3_5_moe_text")
    text = text.with_defaults({"intermediate_size": text.integer("shared_expert_intermediate_size", 512)})
    return replace(read_delta(text, "qwen3_5_moe", _NAMES), experts=read_shared_experts(text, renormalize=True))


_STACKED = (
    (r"\.mlp\.experts\.(\d+)\.(?:gate|up)_proj\.weight$", r".mlp.experts.gate_up_proj[\1]"),
    (r"\.mlp\.experts\.(\d+)\.down_proj\.weight$", r".mlp.experts.down_proj[\1]"),
)
_HF = tuple(Naming(substitutions=(*LAYER_NAMES, *naming.substitutions)) for naming in MULTIMODAL)

QWEN3_5 = Architecture(
    name="qwen3_5",
    title="Qwen3.5",
    hf_names=("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    model=Llama,
    read=read,
    hf=_HF,
)
QWEN3_5_MOE = Architecture(
    name="qwen3_5_moe",
    title="Qwen3.5-MoE",
    hf_names=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    model=Llama,
    read=read_moe,
    hf=(*_HF, *(Naming(substitutions=(*_STACKED, *naming.substitutions)) for naming in _HF)),
    experts=True,
)
