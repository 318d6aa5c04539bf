"""Qwen3-MoE: a Qwen3 with experts in place of the MLP, in all layers or in some."""

from collections.abc import Mapping
from dataclasses import replace

from pagoda.layers.moe import MoE
from pagoda.layers.rotary import Rotary
from pagoda.models import qwen3
from pagoda.models.architecture import Architecture
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import DecoderConfig, read_experts
from pagoda.models.llama import Llama


class Qwen3MoELayer(qwen3.Qwen3Layer):
    def __init__(self, config: DecoderConfig, index: int, rotary: Rotary) -> None:
        super().__init__(config, index, rotary)
        if index not in config.dense_layers:
            self.mlp = MoE(config.spec.hidden_size, config.experts)


class Qwen3MoE(Llama):
    layer = Qwen3MoELayer


def read(config: ConfigReader) -> DecoderConfig:
    renormalize = config.flag("norm_topk_prob", False)
    step, listed = config.integer("decoder_sparse_step", 1), set(config.ids("mlp_only_layers"))
    dense = frozenset(at for at in range(config.num_layers()) if at in listed or (at + 1) % step)
    experts = read_experts(config, "moe_intermediate_size", renormalize)
    return replace(qwen3.read(config, "qwen3_moe"), experts=experts, dense_layers=dense)


def _gguf_settings(values: Mapping[str, object]) -> dict[str, object]:
    """Set what llama.cpp does not store: it always renormalises Qwen3's experts."""
    return {"norm_topk_prob": True}


QWEN3_MOE = Architecture(
    name="qwen3_moe",
    hf_names=("Qwen3MoeForCausalLM",),
    model=Qwen3MoE,
    read=read,
    gguf_name="qwen3moe",
    experts=True,
    gguf_settings=_gguf_settings,
)
