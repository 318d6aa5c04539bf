"""Granite 3: a Llama with four multipliers: of embeddings, scores, what joins the residual stream, and logits.

GraniteMoE: with experts in place of every MLP.
"""

from dataclasses import replace

from pagoda.base.errors import ConfigError
from pagoda.models import llama
from pagoda.models.architecture import Architecture
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import DecoderConfig, read_experts
from pagoda.models.naming import Naming, gguf_naming


def read(config: ConfigReader, architecture: str = "granite") -> DecoderConfig:
    decoder = llama.read(config, architecture)
    # The residual stream is held divided by its multiplier, so that what joins it needs none: norms of it are the same,
    # with an epsilon divided by the multiplier's square.
    residual = config.positive("residual_multiplier", 1.0)
    return replace(
        decoder,
        norm_eps=decoder.norm_eps / residual**2,
        input_scale=config.positive("embedding_multiplier", 1.0) / residual,
        attention_scale=config.positive("attention_multiplier", 1.0),
        logit_scale=1.0 / config.positive("logits_scaling", 1.0),
    )


def _read_moe(config: ConfigReader) -> DecoderConfig:
    return replace(read(config, "granitemoe"), experts=read_experts(config, "intermediate_size", renormalize=True))


def gguf_multipliers(config: ConfigReader) -> dict[str, object]:
    """Return the multipliers that llama.cpp's files have under other names, or need not have."""
    scores = config.get("attention_multiplier") or config.integer("head_dim") ** -0.5
    return {"logits_scaling": config.get("logit_scale"), "attention_multiplier": scores}


def _gguf_settings(config: ConfigReader) -> dict[str, object]:
    if not config.flag("rope_finetuned", True):  # llama.cpp then leaves out the rotary embedding
        raise ConfigError(
            f"{config.origin}: rope.scaling.finetuned = false is not supported with Granite; expected true"
        )
    return gguf_multipliers(config)


GRANITE = Architecture(
    name="granite",
    title="Granite 3",
    hf_names=("GraniteForCausalLM",),
    model=llama.Llama,
    read=read,
    gguf_names=("granite",),
    gguf=gguf_naming(interleaved_rotary=True),
    gguf_settings=_gguf_settings,
)

GRANITEMOE = Architecture(
    name="granitemoe",
    title="Granite 3 MoE",
    hf_names=("GraniteMoeForCausalLM",),
    model=llama.Llama,
    read=_read_moe,
    hf=(
        Naming(
            substitutions=(
                (r"\.mlp\.gate\.", ".block_sparse_moe.router.layer."),
                (r"\.mlp\.experts\.(\d+)\.(gate|up)_proj\.", r".block_sparse_moe.input_linear[\1]."),
                (r"\.mlp\.experts\.(\d+)\.down_proj\.", r".block_sparse_moe.output_linear[\1]."),
            )
        ),
    ),
    gguf_names=("granitemoe",),
    experts=True,
    gguf=gguf_naming(interleaved_rotary=True),
    gguf_settings=_gguf_settings,
)
