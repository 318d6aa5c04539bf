"""The records of `pagoda.ops.batch` with torch tensors in them: what the worker builds and the kernels read."""

from typing import TYPE_CHECKING

from pagoda.ops import batch

if TYPE_CHECKING:
    from typing import TypeAlias

    import torch

    KVLayer: TypeAlias = batch.KVLayer[torch.Tensor]
    AttentionMetadata: TypeAlias = batch.AttentionMetadata[torch.Tensor]
    OutputRows: TypeAlias = batch.OutputRows[torch.Tensor]
    ForwardBatch: TypeAlias = batch.ForwardBatch[torch.Tensor]
    Input: TypeAlias = batch.Input[torch.Tensor]
else:
    # The classes themselves: creating an instance through a subscripted alias sets an attribute on it, which a frozen
    # class with slots refuses.
    from pagoda.ops.batch import AttentionMetadata, ForwardBatch, Input, KVLayer, OutputRows

__all__ = ["AttentionMetadata", "ForwardBatch", "Input", "KVLayer", "OutputRows"]
