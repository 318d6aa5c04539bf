"""Mixtral: a Mistral with experts in place of every MLP.

A GGUF names the architecture of a Mixtral "llama", with experts.
"""

from dataclasses import replace

from pagoda.layers.moe import MoE
from pagoda.layers.rotary import Rotary
from pagoda.models import mistral
from pagoda.models.architecture import Architecture
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import DecoderConfig, read_experts
from pagoda.models.llama import Llama, LlamaLayer
from pagoda.models.naming import Naming, gguf_naming


class MixtralLayer(LlamaLayer):
    def __init__(self, config: DecoderConfig, index: int, rotary: Rotary) -> None:
        super().__init__(config, index, rotary)
        self.mlp = MoE(config.spec.hidden_size, config.experts)


class Mixtral(Llama):
    layer = MixtralLayer


def read(config: ConfigReader) -> DecoderConfig:
    experts = read_experts(config, "intermediate_size", renormalize=True)
    return replace(mistral.read(config, "mixtral"), experts=experts)


MIXTRAL = Architecture(
    name="mixtral",
    hf_names=("MixtralForCausalLM",),
    model=Mixtral,
    read=read,
    hf=(
        Naming(
            substitutions=(
                (r"\.mlp\.", ".block_sparse_moe."),
                (r"\.gate_proj\.", ".w1."),
                (r"\.up_proj\.", ".w3."),
                (r"\.down_proj\.", ".w2."),
            )
        ),
    ),
    gguf_name="llama",
    experts=True,
    gguf=gguf_naming(interleaved_rotary=True),
)
