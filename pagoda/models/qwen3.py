"""Qwen3: a Llama with q and k normed per head before the rotary embedding."""

from dataclasses import replace

from pagoda.layers.norm import RMSNorm
from pagoda.layers.rotary import Rotary
from pagoda.models.architecture import Architecture
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import DecoderConfig, read_decoder
from pagoda.models.llama import Llama, LlamaLayer
from pagoda.models.qwen2 import layer_windows


class Qwen3Layer(LlamaLayer):
    def __init__(self, config: DecoderConfig, index: int, rotary: Rotary) -> None:
        super().__init__(config, index, rotary)
        self.self_attn.q_norm = RMSNorm(config.spec.head_dim, config.rms_norm_eps)
        self.self_attn.k_norm = RMSNorm(config.spec.head_dim, config.rms_norm_eps)


class Qwen3(Llama):
    layer = Qwen3Layer


def read(config: ConfigReader, architecture: str = "qwen3") -> DecoderConfig:
    attention_bias = config.flag("attention_bias", False)
    return replace(
        read_decoder(config, architecture, layer_windows(config)),
        qkv_bias=attention_bias,
        attention_out_bias=config.flag("attention_out_bias", attention_bias),
    )


QWEN3 = Architecture(name="qwen3", hf_names=("Qwen3ForCausalLM",), model=Qwen3, read=read, gguf_name="qwen3")
