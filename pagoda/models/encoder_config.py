"""EncoderConfig: the configuration of an encoder-only model, and the functions that read it for several models."""

from dataclasses import dataclass, replace
from typing import Literal

from pagoda.base.abbreviate import abbreviate
from pagoda.base.errors import ConfigError
from pagoda.base.model_spec import ModelSpec
from pagoda.base.pooling import PoolingKind, PoolingPlan
from pagoda.layers.attention import Heads
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import read_activation, read_spec
from pagoda.ops.declare import Activation

LabelActivation = Literal["softmax", "sigmoid", "identity"]

TOKEN_CLASSIFIER = "ForTokenClassification"
"""The end of the names of classes with a head that takes the state of each token."""

_MOST_LABELS = 1 << 16
_LABEL_ACTIVATIONS: dict[str, LabelActivation] = {"Identity": "identity", "Sigmoid": "sigmoid", "Softmax": "softmax"}
_OF_PROBLEM: dict[str, LabelActivation] = {
    "regression": "identity",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """Facts that differ between BERT and its relatives.

    pooling: with the labels of a classification head, if the checkpoint has one.
    num_token_types: rows of the table of token types.   skipped_positions: rows of the position table that come before
    the first token's.
    """

    spec: ModelSpec
    pooling: PoolingPlan
    norm_eps: float
    activation: Activation
    num_token_types: int
    skipped_positions: int = 0

    @property
    def heads(self) -> Heads:
        return Heads(self.spec.num_heads, self.spec.num_kv_heads, self.spec.head_dim)


def read_encoder(config: ConfigReader, architecture: str, skipped_positions: int = 0) -> EncoderConfig:
    """Read a BERT, or one of the models with the same setting names. Raises ConfigError for what is not supported."""
    config.refuse("is_decoder")
    config.refuse("add_cross_attention")
    config.refuse("position_embedding_type", "absolute")
    positions = config.integer("max_position_embeddings")
    if positions <= skipped_positions:
        raise ConfigError(
            f"{config.origin}: max_position_embeddings = {positions}, but the first {skipped_positions} are not used"
        )
    return EncoderConfig(
        spec=read_encoder_spec(config, architecture, positions - skipped_positions),
        pooling=read_pooling_plan(config, PoolingKind.CLS),
        norm_eps=config.not_negative("layer_norm_eps", 1e-12),
        activation=read_activation(config, default="gelu"),
        num_token_types=config.integer("type_vocab_size", 2),
        skipped_positions=skipped_positions,
    )


def read_encoder_spec(config: ConfigReader, architecture: str, max_position: int) -> ModelSpec:
    """Read the shapes. Weights without a stated dtype are float32, as transformers takes them."""
    spec = read_spec(config, architecture, max_position)
    return replace(spec, torch_dtype=config.text("dtype", config.text("torch_dtype", "float32")))


def read_pooling_plan(config: ConfigReader, head_pooling: PoolingKind) -> PoolingPlan:
    """Return the pooling of a checkpoint without settings of sentence-transformers.

    head_pooling: what a classification head takes. Without a head, the mean of all tokens, as sentence-transformers
    has it for such a checkpoint.
    """
    names = config.texts("architectures")
    if not names or not names[0].endswith(("ForSequenceClassification", TOKEN_CLASSIFIER)):
        return PoolingPlan(PoolingKind.MEAN, normalize=False)
    labels = _read_labels(config)
    return PoolingPlan(
        head_pooling,
        normalize=False,
        embeds=False,
        labels=labels,
        labels_tokens=names[0].endswith(TOKEN_CLASSIFIER),
        label_activation=_read_label_activation(config, len(labels)),
    )


def _read_labels(config: ConfigReader) -> tuple[str, ...]:
    """Return the names of the outputs; LABEL_0, LABEL_1, ... where the checkpoint has none."""
    named = config.section("id2label")
    names = {} if named is None else named.values
    count = config.integer("num_labels", len(names) or 2, _MOST_LABELS)
    if names and set(names) != {str(index) for index in range(count)}:
        raise config.wrong("id2label", f"a name for each of the outputs 0 to {count - 1}")
    return tuple(str(names.get(str(index), f"LABEL_{index}")) for index in range(count))


def _read_label_activation(config: ConfigReader, num_labels: int) -> LabelActivation:
    """Return what sentence-transformers stores for a cross-encoder, else what the problem or the labels imply."""
    section = config.section("sentence_transformers") or ConfigReader({}, config.origin)
    stored = section.text("activation_fn", config.text("sbert_ce_default_activation_function", ""))
    if stored:
        return label_activation(stored, config.origin)
    if config.has("problem_type"):
        return _OF_PROBLEM[config.choice("problem_type", tuple(_OF_PROBLEM))]
    return "sigmoid" if num_labels == 1 else "softmax"


def label_activation(class_name: str, origin: str) -> LabelActivation:
    """Return the activation that a torch class computes, for example `torch.nn.modules.linear.Identity`."""
    package, _, name = class_name.rpartition(".")
    if not package.startswith("torch.") or name not in _LABEL_ACTIVATIONS:
        raise ConfigError(
            f"{origin}: activation function {abbreviate(class_name)} is not supported; supported are torch.nn's "
            f"{', '.join(_LABEL_ACTIVATIONS)}"
        )
    return _LABEL_ACTIVATIONS[name]
