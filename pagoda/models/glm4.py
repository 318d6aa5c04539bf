"""GLM-4 (0414): norms before and after attention and MLP; half of each head is turned, in pairs of neighbours.

GLM-4.5 and later, with experts: a Llama half of whose heads is turned, with the experts of DeepSeek-V3.
"""

from dataclasses import replace

from pagoda.layers.mlp import ExpertGroups
from pagoda.models.architecture import Architecture
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import DecoderConfig, QKNorm, num_layers_without_drafters, read_decoder
from pagoda.models.decoder_layers import SandwichLayer
from pagoda.models.deepseek import NAMINGS, read_experts_in_groups
from pagoda.models.llama import Llama
from pagoda.models.naming import Naming, gguf_naming


def read(config: ConfigReader) -> DecoderConfig:
    config = config.with_defaults({"rms_norm_eps": 1.5625e-7, "eos_token_id": [151329, 151336, 151338]})
    decoder = read_decoder(config, "glm4", rotated=0.5, interleaved=True)
    return replace(decoder, qkv_bias=config.flag("attention_bias", True), fused_gate_up=True, layer=SandwichLayer)


def _read_moe(config: ConfigReader) -> DecoderConfig:
    config = config.with_defaults({"rms_norm_eps": 1e-5, "n_group": 1, "topk_group": 1, "n_shared_experts": 1})
    config = config.changed({"num_local_experts": config.get("n_routed_experts")})
    config.choice("scoring_func", ("sigmoid",), "sigmoid")
    decoder = read_decoder(config, "glm4_moe", rotated=0.5)
    groups = ExpertGroups(config.integer("n_group"), config.integer("topk_group"), best=2, sigmoid=True, has_bias=True)
    num_dense = config.not_negative("first_k_dense_replace", 1)
    return replace(
        decoder,
        qkv_bias=config.flag("attention_bias", False),
        qk_norm=QKNorm.HEAD if config.flag("use_qk_norm", False) else QKNorm.NONE,
        experts=read_experts_in_groups(config, groups, config.flag("norm_topk_prob", True)),
        dense_layers=frozenset(at for at in range(decoder.spec.num_layers) if at < num_dense),
    )


_TENSORS = (
    (r"\.post_attention_layernorm\.", ".post_self_attn_layernorm."),
    (r"\.pre_feedforward_layernorm\.", ".post_attention_layernorm."),
    (r"\.post_feedforward_layernorm\.", ".post_mlp_layernorm."),
)

GLM4 = Architecture(
    name="glm4",
    title="GLM-4",
    hf_names=("Glm4ForCausalLM",),
    model=Llama,
    read=read,
    hf=(Naming(substitutions=_TENSORS), Naming(substitutions=(*_TENSORS, (r"^model\.", "")))),
    gguf_names=("glm4",),
    gguf=gguf_naming(
        {
            "mlp.gate_up_proj": "ffn_up",
            "post_attention_layernorm": "post_attention_norm",
            "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
        }
    ),
)


def _gguf_settings(config: ConfigReader) -> dict[str, object]:
    """Leave out the layers of the draft heads, which llama.cpp counts."""
    names = {"n_routed_experts": "num_experts", "use_qk_norm": "qk_norm"}
    left = num_layers_without_drafters(config)
    return {"num_hidden_layers": left, **{ours: config.get(theirs) for ours, theirs in names.items()}}


GLM4_MOE = Architecture(
    name="glm4_moe",
    title="GLM-4.5",
    hf_names=("Glm4MoeForCausalLM",),
    model=Llama,
    read=_read_moe,
    hf=NAMINGS,
    gguf_names=("glm4moe",),
    experts=True,
    gguf=gguf_naming({"post_attention_layernorm": "post_attention_norm"}),
    gguf_settings=_gguf_settings,
)
