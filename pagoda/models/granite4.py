"""Granite 4: Granite's multipliers, Mamba-2 in place of most attentions, an MLP or experts with one that all share."""

from dataclasses import replace

from pagoda.models import granite
from pagoda.models.architecture import Architecture
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import FULL, read_experts
from pagoda.models.llama import Llama
from pagoda.models.mamba2 import (
    HYBRID_SHAPE,
    HybridLayer,
    Mamba2Config,
    gguf_expansion,
    gguf_mixer_names,
    gguf_shape,
    mixer_names,
    read_mamba_shape,
)
from pagoda.models.naming import Naming, gguf_naming

_KINDS = {"mamba": True, "linear_attention": True, "attention": False, FULL: False}
"""Spellings of a layer's type, and whether it is recurrent."""


def read(config: ConfigReader) -> Mamba2Config:
    config = config.with_defaults({"tie_word_embeddings": False})
    shared_size = config.integer("shared_intermediate_size", 1024)
    decoder = granite.read(config.changed({"intermediate_size": shared_size}), "granitemoehybrid")
    num_layers, norm_eps = decoder.spec.num_layers, config.not_negative("rms_norm_eps", 1e-6)
    if config.number("num_local_experts", 8):
        experts = read_experts(config, "intermediate_size", renormalize=True)
        decoder = replace(decoder, experts=replace(experts, shared_size=shared_size))
    if not config.has("position_embedding_type") or config.get("position_embedding_type") != "rope":
        config.choice("position_embedding_type", ("nope",), "nope")
        decoder = replace(decoder, unrotated_layers=frozenset(range(num_layers)))
    key = "layer_types" if config.has("layer_types") else "layers_block_type"
    types = config.texts(key) or ("mamba",) * num_layers
    if len(types) != num_layers or not _KINDS.keys() >= set(types):
        raise config.wrong(key, f"{num_layers} times one of {', '.join(_KINDS)}")
    mamba_layers = [index for index, kind in enumerate(types) if _KINDS[kind]]
    mamba = read_mamba_shape(config, decoder.spec.hidden_size)
    fused = config.flag("fused_gate_up", True)  # GGUF files have two matrices
    decoder = replace(decoder, layer=HybridLayer, fused_gate_up=fused)
    return Mamba2Config.of(decoder, mamba, norm_eps, mamba_layers)


def _gguf_settings(config: ConfigReader) -> dict[str, object]:
    """Set what llama.cpp's files say in another way."""
    num_experts, sizes = config.get("num_experts"), ("intermediate_size", "expert_shared_feed_forward_length")
    rotates = config.flag("rope_finetuned", True)
    return {
        **gguf_shape(config, *HYBRID_SHAPE),
        **granite.gguf_multipliers(config),
        "mamba_expand": gguf_expansion(config),
        "num_local_experts": num_experts or 0,
        "shared_intermediate_size": config.get(sizes[bool(num_experts)]),
        "fused_gate_up": False,
        "position_embedding_type": "rope" if rotates else "nope",
        "partial_rotary_factor": config.get("partial_rotary_factor") if rotates else None,
        "layer_types": config.get("layer_types") or [FULL] * config.num_layers(),
    }


GRANITE4 = Architecture(
    name="granitemoehybrid",
    title="Granite 4",
    hf_names=("GraniteMoeHybridForCausalLM",),
    model=Llama,
    read=read,
    hf=(
        Naming(
            substitutions=(
                *mixer_names("mamba"),
                (r"\.mlp\.gate\.", ".block_sparse_moe.router.layer."),
                (r"\.mlp\.experts\.(\d+)\.(gate|up)_proj\.", r".block_sparse_moe.input_linear[\1]."),
                (r"\.mlp\.experts\.(\d+)\.down_proj\.", r".block_sparse_moe.output_linear[\1]."),
                (r"\.mlp\.(?:shared_expert\.)?(?:gate|up|gate_up)_proj\.", ".shared_mlp.input_linear."),
                (r"\.mlp\.(?:shared_expert\.)?down_proj\.", ".shared_mlp.output_linear."),
            )
        ),
    ),
    gguf_names=("granitehybrid",),
    experts=None,
    gguf=gguf_naming(gguf_mixer_names(), interleaved_rotary=True),
    gguf_settings=_gguf_settings,
)
