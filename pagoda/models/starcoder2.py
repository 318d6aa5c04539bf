"""StarCoder 2: a Llama with LayerNorms, biases, and an MLP without a gate."""

from dataclasses import replace

from pagoda.models.architecture import Architecture
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import DecoderConfig, read_decoder
from pagoda.models.llama import Llama
from pagoda.models.naming import BARE, Naming, gguf_naming


def read(config: ConfigReader) -> DecoderConfig:
    window = config.integer("sliding_window") if config.has("sliding_window") else 0
    bias = config.flag("use_bias", True)
    decoder = read_decoder(
        config,
        "starcoder2",
        windows=(window,) * config.num_layers(),
        tie_embeddings=True,
        layer_norm_eps="norm_epsilon",
        plain_mlp=True,
        default_activation="gelu_pytorch_tanh",
    )
    return replace(decoder, qkv_bias=bias, attention_out_bias=bias, mlp_bias=bias)


def _gguf_settings(config: ConfigReader) -> dict[str, object]:
    return {"use_bias": config.get("attention_bias"), "norm_epsilon": config.get("layer_norm_eps")}


_TENSORS = ((r"\.mlp\.up_proj\.", ".mlp.c_fc."), (r"\.mlp\.down_proj\.", ".mlp.c_proj."))

STARCODER2 = Architecture(
    name="starcoder2",
    title="StarCoder 2",
    hf_names=("Starcoder2ForCausalLM",),
    model=Llama,
    read=read,
    hf=(Naming(substitutions=_TENSORS), Naming(substitutions=BARE.substitutions + _TENSORS)),
    gguf_names=("starcoder2",),
    gguf=gguf_naming(),
    gguf_settings=_gguf_settings,
)
