"""Qwen3.5: the layers of Qwen3-Next with an MLP, or in Qwen3.5-MoE with experts; and the tower of Qwen3-VL, without its
DeepStack. `Qwen3_5ForCausalLM` in place of a checkpoint's architecture serves its text model alone.
"""

from dataclasses import replace

from pagoda.models.architecture import Architecture
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import DecoderConfig, read_text_settings
from pagoda.models.naming import MULTIMODAL, STACKED_EXPERTS, Naming
from pagoda.models.qwen3_next import GGUF, LAYER_NAMES, gguf_settings, read_delta, read_shared_experts
from pagoda.models.qwen3_vl import Qwen3VLConfig, make_model, with_tower

_NAMES = (*("in_proj_qkv",) * 3, "in_proj_z", "in_proj_b", "in_proj_a")


def read(config: ConfigReader) -> DecoderConfig | Qwen3VLConfig:
    text = read_text_settings(config, "qwen3_5_text")
    return with_tower(config, text, read_delta(text, "qwen3_5", _NAMES), (11, 11, 10))


def read_moe(config: ConfigReader) -> DecoderConfig | Qwen3VLConfig:
    text = read_text_settings(config, "qwen3_5_moe_text")
    text = text.with_defaults({"intermediate_size": text.integer("shared_expert_intermediate_size", 512)})
    decoder = replace(read_delta(text, "qwen3_5_moe", _NAMES), experts=read_shared_experts(text, renormalize=True))
    return with_tower(config, text, decoder, (11, 11, 10))


_VISUAL = (r"^visual\.", "model.visual.")
_HF = tuple(Naming(substitutions=(*LAYER_NAMES, *naming.substitutions, _VISUAL)) for naming in MULTIMODAL)


def _gguf_settings(config: ConfigReader) -> dict[str, object]:
    """Set what llama.cpp's files say in another way. Heads of the delta rule are in another order in them.

    A text's positions are equal along the first three axes of `mrope_section`, and 0 along the fourth.
    """
    head_dim = config.integer("head_dim")
    num_pairs = round(head_dim * config.positive("partial_rotary_factor", 1.0)) // 2
    match config.get("mrope_section"):
        case None:
            pass
        case [int(), int(), int(), int()] as sections if all(
            place % sum(sections) < 3 * sections[place % sum(sections) % 3]
            for place in range(num_pairs)
            if sum(sections)
        ):
            pass
        case _:
            raise config.wrong("mrope_section", f"four numbers, of which the first three have all {num_pairs} pairs")
    return {**gguf_settings(config), "tiled_heads": True}


QWEN3_5 = Architecture(
    name="qwen3_5",
    title="Qwen3.5",
    hf_names=("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    model=make_model,
    read=read,
    hf=_HF,
    gguf_names=("qwen35",),
    gguf=GGUF,
    gguf_settings=_gguf_settings,
)
QWEN3_5_MOE = Architecture(
    name="qwen3_5_moe",
    title="Qwen3.5-MoE",
    hf_names=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    model=make_model,
    read=read_moe,
    hf=(*_HF, *(Naming(substitutions=(*STACKED_EXPERTS, *naming.substitutions)) for naming in _HF)),
    gguf_names=("qwen35moe",),
    experts=True,
    gguf=GGUF,
    gguf_settings=_gguf_settings,
)
