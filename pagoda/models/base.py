"""Model: the root of a tree, as the code that runs a forward sees it."""

from collections.abc import Sequence

from pagoda.base.model_spec import ModelSpec
from pagoda.core.kv_specs import KVGroupSpec
from pagoda.layers.module import Module
from pagoda.ops.batch import ForwardBatch, KVLayer
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import Tensor


class Model(Module):
    """A tree of layers and the order in which they compute. It receives the ops with every call and stores none.

    kv_groups: which attentions share a block table; a batch has one AttentionMetadata for each.
    """

    spec: ModelSpec
    kv_groups: tuple[KVGroupSpec, ...]

    def forward(self, ops: ForwardOps, batch: ForwardBatch, kv: Sequence[KVLayer]) -> Tensor:
        """Return the final hidden states of the batch's tail, [num_tail, hidden], normed.

        Writes the K and V of all its tokens to `kv` (one per attention, in the order of the tree). Computes with `ops`
        alone, so that a recorder given as `ops` records the forward.
        """
        raise NotImplementedError

    def compute_logits(self, ops: ForwardOps, hidden: Tensor) -> Tensor:
        """Rows of `forward`'s result [S, hidden] -> float32 [S, vocab]."""
        raise NotImplementedError
