"""Model: what the model runner asks of one."""

from collections.abc import Sequence
from typing import Protocol

import torch

from pagoda.base.model_spec import ModelSpec
from pagoda.core.kv_specs import KVGroupSpec
from pagoda.kernels.batch import ForwardBatch
from pagoda.kernels.ops import KVLayer, Ops


class Model(Protocol):
    """A loaded model.

    ops: every computation of `forward` and `compute_logits` goes through it; replacing it by a recorder records the
    layer program.   kv_groups: which layers share a block table; a batch brings one AttentionMetadata for each.
    """

    ops: Ops

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def kv_groups(self) -> tuple[KVGroupSpec, ...]: ...

    def forward(self, batch: ForwardBatch, kv: Sequence[KVLayer]) -> torch.Tensor:
        """Final hidden states of the batch's tail, [num_tail, hidden], normed.

        The K and V of all its tokens are in `kv` (one per model layer) afterwards.
        """
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows of `forward`'s result [S, hidden] -> float32 [S, vocab]."""
        ...
