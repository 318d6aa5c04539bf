"""Mistral: a Llama with a sliding window in every layer, if the checkpoint sets one. Mixtral: with experts in place of
every MLP. Ministral 3: queries are scaled by their position. Its checkpoints, and those of Mistral Small 3.1 and of
Mistral 4, have a vision tower (pixtral.py). `Ministral3ForCausalLM` in place of a checkpoint's architecture serves its
text model alone.

A GGUF names the architecture of both "llama": a Mistral is loaded as a Llama, and a Mixtral is one with experts.
"""

from dataclasses import replace

from pagoda.models import mistral4, pixtral
from pagoda.models.architecture import Architecture
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import DecoderConfig, read_decoder, read_experts
from pagoda.models.llama import Llama
from pagoda.models.naming import Naming, gguf_naming


def read(config: ConfigReader, architecture: str = "mistral") -> DecoderConfig:
    config.refuse("layer_types")
    window = config.integer("sliding_window") if config.has("sliding_window") else 0
    return read_decoder(config, architecture, windows=(window,) * config.num_layers())


MISTRAL = Architecture(
    name="mistral", title="Mistral", hf_names=("MistralForCausalLM",), model=Llama, read=read, gguf_names=("llama",)
)


def _read_mixtral(config: ConfigReader) -> DecoderConfig:
    experts = read_experts(config, "intermediate_size", renormalize=True)
    return replace(read(config, "mixtral"), experts=experts)


MIXTRAL_TENSORS = (
    (r"\.mlp\.", ".block_sparse_moe."),
    (r"\.gate_proj\.", ".w1."),
    (r"\.up_proj\.", ".w3."),
    (r"\.down_proj\.", ".w2."),
)

MIXTRAL = Architecture(
    name="mixtral",
    title="Mixtral",
    hf_names=("MixtralForCausalLM",),
    model=Llama,
    read=_read_mixtral,
    hf=(Naming(substitutions=MIXTRAL_TENSORS),),
    gguf_names=("llama",),
    experts=True,
    gguf=gguf_naming(interleaved_rotary=True),
)


def _read_mistral3(config: ConfigReader) -> DecoderConfig | pixtral.WithPixtralConfig:
    text = config.text_settings()
    is_fourth = text.text("model_type", "") == "mistral4"
    return pixtral.with_tower(config, mistral4.read(text) if is_fourth else read(text, "mistral3"))


_VISION = (((r"^(model|lm_head)\.", r"language_model.\1."), ""), ((r"^model\.", "model.language_model."), "model."))
"""How checkpoints name the text model, and what stands before the names of the tower and of the projector."""


MISTRAL3 = Architecture(
    name="mistral3",
    title="Ministral 3",
    hf_names=("Ministral3ForCausalLM", pixtral.WITH_VISION),
    model=pixtral.make_model,
    read=_read_mistral3,
    hf=(
        *mistral4.NAMINGS,
        *(Naming(substitutions=(*mistral4.EXPERTS, text, (r"^vision\.", before))) for text, before in _VISION),
    ),
)
