"""Model: the root of a tree, as the code that runs a forward sees it; and the layers after its pooling."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pagoda.base.errors import ConfigError
from pagoda.base.model_spec import ModelSpec
from pagoda.base.pooling import ModelTasks, PoolingPlan
from pagoda.base.ranks import RankPlace
from pagoda.core.kv_specs import KVGroupKind, KVGroupSpec
from pagoda.layers.linear import Linear
from pagoda.layers.mlp import Activation, activate
from pagoda.layers.module import Module
from pagoda.ops.batch import ForwardBatch, KVLayer
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import RankGroup, Tensor

if TYPE_CHECKING:
    from pagoda.models.encoder import Encoder

TOKEN_TYPES = "token_types"
"""Input of a batch: which text of a pair each token belongs to, 0 or 1."""


POSITION_KINDS = 3
"""Where a token has positions of several kinds, it has a time, a row and a column. They are equal but for images."""


class Model(Module):
    """A tree of layers and the order in which they compute. It receives the ops with every call and stores none.

    kv_groups: which attentions share a block table; a batch has one AttentionMetadata for each.
    pooling: how the hidden states of a pooled prompt become its result.   dense: applied to an embedding, in order.
    is_causal: False: a token attends to all tokens, so that a prompt is computed in one chunk and nothing is cached.
    generates: False: there is no head for tokens, and `compute_logits` is never called.
    num_token_types: where it is not 0, a batch has the input TOKEN_TYPES: int32 [num_tokens], below this number.
    takes_embeds: prompts may be given as embeddings (see Embedding).
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
    position_runs: tuple[int, ...] = ()
    dense: Sequence["PoolingLayer"] = ()

    def forward(self, ops: ForwardOps, batch: ForwardBatch, kv: Sequence[KVLayer]) -> Tensor:
        """Return the final hidden states of the batch's tail, [num_tail, hidden], normed.

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


class Dense(PoolingLayer):
    """activation(linear(x))."""

    def __init__(self, spec: DenseSpec) -> None:
        self.linear = Linear(spec.inputs, spec.outputs, spec.bias, quantizable=False)
        self.folder = spec.folder
        self.size = spec.outputs
        self.activation = spec.activation

    def __call__(self, ops: ForwardOps, pooled: Tensor) -> Tensor:
        return activate(ops, self.activation, self.linear(ops, pooled))
