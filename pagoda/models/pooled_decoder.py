"""Decoders without their head for tokens: embedding models, and those with a classification head.

`X` stands for a decoder that is in the registry as `XForCausalLM`: `XModel` has no head, `XForSequenceClassification`
has one that takes the hidden state of the last token, `XForTokenClassification` one for that of each token. A head may
be made from rows of the decoder's output head: models that answer "yes" or "no".
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from pagoda.base.errors import ConfigError
from pagoda.base.hf_overrides import PLAIN, TWO_WAY
from pagoda.base.model_spec import ModelSpec
from pagoda.base.pooling import PoolingKind, PoolingPlan
from pagoda.base.ranks import RankPlace
from pagoda.layers.kv import place_kv_of_stage
from pagoda.layers.module import Module
from pagoda.layers.parameter import Matrix, Parameter, Part, PickedRows
from pagoda.models.architecture import Architecture
from pagoda.models.base import Model
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import DecoderConfig
from pagoda.models.encoder_config import TOKEN_CLASSIFIER, read_pooling_plan
from pagoda.models.llama import Llama
from pagoda.ops.batch import ForwardBatch, KVLayer
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import LinearWeight, RankGroup, Tensor

TOKEN_IDS = "classifier_token_ids"
"""Setting in which loading puts the ids of `classifier_from_token`."""

# The prompt of https://huggingface.co/Qwen/Qwen3-Reranker-0.6B. All of it is in expressions: a template's own newlines
# may be trimmed.
QWEN3_RERANKER = (
    "{{ '<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: \' }}'
    "{{ messages | selectattr('role', 'eq', 'system') | map(attribute='content') | first | "
    "default('Given a web search query, retrieve relevant passages that answer the query') }}"
    "{{ '\n<Query>: ' }}{{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}"
    "{{ '\n<Document>: ' }}{{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}"
    "{{ '<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n' }}"
)


@dataclass(frozen=True, slots=True)
class TokenHead:
    """A head made from rows of the output head.   plan: its pooling and labels."""

    rows: PickedRows
    plan: PoolingPlan


@dataclass(frozen=True, slots=True)
class LabelledConfig:
    """A decoder without its head for tokens.

    plan: pooling and labels of a classification head, None without one.   rows: what it is made from, if not stored.
    """

    decoder: DecoderConfig
    plan: PoolingPlan | None
    rows: PickedRows | None = None

    @property
    def spec(self) -> ModelSpec:
        return self.decoder.spec


def read_token_head(config: ConfigReader, decoder: DecoderConfig) -> TokenHead | None:
    """Return the head that `classifier_from_token` asks for; None without it. Raises ConfigError."""
    tokens, token_ids = config.texts("classifier_from_token"), config.ids(TOKEN_IDS)
    is_reranker = config.flag("is_original_qwen3_reranker", False)
    if not tokens:
        if is_reranker:
            raise ConfigError(f"{config.origin}: is_original_qwen3_reranker needs classifier_from_token: ['no', 'yes']")
        return None
    method = TWO_WAY if is_reranker else config.choice("method", (TWO_WAY, PLAIN), PLAIN)
    if method == TWO_WAY and len(tokens) != 2:
        raise ConfigError(
            f"{config.origin}: classifier_from_token has {len(tokens)} tokens; {TWO_WAY} takes two, such as "
            "['no', 'yes']"
        )
    if decoder.logit_softcap or decoder.logit_scale != 1.0:
        what = "final_logit_softcapping" if decoder.logit_softcap else "logits that are scaled"
        raise ConfigError(f"{config.origin}: classifier_from_token is not supported with {what}")
    path = "model.embed_tokens.weight" if decoder.spec.tie_embeddings else "lm_head.weight"
    vocab_size = decoder.spec.vocab_size
    template = QWEN3_RERANKER if is_reranker else ""
    if method == TWO_WAY:
        # softmax([a, b])[1] is sigmoid(b - a)
        rows, labels = PickedRows(path, vocab_size, token_ids[1:], token_ids[:1]), tokens[1:]
    else:
        rows, labels = PickedRows(path, vocab_size, token_ids), tokens
    plan = PoolingPlan(
        PoolingKind.LAST,
        normalize=False,
        embeds=False,
        labels=labels,
        label_activation="sigmoid" if len(labels) == 1 else "softmax",
        score_template=template,
    )
    return TokenHead(rows, plan)


class ClassificationHead(Module):
    """One output per label, in float32."""

    def __init__(self, hidden_size: int, num_labels: int, bias: bool = False, picked: PickedRows | None = None) -> None:
        declared = Matrix((Part("", num_labels),), hidden_size, bias, quantizable=False, picked=picked)
        self.weight = Parameter[LinearWeight](declared)

    def __call__(self, ops: ForwardOps, pooled: Tensor) -> Tensor:
        """[S, hidden] -> float32 [S, labels]."""
        return ops.logits(pooled, self.weight.value)


class PooledDecoder(Model):
    """The layers of a decoder.   score: the classification head, if there is one."""

    generates = False

    def __init__(self, decoder: Llama, head: PoolingPlan | None, picked: PickedRows | None = None) -> None:
        """head: pooling and labels of the head, None without one.   picked: what it is made from, if not stored."""
        self.spec = decoder.spec
        self.model = decoder.model
        self.kv_groups = decoder.kv_groups
        self.is_causal, self.pooling = decoder.is_causal, decoder.pooling
        self.score: ClassificationHead | None = None
        if head is not None:
            self.score = ClassificationHead(
                self.spec.hidden_size, len(head.labels), bias=head.labels_tokens, picked=picked
            )
            self.pooling = head

    def take_stage(self, place: RankPlace, ranks: RankGroup) -> None:
        self.model.take_stage(place, ranks, is_tied=False)
        for layer in (self.score, *self.dense):
            if layer is not None:
                layer.is_elsewhere = not place.is_last_stage
        self.kv_groups = place_kv_of_stage(self, self.kv_groups)

    def forward(self, ops: ForwardOps, batch: ForwardBatch, kv: Sequence[KVLayer]) -> Tensor:
        return self.model(ops, batch, kv)

    def classify(self, ops: ForwardOps, pooled: Tensor) -> Tensor:
        assert self.score is not None
        return self.score(ops, pooled)


def pooled_variants(decoder: Architecture) -> dict[str, Architecture]:
    """Return the variants of a decoder by their names in config.json."""
    found: dict[str, Architecture] = {}
    plain = replace(decoder, model=partial(_build, decoder))
    labelled = replace(plain, read=partial(_read_labels, decoder))
    for name in decoder.hf_names:
        if not name.endswith(_CAUSAL):
            continue
        for stem in (name.removesuffix(_CAUSAL), name.removesuffix(_CAUSAL) + "Text"):
            found[f"{stem}Model"] = replace(plain, hf_names=(f"{stem}Model",))
            for classifier in (f"{stem}ForSequenceClassification", f"{stem}{TOKEN_CLASSIFIER}"):
                found[classifier] = replace(labelled, hf_names=(classifier,))
    return found


_CAUSAL = "ForCausalLM"


def _build(decoder: Architecture, config: DecoderConfig | LabelledConfig) -> Model:
    if not isinstance(config, LabelledConfig):
        config = LabelledConfig(config, None)
    tree = decoder.model(config.decoder)
    assert isinstance(tree, Llama)
    if config.rows is not None and tree.has_head_bias:
        raise ConfigError("classifier_from_token is not supported with a head that has a bias")
    return PooledDecoder(tree, config.plan, config.rows)


def _read_labels(decoder: Architecture, config: ConfigReader) -> LabelledConfig:
    """Read the decoder's settings, and its classification head."""
    settings = decoder.read(config)
    made = read_token_head(config, settings)
    if made is not None:
        return LabelledConfig(settings, made.plan, made.rows)
    return LabelledConfig(settings, read_pooling_plan(config, PoolingKind.LAST))
