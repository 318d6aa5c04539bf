"""ModernBERT: rotary positions, norms before each sum, a gated MLP, and a window in most layers."""

from collections.abc import Sequence
from dataclasses import dataclass

from pagoda.base.model_spec import ModelSpec
from pagoda.base.pooling import PoolingKind, PoolingPlan
from pagoda.layers.attention import Attention, Heads
from pagoda.layers.linear import Embedding, Linear
from pagoda.layers.mlp import GatedMLP
from pagoda.layers.module import Module
from pagoda.layers.norm import LayerNorm
from pagoda.layers.rope_config import RopeConfig
from pagoda.layers.rotary import Rotary
from pagoda.models.architecture import Architecture
from pagoda.models.base import Model
from pagoda.models.bert import encoder_namings
from pagoda.models.config_reader import ConfigReader, read_rope_parameters
from pagoda.models.decoder_config import FULL, SLIDING, read_activation, windows_by_layer_types
from pagoda.models.encoder_config import (
    read_encoder_spec,
    read_pooling_plan,
)
from pagoda.ops.batch import ForwardBatch, KVLayer
from pagoda.ops.declare import Activation
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import Tensor

_POOLING = {"cls": PoolingKind.CLS, "mean": PoolingKind.MEAN}


@dataclass(frozen=True, slots=True)
class ModernBertConfig:
    """windows: per layer, 0 for all tokens, else only those less than so many positions away.

    rope_full, rope_window: of layers without and with a window.
    head_activation, head_bias: of the classification head.
    """

    spec: ModelSpec
    pooling: PoolingPlan
    windows: tuple[int, ...]
    rope_full: RopeConfig
    rope_window: RopeConfig
    norm_eps: float
    norm_bias: bool
    activation: Activation
    attention_bias: bool
    mlp_bias: bool
    head_activation: Activation
    head_bias: bool

    def norm(self) -> LayerNorm:
        return LayerNorm(self.spec.hidden_size, self.norm_eps, self.norm_bias)


class ModernBertEmbeddings(Module):
    def __init__(self, config: ModernBertConfig) -> None:
        self.tok_embeddings = Embedding(config.spec.vocab_size, config.spec.hidden_size)
        self.norm = config.norm()


class ModernBertLayer(Module):
    def __init__(self, config: ModernBertConfig, index: int, rotary: Rotary) -> None:
        spec = config.spec
        self.attn_norm = config.norm() if index else None  # the embeddings are normed already
        self.attn = Attention(
            spec.hidden_size,
            Heads(spec.num_heads, spec.num_kv_heads, spec.head_dim),
            rotary,
            causal=False,
            window=config.windows[index],
            qkv_bias=config.attention_bias,
            out_bias=config.attention_bias,
            names=("Wqkv", "Wqkv", "Wqkv"),
            out="Wo",
        )
        self.mlp_norm = config.norm()
        names = ("Wi", "Wi", "Wo")
        self.mlp = GatedMLP(spec.hidden_size, spec.intermediate_size, config.activation, config.mlp_bias, names)

    def __call__(
        self, ops: ForwardOps, x: Tensor, residual: Tensor | None, batch: ForwardBatch, last: bool
    ) -> tuple[Tensor, Tensor]:
        """x [T, hidden], not yet added to the residual stream -> the same for the tokens that continue.

        last: only the batch's output rows are needed after this layer.
        """
        if self.attn_norm is not None and residual is not None:
            x, residual = self.attn_norm.add(ops, x, residual)
        else:
            residual = x
        x, residual = self.attn(ops, x, residual, batch, (), last)
        x, residual = self.mlp_norm.add(ops, x, residual)
        return self.mlp(ops, x), residual


class ModernBertHead(Module):
    """What a classifier has in front of it."""

    def __init__(self, config: ModernBertConfig) -> None:
        self.dense = Linear(config.spec.hidden_size, config.spec.hidden_size, config.head_bias)
        self.norm = config.norm()
        self.activation = config.head_activation

    def __call__(self, ops: ForwardOps, x: Tensor) -> Tensor:
        return self.norm(ops, ops.activate(self.dense(ops, x), self.activation))


class ModernBert(Model):
    """The encoder and, where the checkpoint has labels, its head. It has no KV and generates nothing."""

    kv_groups = ()
    is_causal = False
    generates = False

    def __init__(self, config: ModernBertConfig) -> None:
        spec = config.spec
        self.spec = spec
        self.pooling = config.pooling
        self.embeddings = ModernBertEmbeddings(config)
        full, window = (Rotary(rope, spec.head_dim) for rope in (config.rope_full, config.rope_window))
        if config.rope_window == config.rope_full:
            window = full
        self.layers = [
            ModernBertLayer(config, index, window if size else full) for index, size in enumerate(config.windows)
        ]
        self.final_norm = config.norm()
        if config.pooling.labels:
            self.head = ModernBertHead(config)
            self.classifier = Linear(spec.hidden_size, len(config.pooling.labels), bias=True, quantizable=False)

    def forward(self, ops: ForwardOps, batch: ForwardBatch, kv: Sequence[KVLayer]) -> Tensor:
        x = self.embeddings.norm(ops, self.embeddings.tok_embeddings(ops, batch.token_ids))
        residual = None
        for layer in self.layers:
            x, residual = layer(ops, x, residual, batch, last=layer is self.layers[-1])
        assert residual is not None, "a model has layers"
        return self.final_norm.add(ops, x, residual)[0]

    def classify(self, ops: ForwardOps, pooled: Tensor) -> Tensor:
        return ops.logits(self.head(ops, pooled), self.classifier.weight.value)


def read(config: ConfigReader) -> ModernBertConfig:
    num_layers, every = config.num_layers(), config.integer("global_attn_every_n_layers", 3)
    by_index = tuple(SLIDING if layer % every else FULL for layer in range(num_layers))
    # Half of local_attention on either side, ends included.
    window = config.integer("local_attention", 128) // 2 + 1
    head_pooling = _POOLING[config.choice("classifier_pooling", tuple(_POOLING), "cls")]
    return ModernBertConfig(
        spec=read_encoder_spec(config, "modernbert", config.integer("max_position_embeddings")),
        pooling=read_pooling_plan(config, head_pooling),
        windows=windows_by_layer_types(config, config.texts("layer_types") or by_index, window),
        rope_full=_read_rope(config, FULL, "global_rope_theta", 160_000.0),
        rope_window=_read_rope(config, SLIDING, "local_rope_theta", 10_000.0),
        norm_eps=config.not_negative("norm_eps", 1e-5),
        norm_bias=config.flag("norm_bias", False),
        activation=read_activation(config, "hidden_activation", "gelu"),
        attention_bias=config.flag("attention_bias", False),
        mlp_bias=config.flag("mlp_bias", False),
        head_activation=read_activation(config, "classifier_activation", "gelu"),
        head_bias=config.flag("classifier_bias", False),
    )


def _read_rope(config: ConfigReader, layer_type: str, theta_key: str, default_theta: float) -> RopeConfig:
    """Read the rope of a kind of layer: the newer form has a set of parameters for each."""
    nested = config.section("rope_parameters")
    parameters = nested.section(layer_type) if nested else config.section("rope_scaling")
    parameters = parameters or ConfigReader({}, config.origin)
    theta = parameters.number("rope_theta", config.number(theta_key, default_theta))
    return read_rope_parameters(parameters, theta, config.integer("max_position_embeddings"))


MODERNBERT = Architecture(
    name="modernbert",
    title="ModernBERT",
    hf_names=(
        "ModernBertModel",
        "ModernBertForMaskedLM",
        "ModernBertForSequenceClassification",
        "ModernBertForTokenClassification",
    ),
    model=ModernBert,
    read=read,
    hf=encoder_namings("model", "embeddings|layers|final_norm"),
    unused=r"head\.dense|decoder",
)
