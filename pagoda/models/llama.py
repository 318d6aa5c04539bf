"""Llama 2 and 3, SmolLM2, and all that share their shape."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from pagoda.base.errors import ConfigError
from pagoda.base.ranks import WHOLE, RankPlace
from pagoda.layers.kv import place_kv, place_kv_of_stage
from pagoda.layers.linear import Embedding, LMHead
from pagoda.layers.module import Module
from pagoda.layers.rotary import Rotary
from pagoda.models.architecture import Architecture
from pagoda.models.base import Model
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import DecoderConfig, read_decoder
from pagoda.models.decoder_layers import LlamaLayer
from pagoda.models.naming import gguf_naming
from pagoda.ops.batch import ForwardBatch, KVLayer
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import RankGroup, Tensor


class LlamaModel(Module):
    """Token ids to final hidden states."""

    def __init__(self, config: DecoderConfig) -> None:
        spec = config.spec
        layers = range(spec.num_layers)
        full_dim = next((config.heads_of(at).dim for at in layers if not spec.layer_windows[at]), spec.head_dim)
        full = window = Rotary(config.rope_full, full_dim)
        if config.rope_window != config.rope_full or full_dim != spec.head_dim:
            window = Rotary(config.rope_window, spec.head_dim, scaled_by_checkpoint=False)
        self.embed_tokens = Embedding(
            spec.vocab_size, spec.hidden_size, config.embedding_scale, input_scale=config.input_scale
        )
        kind = config.layer or LlamaLayer
        self.layers = [kind(config, at, window if spec.layer_windows[at] else full) for at in layers]
        self.norm = config.norm()
        self.place, self.ranks = WHOLE, None

    def take_stage(self, place: RankPlace, ranks: RankGroup, is_tied: bool) -> None:
        """Keep a range of the layers; the first stage also keeps the embedding, the last one the norm.

        is_tied: the head reads the embedding's table.   Raises ConfigError for more stages than layers.
        """
        count, stages = len(self.layers), place.num_stages
        if stages > count:
            raise ConfigError(f"pipeline_parallel_size={stages} is more than the {count} layers of the model")
        self.place, self.ranks = place, ranks
        own = range(count * place.stage // stages, count * (place.stage + 1) // stages)
        for index, layer in enumerate(self.layers):
            layer.is_elsewhere = index not in own
        self.embed_tokens.is_elsewhere = not place.is_first_stage and not (place.is_last_stage and is_tied)
        self.norm.is_elsewhere = not place.is_last_stage

    def embed(self, ops: ForwardOps, batch: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        """Return x and the residual stream, [T, hidden] each, as the first layer takes them."""
        return self.embed_tokens.of_batch(ops, batch), None

    def with_layer_inputs(self, ops: ForwardOps, x: Tensor, batch: ForwardBatch) -> ForwardBatch:
        """Return the batch with what layers read besides the hidden states.   x: [T, hidden], the embeddings."""
        return batch

    def __call__(self, ops: ForwardOps, batch: ForwardBatch, kv: Sequence[KVLayer]) -> Tensor:
        """[num_outputs, hidden], normed. Of a stage that is not the last: [T, hidden], part of what the next gets."""
        layers = [layer for layer in self.layers if not layer.is_elsewhere]
        layers = layers[: batch.num_layers] if batch.num_layers else layers
        if self.place.is_first_stage:
            x, residual = self.embed(ops, batch)
            batch = self.with_layer_inputs(ops, x, batch)
        else:
            assert self.ranks is not None
            like = layers[0].post_attention_layernorm.weight.value
            x, residual = (ops.receive_rows(batch.token_ids, like, self.ranks) for _ in range(2))
        for layer in layers:
            x, residual = layer(ops, x, residual, batch, kv, self.place.is_last_stage and layer is layers[-1])
        if self.place.is_last_stage:
            return self.norm.add(ops, x, residual)[0]
        assert self.ranks is not None
        assert residual is not None
        ops.send_rows(x, self.ranks)
        ops.send_rows(residual, self.ranks)
        return x


class Llama(Model):
    """The model and its head.   body: what holds the layers.   has_head_bias: the head for tokens has one."""

    body: type[LlamaModel] = LlamaModel
    has_head_bias: ClassVar[bool] = False
    takes_embeds = True

    def __init__(self, config: DecoderConfig) -> None:
        spec = config.spec
        self.spec = spec
        self.model = self.body(config)
        tied = self.model.embed_tokens if spec.tie_embeddings else None
        self.lm_head = LMHead(
            spec.hidden_size, spec.vocab_size, tied, config.logit_softcap, config.logit_scale, self.has_head_bias
        )
        self.kv_groups = place_kv(self)

    def take_stage(self, place: RankPlace, ranks: RankGroup) -> None:
        self.model.take_stage(place, ranks, self.spec.tie_embeddings)
        self.lm_head.is_elsewhere = not place.is_last_stage
        self.generates = self.generates and place.is_last_stage
        self.kv_groups = place_kv_of_stage(self, self.kv_groups)

    def forward(self, ops: ForwardOps, batch: ForwardBatch, kv: Sequence[KVLayer]) -> Tensor:
        return self.model(ops, batch, kv)

    def compute_logits(self, ops: ForwardOps, hidden: Tensor) -> Tensor:
        return self.lm_head(ops, hidden)


def read(
    config: ConfigReader,
    architecture: str = "llama",
    windows: tuple[int, ...] | None = None,
    default_theta: float = 10_000.0,
) -> DecoderConfig:
    """Read a Llama, or a model with its settings and biases.   windows, default_theta: see `read_decoder`."""
    attention_bias = config.flag("attention_bias", False)
    return replace(
        read_decoder(config, architecture, windows, default_theta),
        qkv_bias=attention_bias,
        attention_out_bias=config.flag("attention_out_bias", attention_bias),
        mlp_bias=config.flag("mlp_bias", False),
    )


LLAMA = Architecture(
    name="llama",
    title="Llama",
    hf_names=("LlamaForCausalLM",),
    model=Llama,
    read=read,
    gguf_names=("llama",),
    gguf=gguf_naming(interleaved_rotary=True),
)
