"""Bamba: a Llama with Mamba-2 in place of most attentions; those that are left turn half of each head."""

from dataclasses import replace

from pagoda.models.architecture import Architecture
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import DecoderConfig, read_decoder
from pagoda.models.llama import Llama
from pagoda.models.mamba2 import HybridLayer, Mamba2Config, mixer_names, read_mamba_shape
from pagoda.models.naming import Naming


def read(config: ConfigReader) -> Mamba2Config:
    with_bias = config.flag("attention_bias", False)
    config = config.changed({"partial_rotary_factor": None})  # in transformers, too, it is not read
    decoder: DecoderConfig = replace(
        read_decoder(config.with_defaults({"rms_norm_eps": 1e-5}), "bamba", rotated=0.5),
        qkv_bias=with_bias,
        attention_out_bias=with_bias,
        mlp_bias=config.flag("mlp_bias", False),
        layer=HybridLayer,
    )
    attends = config.ids("attn_layer_indices") if config.has("attn_layer_indices") else ()
    mamba_layers = [index for index in range(decoder.spec.num_layers) if index not in attends]
    mamba = read_mamba_shape(config, decoder.spec.hidden_size)
    return Mamba2Config.of(decoder, mamba, decoder.norm_eps, mamba_layers)


BAMBA = Architecture(
    name="bamba",
    title="Bamba",
    hf_names=("BambaForCausalLM",),
    model=Llama,
    read=read,
    hf=(
        Naming(
            substitutions=(
                *mixer_names("mamba"),
                (r"^model\.norm\.", "model.final_layernorm."),
                (r"\.post_attention_layernorm\.", ".pre_ff_layernorm."),
                (r"\.mlp\.", ".feed_forward."),
            )
        ),
    ),
)
