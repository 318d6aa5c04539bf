"""Phi-1 and Phi-2: attention and MLP in parallel after one LayerNorm, heads turned in part, an MLP without a gate,
biases everywhere. Phi-3 and Phi-4: a Llama whose checkpoints have q, k and v in one matrix, gate and up in one.
"""

from dataclasses import replace

from pagoda.models.architecture import Architecture
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import DecoderConfig, read_decoder
from pagoda.models.decoder_layers import SharedNormLayer
from pagoda.models.llama import Llama
from pagoda.models.naming import BARE, Naming, gguf_naming


def _read_phi(config: ConfigReader) -> DecoderConfig:
    config.refuse("qk_layernorm")
    config.refuse("tie_word_embeddings")
    decoder = read_decoder(
        config,
        "phi",
        rotated=0.5,
        layer_norm_eps="layer_norm_eps",
        plain_mlp=True,
        default_activation="gelu_new",
    )
    return replace(decoder, layer=SharedNormLayer, qkv_bias=True, attention_out_bias=True, mlp_bias=True)


class Phi(Llama):
    has_head_bias = True


_TENSORS = (
    (r"^model\.norm\.", "model.final_layernorm."),
    (r"\.self_attn\.o_proj\.", ".self_attn.dense."),
    (r"\.mlp\.up_proj\.", ".mlp.fc1."),
    (r"\.mlp\.down_proj\.", ".mlp.fc2."),
)

PHI = Architecture(
    name="phi",
    title="Phi-2",
    hf_names=("PhiForCausalLM",),
    model=Phi,
    read=_read_phi,
    hf=(Naming(substitutions=_TENSORS), Naming(substitutions=_TENSORS + BARE.substitutions)),
    gguf_names=("phi2",),
    gguf=gguf_naming(),
)


def _read_phi3(config: ConfigReader) -> DecoderConfig:
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        config.refuse(key)
    window = config.integer("sliding_window") if config.has("sliding_window") else 0
    decoder = read_decoder(config, "phi3", windows=(window,) * config.num_layers(), rotated=1.0)
    return replace(decoder, fused_qkv=True, fused_gate_up=True)


PHI3 = Architecture(
    name="phi3",
    title="Phi-4",
    hf_names=("Phi3ForCausalLM",),
    model=Llama,
    read=_read_phi3,
    gguf_names=("phi3",),
    gguf=gguf_naming({"mlp.gate_up_proj": "ffn_up"}),
)
