"""A stand-in for FlashInfer: its two paged wrappers as version 0.7.2 documents them, computed in plain torch."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

PLAN_BYTES = 8 << 20
"""That each wrapper allocates on the GPU for its plans. The stand-in allocates none."""


@dataclass
class Planned:
    """What `run` computes."""

    query_start: torch.Tensor
    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    causal: bool
    sm_scale: float
    window_left: int
    softcap: float


class _Wrapper:
    made: ClassVar[list["_Wrapper"]]

    def __init__(self, workspace: torch.Tensor, kv_layout: str = "NHD") -> None:
        assert kv_layout == "HND"
        assert workspace.dtype == torch.uint8
        assert not workspace.any(), "the workspace must be zeroed for its first use"
        self.planned: Planned | None = None
        self.num_plans = self.num_runs = 0
        self.made.append(self)

    def _set(self, planned: Planned, q_data_type: torch.dtype, kv_data_type: torch.dtype) -> None:
        indptr, last = planned.indptr, planned.last_page_len
        for tensor in (planned.query_start, indptr, planned.indices, last):
            assert tensor.dtype == torch.int32
            assert tensor.dim() == 1
        for tensor in (planned.query_start, indptr, last):
            assert tensor.device.type == "cpu", "planning on the host waits for tensors on the device"
        assert len(indptr) == len(last) + 1 == len(planned.query_start)
        assert indptr[0] == 0
        assert indptr[-1] == len(planned.indices)
        assert bool((indptr.diff() > 0).all())
        assert 1 <= int(last.min()) <= int(last.max()) <= planned.page_size
        assert planned.num_qo_heads % planned.num_kv_heads == 0
        self.dtypes = q_data_type, kv_data_type
        self.planned = planned
        self.num_plans += 1

    def run(self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """q [T, num_qo_heads, head_dim]; K and V [num_pages, num_kv_heads, page_size, head_dim]."""
        p = self.planned
        assert p is not None
        self.num_runs += 1
        keys, values = paged_kv_cache
        assert q.shape == (int(p.query_start[-1]), p.num_qo_heads, p.head_dim)
        for pages in paged_kv_cache:
            assert pages.shape[1:] == (p.num_kv_heads, p.page_size, p.head_dim)
        assert (q.dtype, keys.dtype) == self.dtypes
        out = torch.empty_like(q)
        for row in range(len(p.last_page_len)):
            pages = p.indices[int(p.indptr[row]) : int(p.indptr[row + 1])].long()
            length = (len(pages) - 1) * p.page_size + int(p.last_page_len[row])
            begin, end = int(p.query_start[row]), int(p.query_start[row + 1])
            at = torch.arange(length - (end - begin), length)
            for head in range(p.num_qo_heads):
                of_kv = head * p.num_kv_heads // p.num_qo_heads
                k, v = (each[pages, of_kv].reshape(-1, p.head_dim)[:length].float() for each in (keys, values))
                scores = q[begin:end, head].float() @ k.T * p.sm_scale
                if p.softcap > 0:
                    scores = p.softcap * (scores / p.softcap).tanh()
                key_at = torch.arange(length)
                visible = key_at <= at[:, None] if p.causal else torch.ones(end - begin, length, dtype=torch.bool)
                if p.window_left >= 0:
                    visible &= key_at >= at[:, None] - p.window_left
                out[begin:end, head] = (scores.where(visible, -torch.inf).softmax(1) @ v).to(q.dtype)
        return out


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    """One query per row."""

    made: ClassVar[list[_Wrapper]] = []

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
    ) -> None:
        assert not use_cuda_graph
        super().__init__(float_workspace_buffer, kv_layout)
        self.use_tensor_cores = use_tensor_cores

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        sm_scale: float | None = None,
    ) -> None:
        query_start = torch.arange(len(indptr), dtype=torch.int32)
        assert self.use_tensor_cores == (num_qo_heads > num_kv_heads)
        assert sm_scale is not None
        planned = Planned(
            query_start, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, True,
            sm_scale, window_left, logits_soft_cap or 0.0,
        )  # fmt: skip
        self._set(planned, q_data_type, kv_data_type)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    """Any number of queries per row, which are its last tokens."""

    made: ClassVar[list[_Wrapper]] = []

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
    ) -> None:
        assert sm_scale is not None
        planned = Planned(
            qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
            head_dim_qk, page_size, causal, sm_scale, window_left, logits_soft_cap or 0.0,
        )  # fmt: skip
        self._set(planned, q_data_type, kv_data_type)
