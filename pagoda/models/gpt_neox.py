"""GPT-NeoX and Pythia: attention and MLP in parallel, each after a LayerNorm of its own; heads turned in part; q, k and
v in one matrix, head by head; an MLP without a gate.
"""

from dataclasses import replace

from pagoda.layers.parameter import Part
from pagoda.models.architecture import Architecture
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import DecoderConfig, read_decoder
from pagoda.models.decoder_layers import DecoderAttention, LlamaLayer, ParallelLayer
from pagoda.models.llama import Llama
from pagoda.models.naming import Naming, gguf_naming


class ByHeadAttention(DecoderAttention):
    """The checkpoint stores the first head of q, of k and of v, then the second of each, and so on."""

    def stored_parts(self, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        return tuple(replace(part, alternates=True) for part in parts)


class GPTNeoXLayer(LlamaLayer):
    attention = ByHeadAttention


class ParallelGPTNeoXLayer(GPTNeoXLayer, ParallelLayer):
    pass


def read(config: ConfigReader) -> DecoderConfig:
    theta = config.number("rotary_emb_base", 10_000.0)
    attention_bias = config.flag("attention_bias", True)
    decoder = read_decoder(
        config,
        "gpt_neox",
        default_theta=theta,
        rotated=config.positive("rotary_pct", 0.25),
        layer_norm_eps="layer_norm_eps",
        plain_mlp=True,
        default_activation="gelu",
    )
    return replace(
        decoder,
        layer=ParallelGPTNeoXLayer if config.flag("use_parallel_residual", True) else GPTNeoXLayer,
        fused_qkv=True,
        qkv_bias=attention_bias,
        attention_out_bias=attention_bias,
        mlp_bias=True,
    )


_TENSORS = (
    (r"^model\.embed_tokens\.", "gpt_neox.embed_in."),
    (r"^model\.norm\.", "gpt_neox.final_layer_norm."),
    (r"^model\.", "gpt_neox."),
    (r"^lm_head\.", "embed_out."),
    (r"\.self_attn\.qkv_proj\.", ".attention.query_key_value."),
    (r"\.self_attn\.o_proj\.", ".attention.dense."),
    (r"\.mlp\.up_proj\.", ".mlp.dense_h_to_4h."),
    (r"\.mlp\.down_proj\.", ".mlp.dense_4h_to_h."),
)

GPT_NEOX = Architecture(
    name="gpt_neox",
    title="GPT-NeoX",
    hf_names=("GPTNeoXForCausalLM",),
    model=Llama,
    read=read,
    hf=(Naming(substitutions=_TENSORS), Naming(substitutions=(*_TENSORS, (r"^gpt_neox\.", "")))),
    gguf_names=("gptneox",),
    gguf=gguf_naming(),
)
