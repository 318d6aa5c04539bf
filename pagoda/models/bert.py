"""BERT: learned positions, token types, norms after each sum, GELU; with a classification head or without.

RoBERTa and XLM-RoBERTa: a BERT whose positions start after the id of the padding token, with another head. transformers
gives padding tokens inside a text the position of the padding; here they have the one they are at.
"""

from collections.abc import Sequence

from pagoda.layers.attention import Attention
from pagoda.layers.linear import Embedding, Linear
from pagoda.layers.module import Module
from pagoda.layers.norm import LayerNorm
from pagoda.layers.parameter import Axis
from pagoda.models.architecture import Architecture
from pagoda.models.base import TOKEN_TYPES, Model
from pagoda.models.config_reader import ConfigReader
from pagoda.models.encoder_config import EncoderConfig, read_encoder
from pagoda.models.naming import HF, Naming
from pagoda.ops.batch import ForwardBatch, KVLayer
from pagoda.ops.declare import Activation
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import Tensor


class BertEmbeddings(Module):
    """The sum of a token's, its type's and its position's embedding, normed."""

    def __init__(self, config: EncoderConfig) -> None:
        spec = config.spec
        self.word_embeddings = Embedding(spec.vocab_size, spec.hidden_size)
        self.position_embeddings = Embedding(
            spec.max_position, spec.hidden_size, skipped=config.skipped_positions, is_divided=False
        )
        self.token_type_embeddings = Embedding(config.num_token_types, spec.hidden_size, is_divided=False)
        self.LayerNorm = LayerNorm(spec.hidden_size, config.norm_eps)

    def __call__(self, ops: ForwardOps, batch: ForwardBatch) -> Tensor:
        """[T, hidden]."""
        x = self.word_embeddings(ops, batch.token_ids)
        x = ops.add(x, self.token_type_embeddings(ops, batch.inputs[TOKEN_TYPES].tensor))
        return self.LayerNorm.add(ops, x, self.position_embeddings(ops, batch.positions))[0]


class Dense(Module):
    """A linear layer with a bias."""

    def __init__(self, inputs: int, outputs: int, shard: Axis | None = None, unit: int = 1) -> None:
        self.dense = Linear(inputs, outputs, True, shard, unit)

    def __call__(self, ops: ForwardOps, x: Tensor) -> Tensor:
        return self.dense(ops, x)


class BertOutput(Dense):
    """A linear layer whose result is added to what came before, and normed."""

    def __init__(self, inputs: int, config: EncoderConfig, unit: int = 1) -> None:
        super().__init__(inputs, config.spec.hidden_size, Axis.IN, unit)
        self.LayerNorm = LayerNorm(config.spec.hidden_size, config.norm_eps)

    def add(self, ops: ForwardOps, x: Tensor, residual: Tensor) -> Tensor:
        """x [T, inputs], residual [T, hidden] -> [T, hidden]."""
        return self.LayerNorm.add(ops, self.dense(ops, x), residual)[0]


class BertAttention(Module):
    def __init__(self, config: EncoderConfig) -> None:
        heads, hidden_size = config.heads, config.spec.hidden_size
        names = ("query", "key", "value")
        self.self = Attention(hidden_size, heads, None, causal=False, qkv_bias=True, names=names, out=None)
        self.output = BertOutput(heads.num_heads * heads.dim, config, unit=heads.dim)


class BertLayer(Module):
    def __init__(self, config: EncoderConfig) -> None:
        spec = config.spec
        self.attention = BertAttention(config)
        self.intermediate = Dense(spec.hidden_size, spec.intermediate_size, Axis.OUT)
        self.output = BertOutput(spec.intermediate_size, config)
        self.activation = config.activation

    def __call__(self, ops: ForwardOps, x: Tensor, batch: ForwardBatch, last: bool) -> Tensor:
        """x [T, hidden] -> the same for the tokens that continue.   last: only the output rows are needed after it."""
        attended, x = self.attention.self(ops, x, x, batch, (), last)
        x = self.attention.output.add(ops, attended, x)
        return self.output.add(ops, ops.activate(self.intermediate(ops, x), self.activation), x)


class BertEncoder(Module):
    def __init__(self, config: EncoderConfig) -> None:
        self.layer = [BertLayer(config) for _ in range(config.spec.num_layers)]


class Bert(Model):
    """The encoder and, where the checkpoint has labels, its head. It has no KV and generates nothing."""

    kv_groups = ()
    is_causal = False
    generates = False

    def __init__(self, config: EncoderConfig) -> None:
        self.spec = config.spec
        self.pooling = config.pooling
        self.num_token_types = config.num_token_types
        self.embeddings = BertEmbeddings(config)
        self.encoder = BertEncoder(config)
        hidden_size, num_labels = config.spec.hidden_size, len(config.pooling.labels)
        self.pooler: Dense | None = None
        self.classifier: Module | None = None
        if config.pooling.labels_tokens:
            self.classifier = Linear(hidden_size, num_labels, bias=True, quantizable=False)
        elif num_labels:
            self.add_head(hidden_size, num_labels)

    def add_head(self, hidden_size: int, num_labels: int) -> None:
        """Add the layers that `classify` uses for a prompt."""
        self.pooler = Dense(hidden_size, hidden_size)
        self.classifier = Linear(hidden_size, num_labels, bias=True, quantizable=False)

    def forward(self, ops: ForwardOps, batch: ForwardBatch, kv: Sequence[KVLayer]) -> Tensor:
        x = self.embeddings(ops, batch)
        layers = self.encoder.layer
        for layer in layers:
            x = layer(ops, x, batch, last=layer is layers[-1])
        return x

    def classify(self, ops: ForwardOps, pooled: Tensor) -> Tensor:
        assert isinstance(self.classifier, Linear), "the checkpoint has no labels"
        if self.pooler is not None:
            pooled = ops.activate(self.pooler(ops, pooled), Activation.TANH)
        return ops.logits(pooled, self.classifier.weight.value)


def encoder_namings(prefix: str, parts: str) -> tuple[Naming, ...]:
    """Return the namings of an encoder saved alone, and of one inside a model with a head.

    prefix: of the encoder's tensors inside such a model.   parts: the names in the encoder that get it, as a pattern.
    """
    inside = ((rf"^({parts})\.", rf"{prefix}.\1."),)
    return HF, Naming(substitutions=inside)


def bert_namings(prefix: str) -> tuple[Naming, ...]:
    """As `encoder_namings`; the oldest checkpoints call a norm's weight and bias gamma and beta."""
    newer = encoder_namings(prefix, "embeddings|encoder|pooler")
    greek = ((r"\.LayerNorm\.weight$", ".LayerNorm.gamma"), (r"\.LayerNorm\.bias$", ".LayerNorm.beta"))
    return (*newer, *(Naming(substitutions=naming.substitutions + greek) for naming in newer))


def read(config: ConfigReader) -> EncoderConfig:
    return read_encoder(config, "bert")


_GGUF_NAMES = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    **{
        f"encoder.layer.*.{path}": f"blk.*.{name}"
        for path, name in {
            "attention.self.query": "attn_q",
            "attention.self.key": "attn_k",
            "attention.self.value": "attn_v",
            "attention.output.dense": "attn_output",
            "attention.output.LayerNorm": "attn_output_norm",
            "intermediate.dense": "ffn_up",
            "output.dense": "ffn_down",
            "output.LayerNorm": "layer_output_norm",
        }.items()
    },
}


BERT = Architecture(
    name="bert",
    title="BERT",
    hf_names=(
        "BertModel",
        "BertForMaskedLM",
        "BertForPreTraining",
        "BertForSequenceClassification",
        "BertForTokenClassification",
    ),
    model=Bert,
    read=read,
    hf=bert_namings("bert"),
    unused=r"(bert\.)?pooler\.dense|cls\..+",
    gguf_names=("bert",),
    gguf=Naming(_GGUF_NAMES, by_part=True),
)


class RobertaHead(Module):
    def __init__(self, hidden_size: int, num_labels: int) -> None:
        self.dense = Linear(hidden_size, hidden_size, bias=True)
        self.out_proj = Linear(hidden_size, num_labels, bias=True, quantizable=False)


class Roberta(Bert):
    def add_head(self, hidden_size: int, num_labels: int) -> None:
        self.classifier = RobertaHead(hidden_size, num_labels)

    def classify(self, ops: ForwardOps, pooled: Tensor) -> Tensor:
        head = self.classifier
        if not isinstance(head, RobertaHead):
            return super().classify(ops, pooled)
        return ops.logits(ops.activate(head.dense(ops, pooled), Activation.TANH), head.out_proj.weight.value)


def _read_roberta(config: ConfigReader) -> EncoderConfig:
    padding = config.ids("pad_token_id")
    return read_encoder(config, "roberta", skipped_positions=(padding[0] if padding else 1) + 1)


ROBERTA = Architecture(
    name="roberta",
    title="RoBERTa",
    hf_names=(
        "RobertaModel",
        "RobertaForMaskedLM",
        "RobertaForSequenceClassification",
        "RobertaForTokenClassification",
        "XLMRobertaModel",
        "XLMRobertaForMaskedLM",
        "XLMRobertaForSequenceClassification",
        "XLMRobertaForTokenClassification",
    ),
    model=Roberta,
    read=_read_roberta,
    hf=bert_namings("roberta"),
    unused=r"(roberta\.)?pooler\.dense|lm_head\..+",
)
