"""Arcee's AFM: a Llama whose MLP has no gate, and the square of a ReLU."""

from dataclasses import replace

from pagoda.models.architecture import Architecture
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import DecoderConfig, read_decoder
from pagoda.models.llama import Llama
from pagoda.models.naming import gguf_naming


def read(config: ConfigReader) -> DecoderConfig:
    decoder = read_decoder(
        config.with_defaults({"rms_norm_eps": 1e-5}), "arcee", plain_mlp=True, default_activation="relu2"
    )
    bias = config.flag("attention_bias", False)
    return replace(decoder, qkv_bias=bias, attention_out_bias=bias, mlp_bias=config.flag("mlp_bias", False))


ARCEE = Architecture(
    name="arcee",
    title="Arcee AFM",
    hf_names=("ArceeForCausalLM",),
    model=Llama,
    read=read,
    gguf_names=("arcee",),
    gguf=gguf_naming(interleaved_rotary=True),
)
