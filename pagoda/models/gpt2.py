"""GPT-2: learned positions, LayerNorms, an MLP without a gate, biases everywhere, q, k and v in one matrix."""

from dataclasses import replace

from pagoda.base.ranks import RankPlace
from pagoda.layers.linear import Embedding
from pagoda.layers.rope_config import RopeConfig
from pagoda.models.architecture import Architecture
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import DecoderConfig, Norm, read_activation, read_spec
from pagoda.models.llama import Llama, LlamaModel
from pagoda.models.naming import Naming, gguf_naming
from pagoda.ops.batch import ForwardBatch
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import RankGroup, Tensor

_NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
}
"""Settings by the names of other models."""


class GPT2Model(LlamaModel):
    """A table has an embedding of each position, which is added to that of the token."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        spec = config.spec
        self.embed_positions = Embedding(spec.max_position, spec.hidden_size, is_divided=False, by_position=True)

    def take_stage(self, place: RankPlace, ranks: RankGroup, is_tied: bool) -> None:
        super().take_stage(place, ranks, is_tied)
        self.embed_positions.is_elsewhere = not place.is_first_stage

    def embed(self, ops: ForwardOps, batch: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        return super().embed(ops, batch)[0], self.embed_positions(ops, batch.positions)


class GPT2LMHead(Llama):
    body = GPT2Model


def read(config: ConfigReader) -> DecoderConfig:
    values = {ours: config.get(theirs) for theirs, ours in _NAMES.items() if config.has(theirs)}
    if config.has("n_embd"):
        values["intermediate_size"] = config.integer("n_inner", 4 * config.integer("n_embd"))
    config = config.changed(values)
    config.refuse("scale_attn_by_inverse_layer_idx")
    config.refuse("add_cross_attention")
    spec = read_spec(config, "gpt2", config.integer("max_position_embeddings"), tie_embeddings=True)
    # Its first checkpoints do not say that they are float32.
    spec = replace(spec, torch_dtype=config.text("dtype", config.text("torch_dtype", "float32")))
    return DecoderConfig(
        spec=spec,
        norm_eps=config.not_negative("layer_norm_epsilon", 1e-5),
        activation=read_activation(config, "activation_function", "gelu_new"),
        rope_full=RopeConfig(),
        rope_window=RopeConfig(),
        attention_scale=spec.head_dim**-0.5 if config.flag("scale_attn_weights", True) else 1.0,
        norm_kind=Norm.LAYER,
        unrotated_layers=frozenset(range(spec.num_layers)),
        fused_qkv=True,
        plain_mlp=True,
        qkv_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
    )


def _gguf_settings(config: ConfigReader) -> dict[str, object]:
    return {"layer_norm_epsilon": config.get("layer_norm_eps")}


_TENSORS = (
    (r"^model\.embed_tokens\.", "transformer.wte."),
    (r"^model\.embed_positions\.", "transformer.wpe."),
    (r"^model\.norm\.", "transformer.ln_f."),
    (r"^model\.layers\.", "transformer.h."),
    (r"\.input_layernorm\.", ".ln_1."),
    (r"\.post_attention_layernorm\.", ".ln_2."),
    (r"\.self_attn\.qkv_proj\.", ".attn.c_attn."),
    (r"\.self_attn\.o_proj\.", ".attn.c_proj."),
    (r"\.mlp\.up_proj\.", ".mlp.c_fc."),
    (r"\.mlp\.down_proj\.", ".mlp.c_proj."),
)
_TRANSPOSED = r"\.c_(attn|proj|fc)\.weight$"  # transformers' Conv1D

GPT2 = Architecture(
    name="gpt2",
    title="GPT-2",
    hf_names=("GPT2LMHeadModel",),
    model=GPT2LMHead,
    read=read,
    hf=(
        Naming(substitutions=_TENSORS, transposed=_TRANSPOSED),
        Naming(substitutions=(*_TENSORS, (r"^transformer\.", "")), transposed=_TRANSPOSED),
    ),
    gguf_names=("gpt2",),
    gguf=gguf_naming(),
    gguf_settings=_gguf_settings,
)
