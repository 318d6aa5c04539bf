"""OLMoE: a Llama with experts in place of every MLP, and q and k normed over all heads at once."""

from dataclasses import replace

from pagoda.models.architecture import Architecture
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import DecoderConfig, QKNorm, read_decoder, read_experts
from pagoda.models.llama import Llama


def read(config: ConfigReader) -> DecoderConfig:
    config.refuse("clip_qkv")
    config.refuse("attention_bias")
    renormalize = config.flag("norm_topk_prob", False)
    experts = read_experts(config, "intermediate_size", renormalize)
    return replace(read_decoder(config, "olmoe"), qk_norm=QKNorm.ALL_HEADS, experts=experts)


OLMOE = Architecture(
    name="olmoe",
    title="OLMoE",
    hf_names=("OlmoeForCausalLM",),
    model=Llama,
    read=read,
    gguf_names=("olmoe",),
    experts=True,
)
