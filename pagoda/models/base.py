"""Model: what runs a forward asks of one."""

from collections.abc import Sequence
from typing import Protocol

from pagoda.base.model_spec import ModelSpec
from pagoda.core.kv_specs import KVGroupSpec
from pagoda.ops.batch import ForwardBatch, KVLayer
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import Tensor


class Model(Protocol):
    """A loaded model: weights and the order of its ops. It receives the ops with every call and keeps none.

    kv_groups: which layers share a block table; a batch has one AttentionMetadata for each.
    """

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def kv_groups(self) -> tuple[KVGroupSpec, ...]: ...

    def forward(self, ops: ForwardOps, batch: ForwardBatch, kv: Sequence[KVLayer]) -> Tensor:
        """Final hidden states of the batch's tail, [num_tail, hidden], normed.

        Writes the K and V of all its tokens to `kv` (one per model layer). Computes with `ops` alone, so that a
        recorder given as `ops` records the forward.
        """
        ...

    def compute_logits(self, ops: ForwardOps, hidden: Tensor) -> Tensor:
        """Rows of `forward`'s result [S, hidden] -> float32 [S, vocab]."""
        ...
