"""OLMo 2: norms after attention and MLP instead of before, and q and k normed over all heads at once."""

from dataclasses import replace

from pagoda.models import llama
from pagoda.models.architecture import Architecture
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import DecoderConfig, QKNorm
from pagoda.models.decoder_layers import PostNormLayer
from pagoda.models.naming import POST_NORM_GGUF


def read(config: ConfigReader) -> DecoderConfig:
    for key in ("clip_qkv", "sliding_window", "layer_types"):
        config.refuse(key)
    decoder = llama.read(config.with_defaults({"rms_norm_eps": 1e-5}), "olmo2")
    return replace(decoder, layer=PostNormLayer, qk_norm=QKNorm.ALL_HEADS)


OLMO2 = Architecture(
    name="olmo2",
    hf_names=("Olmo2ForCausalLM",),
    model=llama.Llama,
    read=read,
    gguf_name="olmo2",
    gguf=POST_NORM_GGUF,
)
