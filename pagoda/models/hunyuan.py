"""Hunyuan, dense: a Llama whose queries and keys are normed per head after the rotary embedding, not before it."""

from dataclasses import replace

from pagoda.layers.norm import RMSNorm
from pagoda.layers.rotary import Rotary
from pagoda.models import llama
from pagoda.models.architecture import Architecture
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import DecoderConfig
from pagoda.models.decoder_layers import DecoderAttention, LlamaLayer
from pagoda.models.naming import gguf_naming
from pagoda.ops.batch import ForwardBatch, KVLayer
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import Tensor


class NormedAfterRotary(DecoderAttention):
    def __init__(self, config: DecoderConfig, index: int, rotary: Rotary) -> None:
        super().__init__(config, index, rotary)
        self.query_layernorm = RMSNorm(self.heads.dim, config.norm_eps)
        self.key_layernorm = RMSNorm(self.heads.dim, config.norm_eps)

    def write(self, ops: ForwardOps, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch, cache: KVLayer) -> Tensor:
        assert self.rotary is not None
        q, k = ops.rotary(q, k, batch.positions, self.rotary.cos, self.rotary.sin)
        ops.write_kv(self.key_layernorm(ops, k), v, cache, batch.metadata[self.place.group])
        return self.query_layernorm(ops, q)


class HunyuanLayer(LlamaLayer):
    attention = NormedAfterRotary


def read(config: ConfigReader) -> DecoderConfig:
    config.expect("use_qk_norm", True)
    config.refuse("use_cla")
    config.refuse("mlp_bias")
    decoder = llama.read(_with_stretched_base(config).with_defaults({"rms_norm_eps": 1e-5}), "hunyuan")
    return replace(decoder, layer=HunyuanLayer)


def _with_stretched_base(config: ConfigReader) -> ConfigReader:
    """Put the rotary base in place of `alpha`, which checkpoints call a dynamic scaling, and is one of the base."""
    rope = config.section("rope_parameters") or config.section("rope_scaling")
    if rope is None or not rope.has("alpha"):
        return config
    rope.choice("rope_type" if rope.has("rope_type") else "type", ("dynamic",))
    theta, alpha = rope.positive("rope_theta", config.number("rope_theta", 10_000.0)), rope.positive("alpha")
    dim = config.integer("head_dim", config.integer("hidden_size") // config.integer("num_attention_heads"))
    stretched = {"rope_type": "default", "rope_theta": theta * alpha ** (dim / max(dim - 2, 1))}
    return config.changed({"rope_parameters": stretched, "rope_scaling": None})


HUNYUAN = Architecture(
    name="hunyuan",
    title="Hunyuan (dense)",
    hf_names=("HunYuanDenseV1ForCausalLM",),
    model=llama.Llama,
    read=read,
    gguf_names=("hunyuan-dense",),
    gguf=gguf_naming({"self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm"}),
)
