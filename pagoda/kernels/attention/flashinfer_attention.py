"""FlashInfer's attention over the paged cache: its batch decode and batch prefill wrappers, over pages as ours (HND).

A wrapper plans on the host how a step's work is divided, once for all layers that have the same shapes and block table.
Sources: flashinfer.decode and flashinfer.prefill, version 0.7.2.
"""

from collections import deque
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from typing import Any, ClassVar

import numpy as np
import torch

from pagoda.base.errors import ConfigError
from pagoda.kernels.attention.backend_memory import BackendMemory
from pagoda.kernels.attention.paged_op import PagedAttentionOp
from pagoda.kernels.batch import AttentionMetadata, KVLayer, OnHost
from pagoda.kernels.transfer import to_device

_WORKSPACE_BYTES = 384 << 20  # for partial results; FlashInfer raises an error if a plan needs more
_MOST_PLANS = 8  # of each kind of wrapper
_PLAN_BYTES = 8 << 20  # that a wrapper allocates on the GPU; as many are pinned on the host


@dataclass(frozen=True, slots=True)
class _Shape:
    """What a plan is for, apart from the step."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int
    softcap: float


class _Kind(Enum):
    """Which wrapper a step takes. For decodes, tensor cores take any number of query heads per KV head."""

    PREFILL = "prefill"
    DECODE = "decode"
    GROUPED_DECODE = "grouped decode"

    @classmethod
    def of(cls, metadata: AttentionMetadata, shape: _Shape) -> "_Kind":
        if metadata.max_query_len > 1:
            return cls.PREFILL
        return cls.GROUPED_DECODE if shape.num_heads > shape.num_kv_heads else cls.DECODE


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """A wrapper and what it was planned for.   copied: when the plan has left the host's memory; None on a CPU."""

    wrapper: Any
    metadata: AttentionMetadata
    shape: _Shape
    copied: torch.cuda.Event | None


class FlashInferAttention:
    """See AttentionBackend.

    Steps that are padded for CUDA graphs, those of few tokens per row, are left to our own kernels, because a plan
    cannot be recorded: FlashInfer computes the others.
    """

    head_dims: ClassVar[frozenset[int]] = frozenset((64, 128, 256))
    has_softcap: ClassVar[bool] = True
    memory: ClassVar[BackendMemory] = BackendMemory(_WORKSPACE_BYTES, len(_Kind) * _MOST_PLANS * _PLAN_BYTES)

    def __init__(self, own: PagedAttentionOp, device: torch.device) -> None:
        """Allocate the workspace. Raises ConfigError if FlashInfer is not installed."""
        try:
            self._library: Any = import_module("flashinfer")
        except ImportError as error:
            raise ConfigError(
                f"attention_backend='flashinfer' needs FlashInfer: pip install 'pagoda-llm[flashinfer]', or take "
                f"attention_backend='auto' ({error})"
            ) from error
        self._own = own
        self._device = device
        # Shared by all wrappers, which run one after the other. Allocated here so that a GPU's KV pools are sized next
        # to it, whichever steps are tried for that.
        self._workspace = torch.zeros(self.memory.at_start, dtype=torch.uint8, device=device)
        self._plans: dict[_Kind, deque[_Plan]] = {kind: deque() for kind in _Kind}

    def attention(
        self,
        q: torch.Tensor,
        cache: KVLayer,
        metadata: AttentionMetadata,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> torch.Tensor:
        """See reference.attention."""
        if metadata.on_host is None:
            return self._own(q, cache, metadata, scale, window, softcap)
        num_tokens, num_heads, head_dim = q.shape
        shape = _Shape(num_heads, cache.k.shape[1], head_dim, scale, window, softcap)
        wrapper = self._planned(metadata, metadata.on_host, shape, q.dtype)
        return wrapper.run(q.contiguous(), (cache.k, cache.v)).reshape(num_tokens, num_heads * head_dim)

    def _planned(self, metadata: AttentionMetadata, on_host: OnHost, shape: _Shape, dtype: torch.dtype) -> Any:
        """Return a wrapper with a plan for this step."""
        kind = _Kind.of(metadata, shape)
        plans, copied = self._plans[kind], None
        for plan in reversed(plans):
            if plan.metadata is metadata and plan.shape == shape:
                return plan.wrapper
        if len(plans) < _MOST_PLANS:
            wrapper = self._new_wrapper(kind)
        else:
            oldest = plans.popleft()
            wrapper, copied = oldest.wrapper, oldest.copied
            if copied is not None:
                copied.synchronize()  # planning writes to the pinned memory from which the last plan is copied
        indptr, page_ids, last_page_len = pages_of(on_host, metadata.block_size)
        (indices,) = to_device([page_ids], self._device)
        starts, ends, lasts = (self._pinned(array) for array in (on_host.query_start, indptr, last_page_len))
        options = {
            "sm_scale": shape.scale,
            "window_left": shape.window - 1,  # without the query itself; -1: all
            "logits_soft_cap": shape.softcap or None,
            "q_data_type": dtype,
            "kv_data_type": dtype,
        }
        sizes = shape.num_heads, shape.num_kv_heads, shape.head_dim, metadata.block_size
        if kind is not _Kind.PREFILL:
            wrapper.plan(ends, indices, lasts, *sizes, **options)
        else:
            wrapper.plan(starts, ends, indices, lasts, *sizes, causal=True, **options)
        if self._device.type == "cuda":
            copied = copied or torch.cuda.Event()
            copied.record()
        plans.append(_Plan(wrapper, metadata, shape, copied))
        return wrapper

    def _pinned(self, array: np.ndarray) -> torch.Tensor:
        """Return the array as a tensor on the host, whose copy to a GPU does not wait for the GPU."""
        tensor = torch.from_numpy(array)
        return tensor.pin_memory() if self._device.type == "cuda" else tensor

    def _new_wrapper(self, kind: "_Kind") -> Any:
        if kind is _Kind.PREFILL:
            return self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND")
        return self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "HND", use_tensor_cores=kind is _Kind.GROUPED_DECODE
        )


def pages_of(on_host: OnHost, block_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the pages of all rows, one after the other, as FlashInfer takes them.

    indptr: int32 [num_rows + 1], row i's pages are indices[indptr[i] : indptr[i + 1]].   indices: int32.
    last_page_len: int32 [num_rows], tokens in each row's last page, 1 .. block_size.
    """
    counts = -(-on_host.seq_lens // block_size)
    indptr = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=indptr[1:])
    table = on_host.block_table
    indices = table[np.arange(table.shape[1]) < counts[:, None]]
    return indptr, indices, on_host.seq_lens - (counts - 1) * block_size
