"""Model: the root of a tree, as the code that runs a forward sees it; Encoder: a model in a decoder's tree.

What both need is here, too: how the items of an encoder are laid out, and the layers after a pooling.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pagoda.base.errors import ConfigError, RequestError
from pagoda.base.model_spec import ModelSpec
from pagoda.base.pooling import ModelTasks, PoolingPlan
from pagoda.base.ranks import RankPlace
from pagoda.core.kv import KVGroupKind, KVGroupSpec
from pagoda.core.request import MediaItem, Request
from pagoda.layers.linear import Linear
from pagoda.layers.module import Module
from pagoda.ops.batch import ForwardBatch, KVLayer
from pagoda.ops.declare import Activation, Domain
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import RankGroup, Tensor

TOKEN_TYPES = "token_types"
"""Input of a batch: which text of a pair each token belongs to, 0 or 1."""

POSITION_KINDS = 3
"""Where a token has positions of several kinds, it has a time, a row and a column. They are equal but for images."""

FEATURES = "features"
"""Input of an encoder's batch: what it reads, in the compute type."""

ENCODER_PIECE_TOKENS = 4096
"""Tokens of an encoder that are computed at once, if no single item has more: many enough to read weights seldom."""


class Model(Module):
    """A tree of layers and the order in which they compute. It receives the ops with every call and stores none.

    kv_groups: which attentions share a block table; a batch has one AttentionMetadata for each.
    pooling: how the hidden states of a pooled prompt become its result.   dense: applied to an embedding, in order.
    is_causal: False: a token attends to all tokens, so that a prompt is computed in one chunk and nothing is cached.
    generates: False: there is no head for tokens, and `compute_logits` is never called.
    num_token_types: where it is not 0, a batch has the input TOKEN_TYPES: int32 [num_tokens], below this number.
    takes_embeds: prompts may be given as embeddings (see Embedding).
    cpu_only: what of it runs on a CPU alone, "" for nothing.
    position_runs: of a model whose tokens have positions of several kinds: the kind that each of the equal runs of a
        head's pairs takes (see ForwardOps.rotary); a batch's positions are int32 [num_tokens, runs]. Else empty.
    """

    spec: ModelSpec
    kv_groups: tuple[KVGroupSpec, ...]
    pooling: PoolingPlan = PoolingPlan()
    is_causal: bool = True
    generates: bool = True
    num_token_types: int = 0
    takes_embeds: bool = False
    cpu_only: str = ""
    position_runs: tuple[int, ...] = ()
    dense: Sequence["PoolingLayer"] = ()

    def forward(self, ops: ForwardOps, batch: ForwardBatch, kv: Sequence[KVLayer]) -> Tensor:
        """Return the final hidden states of the batch's output rows, [num_outputs, hidden], normed.

        Writes the K and V of all its tokens to `kv` (one per attention, in the order of the tree). Computes with `ops`
        alone, so that a recorder given as `ops` records the forward.
        """
        raise NotImplementedError

    def compute_logits(self, ops: ForwardOps, hidden: Tensor) -> Tensor:
        """Rows of `forward`'s result [S, hidden] -> float32 [S, vocab]."""
        raise NotImplementedError

    def take_stage(self, place: RankPlace, ranks: RankGroup) -> None:
        """Keep the layers of one stage, before loading; the forward gets and sends what is between the stages.

        Raises ConfigError if the model cannot be divided into so many.
        """
        raise ConfigError(
            f"pipeline_parallel_size={place.num_stages}: models of architecture {self.spec.architecture!r} cannot be "
            f"divided into stages; leave it out, or take tensor_parallel_size={place.num_stages} instead"
        )

    @property
    def media_encoder(self) -> "Encoder | None":
        """The part of the tree that computes images or audio; None for a model that reads neither."""
        return None

    def media_positions(self, grid: tuple[int, ...]) -> tuple[np.ndarray, int]:
        """Return the positions of an item's tokens, and how many positions it takes from the tokens after it.

        int32 [tokens, POSITION_KINDS], counted from that of its first. Only of a model with `position_runs`.
        """
        raise NotImplementedError

    @property
    def cross_groups(self) -> tuple[int, ...]:
        """The KV groups of cross attention, which an encoder-decoder model has."""
        return tuple(index for index, group in enumerate(self.kv_groups) if group.kind is KVGroupKind.CROSS)

    @property
    def state_groups(self) -> tuple[int, ...]:
        """The KV groups of recurrent layers."""
        return tuple(index for index, group in enumerate(self.kv_groups) if group.kind is KVGroupKind.STATE)

    @property
    def has_states(self) -> bool:
        """Whether it has recurrent layers, whose states are in the KV cache."""
        return bool(self.state_groups)

    @property
    def tasks(self) -> ModelTasks:
        """What the model can be asked for."""
        size = self.dense[-1].size if self.dense else self.spec.hidden_size
        return ModelTasks(self.pooling, self.generates, self.is_causal, size)

    def embed(self, ops: ForwardOps, pooled: Tensor) -> Tensor:
        """Pooled hidden states [S, hidden] -> embeddings [S, size], not yet normalised, in the same dtype."""
        for layer in self.dense:
            pooled = layer(ops, pooled)
        return pooled

    def classify(self, ops: ForwardOps, pooled: Tensor) -> Tensor:
        """Pooled hidden states [S, hidden] -> float32 [S, labels], before the activation."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, eq=False)
class ItemArray:
    """One input of an item: floats, in the compute type once they are in a batch, or integers.

    values: [rows] or [rows, n].   domain: what the rows are.
    indexes: of integers that are numbers of rows of this domain in the item, -1 for none; those of further items of a
        batch are moved up. None: of other integers.
    """

    values: np.ndarray
    domain: Domain = Domain.TOKENS
    indexes: Domain | None = None


@dataclass(frozen=True, slots=True, eq=False)
class EncoderItem:
    """One item as the encoder computes it.

    segments: how many consecutive tokens attend to each other, int32 [segments], for each kind of attention there is;
        the first is `batch.metadata[0]`. They add up to the item's tokens.
    num_outputs: rows that the encoder returns.
    inputs: by name.   positions: int32 [tokens], or [tokens, runs] (see ForwardOps.rotary); None: they count up.
    """

    segments: tuple[np.ndarray, ...]
    num_outputs: int
    inputs: Mapping[str, ItemArray] = field(default_factory=dict[str, ItemArray])
    positions: np.ndarray | None = None

    @property
    def num_tokens(self) -> int:
        return int(self.segments[0].sum())

    def num_rows(self, domain: Domain) -> int:
        """Return how many rows of a domain the item has."""
        if domain is Domain.TOKENS:
            return self.num_tokens
        if domain is Domain.OUTPUTS:
            return self.num_outputs
        return next(len(array.values) for array in self.inputs.values() if array.domain is domain)


class Encoder(Model):
    """A model of tokens that attend both ways, of which a decoder's tree has one (`Model.media_encoder`).

    `forward` computes a batch of items. Its batch has the inputs of its items, positions, and a metadata for each kind
    of attention; no token ids. It returns the items' outputs, one after the other: a row per token, or per row of the
    batch's output rows where it makes fewer.
    output_size: elements of each of its outputs.   reads_text: its features are token ids, [tokens, 1]; `start` is what
    the decoder's answer to a text begins with.
    whole_items: all rows of an item must be in one chunk of the decoder, because they attend to each other there.
    tokens_per_output: of its own tokens, for each row that it returns.
    """

    output_size: int
    tokens_per_output: int = 1
    reads_text: bool = False
    start: tuple[int, ...] = ()
    kv_groups = ()
    is_causal = False
    generates = False
    whole_items: bool = False
    takes_adapters = False

    def largest_item(self) -> MediaItem:
        """Return the largest item there can be, with features of zeros."""
        raise NotImplementedError

    def num_outputs(self, shape: Sequence[int], grid: tuple[int, ...]) -> int:
        """Return how many rows an item becomes.   shape: of its features.

        Raises RequestError for features that the encoder does not take.
        """
        raise NotImplementedError

    def check_values(self, features: np.ndarray) -> None:
        """Raise RequestError for features, of a shape that `num_outputs` accepts, whose values cannot be read."""

    def item(self, features: np.ndarray, grid: tuple[int, ...]) -> EncoderItem:
        """Return what the encoder computes of an item that `num_outputs` accepts."""
        raise NotImplementedError

    def has_own_embedding(self, grid: tuple[int, ...]) -> np.ndarray | None:
        """Return which of an item's tokens keep their embedding, bool [outputs]: those outputs are not read.

        None: all outputs take the place of their tokens'.
        """
        return None


def check_finite(media: Sequence[MediaItem]) -> None:
    """Raise RequestError for features that are not all finite numbers."""
    for item in media:
        if item.features is not None and not np.isfinite(item.features).all():
            raise RequestError("a media item needs features of finite numbers", "media")


def check_media(request: Request, encoder: Encoder | None, crosses: bool) -> None:
    """Raise RequestError for encoder inputs that the model cannot read, and for a request that lacks its own.

    It does not look at the numbers of images and sounds, which may be many: `check_finite` does, where they are made.
    encoder: None for a model that reads none.   crosses: it is of an encoder-decoder model.
    """
    media, num_tokens = request.media, request.num_prompt_tokens
    if encoder is None and media:
        raise RequestError("this model reads neither images nor audio: send text", "media")
    if encoder is None:
        return
    if crosses and not media:
        raise RequestError("this model needs an encoder input besides its prompt (audio, for Whisper)", "media")
    if crosses and len(media) > 1:
        raise RequestError(f"this model reads one encoder input per request, not {len(media)}", "media")
    end = 0
    for item in media:
        features = item.features
        if features is None or features.dtype != np.float32:
            raise RequestError("a media item needs features, in float32", "media")
        length = encoder.num_outputs(features.shape, item.grid)
        encoder.check_values(features)
        if item.length != length:
            raise RequestError(f"a media item has {item.length} tokens, but its features give {length}", "media")
        if not crosses and (item.offset < end or item.offset + length > num_tokens):
            raise RequestError(
                f"a media item of {length} tokens at {item.offset} is outside of the prompt of {num_tokens} tokens, or "
                "within another",
                "media",
            )
        end = item.offset + length
    if request.encoder_len != (sum(item.length for item in media) if crosses else 0):
        raise RequestError(f"encoder_len={request.encoder_len} is not what the encoder inputs have", "media")


class PoolingLayer(Module):
    """A layer of an embedding model after the pooling.

    folder: of its weights, within the model's.   size: elements of its output.
    """

    folder: str
    size: int

    def __call__(self, ops: ForwardOps, pooled: Tensor) -> Tensor:
        """[S, in] -> [S, out]."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """One layer.   folder: of its weights, within the model's."""

    folder: str
    inputs: int
    outputs: int
    bias: bool
    activation: Activation


class DensePooling(PoolingLayer):
    """activation(linear(x))."""

    def __init__(self, spec: DenseSpec) -> None:
        self.linear = Linear(spec.inputs, spec.outputs, spec.bias, quantizable=False)
        self.folder = spec.folder
        self.size = spec.outputs
        self.activation = spec.activation

    def __call__(self, ops: ForwardOps, pooled: Tensor) -> Tensor:
        return ops.activate(self.linear(ops, pooled), self.activation)
