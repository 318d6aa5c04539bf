"""Seed-OSS: a Llama with biases on q, k and v, and heads whose size does not follow from the hidden size."""

from pagoda.models import llama
from pagoda.models.architecture import Architecture
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import DecoderConfig
from pagoda.models.naming import gguf_naming

_DEFAULTS: dict[str, object] = {"head_dim": 128, "attention_bias": True, "attention_out_bias": False}


def read(config: ConfigReader) -> DecoderConfig:
    return llama.read(config.changed({**_DEFAULTS, **config.values}), "seed_oss")


SEED_OSS = Architecture(
    name="seed_oss",
    title="Seed-OSS",
    hf_names=("SeedOssForCausalLM",),
    model=llama.Llama,
    read=read,
    gguf_names=("seed_oss",),
    gguf=gguf_naming({"post_attention_layernorm": "post_attention_norm"}),
)
