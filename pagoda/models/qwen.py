"""Qwen2 and Qwen2.5: a Llama with biases on q, k and v; some checkpoints put a window on their upper layers.

Qwen3: q and k are normed per head before the rotary embedding. Qwen3-MoE, Qwen2-MoE: with experts in place of the MLP,
in all layers or in some; the latter has a shared expert as well, which a sigmoid gates.
"""

from dataclasses import replace

from pagoda.models.architecture import Architecture
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import (
    FULL,
    SLIDING,
    DecoderConfig,
    QKNorm,
    read_decoder,
    read_experts,
    read_layer_types,
    windows_by_layer_types,
)
from pagoda.models.llama import Llama


def read_qwen2(config: ConfigReader) -> DecoderConfig:
    return replace(read_decoder(config, "qwen2", _layer_windows(config)), qkv_bias=True)


def _layer_windows(config: ConfigReader) -> tuple[int, ...]:
    """With `use_sliding_window`, those from layer `max_window_layers` on, unless `layer_types` lists them."""
    num_layers = config.num_layers()
    if not config.flag("use_sliding_window", False) or not config.has("sliding_window"):
        return windows_by_layer_types(config, read_layer_types(config, full_every=1), 0)
    first = config.number("max_window_layers", 28)
    by_index = tuple(SLIDING if layer >= first else FULL for layer in range(num_layers))
    return windows_by_layer_types(config, config.texts("layer_types") or by_index, config.integer("sliding_window"))


QWEN2 = Architecture(
    name="qwen2", title="Qwen2", hf_names=("Qwen2ForCausalLM",), model=Llama, read=read_qwen2, gguf_names=("qwen2",)
)


def _read_qwen3(config: ConfigReader, architecture: str = "qwen3") -> DecoderConfig:
    attention_bias = config.flag("attention_bias", False)
    return replace(
        read_decoder(config, architecture, _layer_windows(config)),
        qkv_bias=attention_bias,
        attention_out_bias=config.flag("attention_out_bias", attention_bias),
        qk_norm=QKNorm.HEAD,
    )


QWEN3 = Architecture(
    name="qwen3", title="Qwen3", hf_names=("Qwen3ForCausalLM",), model=Llama, read=_read_qwen3, gguf_names=("qwen3",)
)


def _read_qwen3_moe(config: ConfigReader) -> DecoderConfig:
    return _with_experts(config, _read_qwen3(config, "qwen3_moe"))


def _with_experts(config: ConfigReader, decoder: DecoderConfig) -> DecoderConfig:
    experts = read_experts(config, "moe_intermediate_size", config.flag("norm_topk_prob", False))
    return replace(decoder, experts=experts, dense_layers=read_dense_layers(config))


def read_dense_layers(config: ConfigReader) -> frozenset[int]:
    """Return the indices of the layers with an MLP in place of experts."""
    step, listed = config.integer("decoder_sparse_step", 1), set(config.ids("mlp_only_layers"))
    return frozenset(at for at in range(config.num_layers()) if at in listed or (at + 1) % step)


def _read_qwen2_moe(config: ConfigReader) -> DecoderConfig:
    config.refuse("use_sliding_window")
    decoder = _with_experts(config, read_decoder(config, "qwen2_moe", _layer_windows(config)))
    shared = replace(decoder.experts, shared_size=config.integer("shared_expert_intermediate_size"), shared_gate=True)
    return replace(decoder, qkv_bias=config.flag("qkv_bias", True), experts=shared)


def _gguf_settings(config: ConfigReader) -> dict[str, object]:
    """Set what llama.cpp's files need not say: it renormalises Qwen3's experts."""
    return {"norm_topk_prob": config.flag("norm_topk_prob", True)}


QWEN2_MOE = Architecture(
    name="qwen2_moe", title="Qwen2-MoE", hf_names=("Qwen2MoeForCausalLM",), model=Llama, read=_read_qwen2_moe
)

QWEN3_MOE = Architecture(
    name="qwen3_moe",
    title="Qwen3-MoE",
    hf_names=("Qwen3MoeForCausalLM",),
    model=Llama,
    read=_read_qwen3_moe,
    gguf_names=("qwen3moe",),
    experts=True,
    gguf_settings=_gguf_settings,
)
