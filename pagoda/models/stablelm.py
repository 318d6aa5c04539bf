"""StableLM 2 and 3B: a Llama with LayerNorms and heads turned in part; in some, attention and MLP are parallel."""

from dataclasses import replace

from pagoda.models.architecture import Architecture
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import DecoderConfig, read_decoder
from pagoda.models.decoder_layers import SharedNormLayer
from pagoda.models.llama import Llama


def read(config: ConfigReader) -> DecoderConfig:
    config.refuse("qk_layernorm")
    return replace(
        read_decoder(config, "stablelm", rotated=0.25, layer_norm_eps="layer_norm_eps"),
        qkv_bias=config.flag("use_qkv_bias", False),
        layer=SharedNormLayer if config.flag("use_parallel_residual", False) else None,
    )


def _gguf_settings(config: ConfigReader) -> dict[str, object]:
    # Files may claim to be parallel and have two norms.
    return {"use_qkv_bias": config.get("attention_bias"), "use_parallel_residual": config.get("one_norm")}


STABLELM = Architecture(
    name="stablelm",
    title="StableLM",
    hf_names=("StableLmForCausalLM",),
    model=Llama,
    read=read,
    gguf_names=("stablelm",),
    gguf_settings=_gguf_settings,
)
