"""OLMoE: a Llama with experts in place of every MLP, and q and k normed over all heads at once."""

from dataclasses import replace

from pagoda.layers.mlp import MoE
from pagoda.layers.norm import RMSNorm
from pagoda.layers.rotary import Rotary
from pagoda.models.architecture import Architecture
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import DecoderConfig, read_decoder, read_experts
from pagoda.models.llama import Llama, LlamaLayer, attention_of


class OLMoELayer(LlamaLayer):
    def __init__(self, config: DecoderConfig, index: int, rotary: Rotary) -> None:
        super().__init__(config, index, rotary)
        heads, eps = config.heads, config.norm_eps
        self.self_attn = attention_of(config, index, rotary, norms_all_heads=True)
        self.self_attn.q_norm = RMSNorm(heads.num_heads * heads.dim, eps)
        self.self_attn.k_norm = RMSNorm(heads.num_kv_heads * heads.dim, eps)
        self.mlp = MoE(config.spec.hidden_size, config.experts)


class OLMoE(Llama):
    layer = OLMoELayer


def read(config: ConfigReader) -> DecoderConfig:
    config.refuse("clip_qkv")
    config.refuse("attention_bias")
    renormalize = config.flag("norm_topk_prob", False)
    experts = read_experts(config, "intermediate_size", renormalize)
    return replace(read_decoder(config, "olmoe"), experts=experts)


OLMOE = Architecture(
    name="olmoe", hf_names=("OlmoeForCausalLM",), model=OLMoE, read=read, gguf_name="olmoe", experts=True
)
