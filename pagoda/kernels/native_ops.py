"""NativeOps: the compiled CPU kernels, called through ctypes."""

import os
from collections.abc import Callable, Sequence
from ctypes import CDLL, c_bool, c_float, c_int, c_int32, c_int64, c_void_p
from functools import partial

import torch

from pagoda.base.errors import ConfigError
from pagoda.kernels.batch import AttentionMetadata, KVLayer
from pagoda.kernels.linear.packed import PackedLinears, PackedWeight
from pagoda.kernels.linear.quantize import QuantizedWeight
from pagoda.kernels.moe import by_expert
from pagoda.kernels.moe.reference import ExpertList
from pagoda.kernels.native.dtypes import DTYPE_CODES
from pagoda.kernels.native.library import NativeLibrary
from pagoda.kernels.rows import reference as rows
from pagoda.kernels.sampling.native import NativeSampling
from pagoda.ops.tensor import ExpertWeights, LinearWeight

_INT, _LONG, _FLOAT, _PTR = c_int, c_int64, c_float, c_void_p
MAX_HEAD_DIM = 512
_Kernel = Callable[..., None]


def _bind(functions: CDLL, name: str, *argtypes: type) -> _Kernel:
    """The C function `name`; with its argument types set, ctypes converts plain ints and floats in one step."""
    function = functions[name]
    function.argtypes = argtypes
    function.restype = None
    return function


def check_page_shape(head_dim: int, block_size: int) -> None:
    """Raises ConfigError for pages that the native kernels cannot read and write."""
    if head_dim % 16 or head_dim > MAX_HEAD_DIM or block_size % 8:
        raise ConfigError(
            f"native attention takes head sizes that are multiples of 16 up to {MAX_HEAD_DIM} and block sizes that are "
            f"multiples of 8, not {head_dim} and {block_size}; choose kernels='torch' or another block_size"
        )


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class NativeOps:
    """`Ops` on a CPU. Every row's bits depend on that row alone.

    threads: how many threads a kernel uses; they are the kernels' own (native/parallel.h), none of torch's.
    """

    name = "native"

    def __init__(self, library: NativeLibrary, threads: int) -> None:
        self.library = library
        self.threads = threads
        self._pin_thread = library.functions["pagoda_pin_thread"]
        self._pin_thread.argtypes, self._pin_thread.restype = (_INT, _PTR, _INT), c_bool
        self.linears = PackedLinears(library, threads)
        sampling = NativeSampling(library, threads)
        self.best_tokens = sampling.best_tokens
        self.sample = sampling.sample
        self.top_logprobs = sampling.top_logprobs
        bind = partial(_bind, library.functions)
        norm_shape = (*(_LONG,) * 5, _FLOAT, _INT, _INT)
        self._rms_norm = bind("pagoda_rms_norm", _INT, *(_PTR,) * 5, *norm_shape)
        self._embedding = bind("pagoda_embedding", _INT, *(_PTR,) * 3, _LONG, _LONG, _FLOAT, _INT)
        self._rotary = bind("pagoda_rotary", _INT, *(_PTR,) * 5, *(_LONG,) * 4, _INT)
        self._write_kv = bind("pagoda_write_kv", _INT, _INT, *(_PTR,) * 7, *(_LONG,) * 6, *(_PTR,) * 3, _INT)
        self._copy_blocks = bind("pagoda_copy_blocks", _PTR, _PTR, _LONG, _LONG, _INT)
        self._attention = bind(
            "pagoda_attention",
            *(_INT, _INT, *(_PTR,) * 9, _LONG, _LONG),
            *(*(_INT,) * 6, _FLOAT, _INT, _FLOAT, _INT),
        )
        self._add = bind("pagoda_add", _INT, *(_PTR,) * 3, _LONG, _INT)
        self._silu_mul = bind("pagoda_silu_mul", _INT, _PTR, _PTR, _LONG, _LONG, _INT)
        self._gelu_tanh_mul = bind("pagoda_gelu_tanh_mul", _INT, _PTR, _PTR, _LONG, _LONG, _INT)
        self._softcap = bind("pagoda_softcap", _INT, _PTR, _PTR, _LONG, _FLOAT, _INT)

    def pin_threads(self, cores: Sequence[Sequence[int]]) -> bool:
        """Keep the calling thread on the first of `cores` (each its CPUs) and the kernels' others on the rest.

        False where the system does not let us; none is pinned then.
        """
        try:
            before = os.sched_getaffinity(0)
            # The caller last: threads that start after it was pinned would be pinned with it.
            pinned = all(self._pin_worker(thread, cpus) for thread, cpus in enumerate(cores) if thread)
            if pinned:
                os.sched_setaffinity(0, cores[0])
        except (AttributeError, OSError):
            return False
        if not pinned:
            for thread in range(1, len(cores)):
                self._pin_worker(thread, sorted(before))
        return pinned

    def _pin_worker(self, thread: int, cpus: Sequence[int]) -> bool:
        return self._pin_thread(thread, (c_int32 * len(cpus))(*cpus), len(cpus))

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> LinearWeight:
        return self.linears.prepare(weight, bias)

    def prepare_quantized_linear(
        self, weight: QuantizedWeight, dtype: torch.dtype, bias: torch.Tensor | None = None
    ) -> LinearWeight:
        return self.linears.prepare_quantized(weight, bias)

    def linear(self, x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        assert isinstance(weight, PackedWeight)
        return self.linears.linear(x, weight)

    def logits(self, x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        assert isinstance(weight, PackedWeight)
        return self.linears.logits(x, weight)

    def prepare_experts(self, experts: Sequence[LinearWeight]) -> ExpertWeights:
        return ExpertList(tuple(experts))

    def moe(
        self,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        gate_up: ExpertWeights,
        down: ExpertWeights,
        top_k: int,
        renormalize: bool,
    ) -> torch.Tensor:
        assert isinstance(gate_up, ExpertList)
        assert isinstance(down, ExpertList)
        return by_expert.moe(x, router_logits, gate_up, down, top_k, renormalize, self.linear, self.silu_mul)

    def embedding(self, token_ids: torch.Tensor, table: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        if scale != 1.0:
            scale = torch.tensor(scale, dtype=table.dtype).item()
        assert token_ids.dtype == torch.int32
        assert table.is_contiguous()
        tokens, hidden = token_ids.shape[0], table.shape[1]
        out = table.new_empty((tokens, hidden))
        self._embedding(
            DTYPE_CODES[table.dtype], token_ids.data_ptr(), table.data_ptr(), out.data_ptr(), tokens, hidden, scale,
            self.threads,
        )  # fmt: skip
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool = False) -> torch.Tensor:
        assert weight.dtype == x.dtype
        shape = x.shape
        if len(shape) == 2:
            outer, inner, outer_stride, inner_stride = shape[0], 1, x.stride(0), 0
        elif len(shape) == 3:
            outer, inner, outer_stride, inner_stride = shape[0], shape[1], x.stride(0), x.stride(1)
        else:
            x = x.contiguous()
            outer, inner, outer_stride, inner_stride = x.numel() // shape[-1], 1, shape[-1], 0
        assert x.stride(-1) == 1
        out = x.new_empty(shape)
        self._rms_norm(
            DTYPE_CODES[x.dtype], x.data_ptr(), None, weight.data_ptr(), out.data_ptr(), None,
            outer, inner, outer_stride, inner_stride, shape[-1], eps, unit_offset, self.threads,
        )  # fmt: skip
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert x.is_contiguous()
        assert residual.is_contiguous()
        assert weight.dtype == x.dtype == residual.dtype
        tokens, hidden = x.shape
        out, total = torch.empty_like(x), torch.empty_like(x)
        self._rms_norm(
            DTYPE_CODES[x.dtype], x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(),
            total.data_ptr(), tokens, 1, hidden, 0, hidden, eps, unit_offset, self.threads,
        )  # fmt: skip
        return out, total

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        assert x.is_contiguous()
        assert residual.is_contiguous()
        assert x.shape == residual.shape
        out = torch.empty_like(x)
        self._add(
            DTYPE_CODES[x.dtype], x.data_ptr(), residual.data_ptr(), out.data_ptr(), x.numel(), self.threads
        )  # fmt: skip
        return out

    def rotary(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._rotate(q, positions, cos, sin), self._rotate(k, positions, cos, sin)

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        tokens, heads, head_dim = x.shape
        assert x.stride(1) == head_dim
        assert x.stride(2) == 1
        assert positions.dtype == torch.int32
        out = x.new_empty((tokens, heads, head_dim))
        self._rotary(
            DTYPE_CODES[x.dtype], x.data_ptr(), out.data_ptr(), positions.data_ptr(), cos.data_ptr(), sin.data_ptr(),
            tokens, heads, head_dim, x.stride(0), self.threads,
        )  # fmt: skip
        return out

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, cache: KVLayer, metadata: AttentionMetadata) -> None:
        self._write(k, v, cache, metadata, None, None, None)

    def rotary_write_kv(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: KVLayer,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        self._write(k, v, cache, metadata, positions.data_ptr(), cos.data_ptr(), sin.data_ptr())
        return self._rotate(q, positions, cos, sin)

    def _write(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: KVLayer,
        metadata: AttentionMetadata,
        positions: int | None,
        cos: int | None,
        sin: int | None,
    ) -> None:
        tokens, kv_heads, head_dim = k.shape
        check_page_shape(head_dim, metadata.block_size)
        assert k.dtype == v.dtype
        assert k.dtype == cache.k.dtype or cache.k_scale is not None
        assert metadata.slot_mapping.dtype == torch.int64
        assert k.stride(1) == v.stride(1) == head_dim
        assert k.stride(2) == v.stride(2) == 1
        self._write_kv(
            DTYPE_CODES[k.dtype], DTYPE_CODES[cache.k.dtype], k.data_ptr(), v.data_ptr(),
            cache.k.data_ptr(), cache.v.data_ptr(), _pointer(cache.k_scale), _pointer(cache.v_scale),
            metadata.slot_mapping.data_ptr(), tokens, kv_heads, head_dim, k.stride(0), v.stride(0),
            metadata.block_size, positions, cos, sin, self.threads,
        )  # fmt: skip

    def copy_blocks(self, cache: KVLayer, pairs: Sequence[tuple[int, int]]) -> None:
        table = torch.tensor(list(pairs), dtype=torch.int64)
        for pages in (cache.k, cache.v, cache.k_scale, cache.v_scale):
            if pages is not None:
                block_bytes = pages.stride(0) * pages.element_size()
                self._copy_blocks(pages.data_ptr(), table.data_ptr(), len(table), block_bytes, self.threads)

    def attention(
        self,
        q: torch.Tensor,
        cache: KVLayer,
        metadata: AttentionMetadata,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> torch.Tensor:
        tokens, heads, head_dim = q.shape
        check_page_shape(head_dim, metadata.block_size)
        assert q.dtype == cache.k.dtype or cache.k_scale is not None
        assert metadata.query_start.dtype == metadata.seq_lens.dtype == metadata.block_table.dtype == torch.int32
        assert metadata.block_table.stride(1) == 1
        assert q.stride(1) == head_dim
        assert q.stride(2) == 1
        out = q.new_empty((tokens, heads * head_dim))
        table = metadata.block_table
        self._attention(
            DTYPE_CODES[q.dtype], DTYPE_CODES[cache.k.dtype], q.data_ptr(), out.data_ptr(),
            cache.k.data_ptr(), cache.v.data_ptr(), _pointer(cache.k_scale), _pointer(cache.v_scale),
            metadata.query_start.data_ptr(), metadata.seq_lens.data_ptr(), table.data_ptr(), table.stride(0),
            q.stride(0), tokens, metadata.seq_lens.shape[0], heads, cache.k.shape[1], head_dim,
            metadata.block_size, scale, window, softcap, self.threads,
        )  # fmt: skip
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._gated(self._silu_mul, gate_up)

    def gelu_tanh_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._gated(self._gelu_tanh_mul, gate_up)

    def _gated(self, kernel: _Kernel, gate_up: torch.Tensor) -> torch.Tensor:
        assert gate_up.is_contiguous()
        tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty((tokens, width))
        kernel(DTYPE_CODES[gate_up.dtype], gate_up.data_ptr(), out.data_ptr(), tokens, width, self.threads)
        return out

    split_qkv = staticmethod(rows.split_qkv)
    select_rows = staticmethod(rows.select_rows)

    def softcap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        self._softcap(DTYPE_CODES[x.dtype], x.data_ptr(), out.data_ptr(), x.numel(), cap, self.threads)
        return out
