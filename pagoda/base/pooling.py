"""Pooling: what a model turns a prompt into instead of text, and what a request may ask of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any, Literal

from pagoda.base.errors import RequestError
from pagoda.base.param_values import Reader, checked, read_integer, read_optional_flag, read_optional_integer, refuse

PoolingTask = Literal["embed", "classify", "score", "token_embed", "token_classify"]
TASKS: tuple[PoolingTask, ...] = ("embed", "classify", "score", "token_embed", "token_classify")
PER_TOKEN = ("token_embed", "token_classify")
"""Tasks whose result has a row per prompt token."""


class PoolingKind(StrEnum):
    """Which final hidden states of a prompt become its vector."""

    CLS = "cls"  # the first token's
    LAST = "last"  # the last token's
    MEAN = "mean"  # the mean of all tokens'


@dataclass(frozen=True, slots=True)
class PoolingPlan:
    """How a model turns the final hidden states of a prompt into one vector. Declared by its tree.

    kind: which hidden states.   normalize: whether `embed` scales to unit length unless a request says otherwise.
    embeds: whether the vectors are embeddings.   labels: of the classification head, () without one.
    labels_tokens: the head was trained for single tokens (`...ForTokenClassification`): it gives a prompt no class.
    label_activation: turns the head's outputs into the result of `classify`, unless a request switches it off.
    score_template: Jinja text that makes one prompt of a query, a document and an instruction (messages of the roles
        query, document and system), for models that were trained with one.
    prompts: instructions by name, put in front of a text.   default_prompt: the name of the one used by default.
    max_seq_length: tokens that the pooling was made for, if fewer than the model's positions.
    sizes: to which embeddings may be shortened ("Matryoshka"): None: to none, (): to any.
    is_declared: the model's files say how it pools, so it was trained for that.
    """

    kind: PoolingKind = PoolingKind.LAST
    normalize: bool = True
    embeds: bool = True
    labels: tuple[str, ...] = ()
    labels_tokens: bool = False
    label_activation: Literal["softmax", "sigmoid", "identity"] = "softmax"
    score_template: str = ""
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    max_seq_length: int | None = None
    sizes: tuple[int, ...] | None = None
    is_declared: bool = False

    @property
    def tasks(self) -> tuple[PoolingTask, ...]:
        """What the model can be asked for. A score is a similarity of embeddings, or the only output of a head."""
        found: list[PoolingTask] = ["embed", "token_embed"] if self.embeds else []
        if self.labels:
            found.append("token_classify")
        if self.labels and not self.labels_tokens:
            found.append("classify")
        if self.embeds or (len(self.labels) == 1 and not self.labels_tokens):
            found.append("score")
        return tuple(sorted(found, key=TASKS.index))

    @property
    def default_task(self) -> PoolingTask:
        """What the model was made for."""
        if self.embeds:
            return "embed"
        return "token_classify" if self.labels_tokens else "classify"


@dataclass(frozen=True, slots=True)
class ModelTasks:
    """What a model can be asked for.

    plan: how it pools.   generates: whether it has a head for tokens.   embedding_size: elements of an embedding.
    is_causal: False: a token attends to all tokens, so that a prompt is computed in one chunk and nothing is cached.
    """

    plan: PoolingPlan = field(default_factory=PoolingPlan)
    generates: bool = True
    is_causal: bool = True
    embedding_size: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        return (*(("generate",) if self.generates else ()), *self.plan.tasks)

    def check(self, task: str) -> None:
        """Raise RequestError, which names what the model supports, if that does not include `task`."""
        if task not in self.names:
            raise RequestError(f"this model does not support {task}; it supports {', '.join(self.names)}", "model")

    def reads_prefix_cache(self, params: "PoolingParams") -> bool:
        """Return whether the pooling can do without the hidden states of cached tokens."""
        is_last = self.plan.kind is PoolingKind.LAST and params.task not in PER_TOKEN
        return is_last and self.is_causal and not params.skip_reading_prefix_cache


@dataclass(frozen=True, slots=True)
class Alignment:
    """Where each token of a prompt looks in what the encoder read; transcriptions ask for it.

    heads: of cross attention, (layer, head): those of the model.   first: the first of these tokens.
    num_frames: at so many of the encoder's tokens, from the first one on.
    """

    heads: tuple[tuple[int, int], ...]
    first: int
    num_frames: int


def _read_task(name: str, value: Any) -> PoolingTask | None:
    if value is not None and value not in TASKS:
        raise refuse(name, value, "one of " + ", ".join(map(repr, TASKS)))
    return value


def _read_truncation(name: str, value: Any) -> int | None:
    if value == 0:
        raise refuse(name, value, "-1 or at least 1")
    return read_optional_integer(name, value, -1)


def _read_alignment(name: str, value: Any) -> Alignment | None:
    if value is not None and not isinstance(value, Alignment):
        raise refuse(name, value, "an Alignment or None")
    if value is not None:
        read_integer("alignment.first", value.first, 0)
        read_integer("alignment.num_frames", value.num_frames, 1)
    return value


_READERS: Mapping[str, Reader] = {
    "task": _read_task,
    "alignment": _read_alignment,
    **dict.fromkeys(("normalize", "use_activation", "skip_reading_prefix_cache"), read_optional_flag),
    "dimensions": partial(read_optional_integer, low=1),
    "truncate_prompt_tokens": _read_truncation,
    "pair_start": partial(read_optional_integer, low=0),
}


@checked(_READERS)
@dataclass(slots=True)
class PoolingParams:
    """What to compute of a prompt's hidden states: vLLM's fields. Checked when they are set; raises RequestError.

    task: "embed", "classify", "score", "token_embed" or "token_classify" (a vector, or the classes, of each token);
        None: set by the method that is called.
    normalize: scale an embedding to unit length; None: as the model was made for.
    dimensions: keep this many elements of an embedding, then normalise (models trained for it, "Matryoshka").
    use_activation: apply softmax or sigmoid to the outputs of a classification head; None: yes. Of an embedding, the
        same as `normalize`.
    truncate_prompt_tokens: keep this many tokens from the start of the prompt (-1: as many as fit).
    skip_reading_prefix_cache: compute the whole prompt.
    pair_start: index of the first token of the second text of a pair; set by `score`.
    alignment: compute this of a prompt in place of vectors, with the task "token_embed"; set by transcriptions.
    """

    task: PoolingTask | None = None
    normalize: bool | None = None
    dimensions: int | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    skip_reading_prefix_cache: bool | None = None
    pair_start: int | None = None
    alignment: Alignment | None = None
