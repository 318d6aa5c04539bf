"""GLM-4 (0414): norms before and after attention and MLP; half of each head is turned, in pairs of neighbours."""

from dataclasses import replace

from pagoda.models.architecture import Architecture
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import DecoderConfig, read_decoder
from pagoda.models.decoder_layers import SandwichLayer
from pagoda.models.llama import Llama
from pagoda.models.naming import Naming, gguf_naming


def read(config: ConfigReader) -> DecoderConfig:
    config = config.with_defaults({"rms_norm_eps": 1.5625e-7, "eos_token_id": [151329, 151336, 151338]})
    decoder = read_decoder(config, "glm4", rotated=0.5, interleaved=True)
    return replace(decoder, qkv_bias=config.flag("attention_bias", True), fused_gate_up=True, layer=SandwichLayer)


_TENSORS = (
    (r"\.post_attention_layernorm\.", ".post_self_attn_layernorm."),
    (r"\.pre_feedforward_layernorm\.", ".post_attention_layernorm."),
    (r"\.post_feedforward_layernorm\.", ".post_mlp_layernorm."),
)

GLM4 = Architecture(
    name="glm4",
    hf_names=("Glm4ForCausalLM",),
    model=Llama,
    read=read,
    hf=(Naming(substitutions=_TENSORS), Naming(substitutions=(*_TENSORS, (r"^model\.", "")))),
    gguf_name="glm4",
    gguf=gguf_naming(
        {
            "mlp.gate_up_proj": "ffn_up",
            "post_attention_layernorm": "post_attention_norm",
            "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
        }
    ),
)
