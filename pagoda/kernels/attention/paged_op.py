"""The signature of attention over the cache, with torch's tensors."""

from typing import Protocol

import torch

from pagoda.kernels.batch import AttentionMetadata, KVLayer


class PagedAttentionOp(Protocol):
    """`attention` of the op table."""

    def __call__(
        self,
        q: torch.Tensor,
        cache: KVLayer,
        metadata: AttentionMetadata,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> torch.Tensor:
        """See reference.attention."""
        ...
