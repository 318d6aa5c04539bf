"""BART: an encoder of text, and a decoder that attends to what it gives; a norm after each sum."""

from collections.abc import Sequence
from dataclasses import dataclass

from pagoda.base.model_spec import ModelSpec
from pagoda.layers.kv import place_kv
from pagoda.layers.linear import Embedding, LMHead
from pagoda.layers.module import Module
from pagoda.layers.norm import LayerNorm
from pagoda.models.architecture import Architecture
from pagoda.models.base import Encoder, Model
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import read_activation
from pagoda.models.encoder_decoder import NORM_EPS, SOURCE_TOKENS, StackLayer, TextEncoder, read_stack, read_start
from pagoda.ops.batch import ForwardBatch, KVLayer
from pagoda.ops.declare import Activation
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import Tensor

_SKIPPED_POSITIONS = 2


@dataclass(frozen=True, slots=True)
class BartConfig:
    """spec, encoder: of the decoder and of the encoder.   embedding_scale: of both.   start: of an answer."""

    spec: ModelSpec
    encoder: ModelSpec
    activation: Activation
    embedding_scale: float
    start: tuple[int, ...]


class BartLayer(StackLayer):
    """Each sum is normed."""

    def __call__(self, ops: ForwardOps, x: Tensor, batch: ForwardBatch, kv: Sequence[KVLayer], last: bool) -> Tensor:
        """x [T, hidden] -> the same for the tokens that continue."""
        attended, x = self.self_attn(ops, x, x, batch, kv, last)
        x, _ = self.self_attn_layer_norm.add(ops, attended, x)
        if self.encoder_attn is not None and self.encoder_attn_layer_norm is not None:
            attended = self.encoder_attn(ops, x, batch, kv, last)
            x, _ = self.encoder_attn_layer_norm.add(ops, attended, x)
        inner = self.fc2(ops, ops.activate(self.fc1(ops, x), self.activation))
        return self.final_layer_norm.add(ops, inner, x)[0]


class BartEncoder(TextEncoder):
    def __init__(self, config: BartConfig, shared: Embedding) -> None:
        super().__init__(config.encoder, config.start)
        size = self.output_size
        self.embed_tokens = shared
        self.embed_positions = Embedding(self.spec.max_position, size, skipped=_SKIPPED_POSITIONS, is_divided=False)
        self.layernorm_embedding = LayerNorm(size, NORM_EPS)
        self.layers = [BartLayer(self.spec, config.activation, 0, k_bias=True) for _ in range(self.spec.num_layers)]

    def forward(self, ops: ForwardOps, batch: ForwardBatch, kv: Sequence[KVLayer]) -> Tensor:
        x = self.embed_tokens(ops, batch.inputs[SOURCE_TOKENS].tensor)
        x = self.layernorm_embedding(ops, ops.add(x, self.embed_positions(ops, batch.positions)))
        for layer in self.layers:
            x = layer(ops, x, batch, kv, last=False)
        return x


class BartDecoder(Module):
    def __init__(self, config: BartConfig, shared: Embedding) -> None:
        spec, states_size = config.spec, config.encoder.hidden_size
        self.embed_tokens = shared
        self.embed_positions = Embedding(
            spec.max_position, spec.hidden_size, skipped=_SKIPPED_POSITIONS, is_divided=False
        )
        self.layernorm_embedding = LayerNorm(spec.hidden_size, NORM_EPS)
        self.layers = [BartLayer(spec, config.activation, states_size, k_bias=True) for _ in range(spec.num_layers)]

    def __call__(self, ops: ForwardOps, batch: ForwardBatch, kv: Sequence[KVLayer]) -> Tensor:
        """[num_outputs, hidden]."""
        x = ops.add(self.embed_tokens.of_batch(ops, batch), self.embed_positions(ops, batch.positions))
        x = self.layernorm_embedding(ops, x)
        for layer in self.layers:
            x = layer(ops, x, batch, kv, last=layer is self.layers[-1])
        return x


class BartModel(Module):
    def __init__(self, config: BartConfig) -> None:
        self.shared = Embedding(config.spec.vocab_size, config.spec.hidden_size, config.embedding_scale)
        self.encoder = BartEncoder(config, self.shared)
        self.decoder = BartDecoder(config, self.shared)


class Bart(Model):
    """Both, and a head, which is the table of tokens."""

    def __init__(self, config: BartConfig) -> None:
        self.spec = config.spec
        self.model = BartModel(config)
        self.lm_head = LMHead(config.spec.hidden_size, config.spec.vocab_size, self.model.shared)
        self.kv_groups = place_kv(self)

    @property
    def media_encoder(self) -> Encoder:
        return self.model.encoder

    def forward(self, ops: ForwardOps, batch: ForwardBatch, kv: Sequence[KVLayer]) -> Tensor:
        return self.model.decoder(ops, batch, kv)

    def compute_logits(self, ops: ForwardOps, hidden: Tensor) -> Tensor:
        return self.lm_head(ops, hidden)


def read(config: ConfigReader) -> BartConfig:
    """Read the settings. Raises ConfigError for what is not supported."""
    for name in ("normalize_before", "add_final_layer_norm", "static_position_embeddings"):
        config.refuse(name)
    for name in ("normalize_embedding", "tie_word_embeddings"):
        config.expect(name, True)
    positions = config.integer("max_position_embeddings", 1024)
    decoder = read_stack(config, "bart", "decoder", positions)
    return BartConfig(
        spec=decoder,
        encoder=read_stack(config, "bart", "encoder", positions),
        activation=read_activation(config, "activation_function", "gelu"),
        embedding_scale=decoder.hidden_size**0.5 if config.flag("scale_embedding", False) else 1.0,
        start=read_start(config) + config.ids("forced_bos_token_id"),
    )


BART = Architecture(
    name="bart",
    title="BART",
    hf_names=("BartForConditionalGeneration",),
    model=Bart,
    read=read,
    zeros=("final_logits_bias",),
)
