"""Paged attention in Triton: chooses the kernels and their tiles.

Rows with few query vectors (decodes, drafts) go to `triton_decode`, the others to `triton_prefill`. In both, a row's
context is cut at multiples of `split_tokens`, counted from its first position, whatever the batch is.
"""

import math
from dataclasses import dataclass

import torch
import triton

from pagoda.kernels.attention.triton_decode import attend_splits, merge_splits
from pagoda.kernels.attention.triton_prefill import attend_tiles
from pagoda.kernels.batch import AttentionMetadata, KVLayer

_MOST_SPLITS = 64
_LEAST_SPLIT_TOKENS = 256
_STAGES_BYTES = 80 * 1024  # of shared memory, for K and V on their way: the smallest GPUs have 99 KiB per program
_LOG2_E = math.log2(math.e)


def split_tokens_of(max_model_len: int) -> int:
    """Return how much of a context one program reads: so much that the longest has at most 64 splits.

    It follows from the settings alone, so that a request's bits do not depend on the batch.
    """
    return max(_LEAST_SPLIT_TOKENS, triton.next_power_of_2(triton.cdiv(max_model_len, _MOST_SPLITS)))


@dataclass(frozen=True, slots=True)
class Tiles:
    """vectors: query vectors of a tile.   positions: of the context, loaded at once.   warps: of a program.

    stages: how many chunks of the context are loaded ahead, the current one included.
    """

    vectors: int
    positions: int
    warps: int
    stages: int


def prefill_tiles(head_dim: int, group: int, itemsize: int) -> Tiles:
    """Return the tiles of rows with many queries. A tile has at least the `group` heads of one token."""
    vectors = 64 if head_dim <= 128 else 32
    return _tiles(max(vectors, triton.next_power_of_2(group)), head_dim, itemsize)


def decode_tiles(head_dim: int, group: int, itemsize: int) -> Tiles:
    """Return the tiles of rows with few queries: as small as a matrix product may be."""
    return _tiles(max(16, triton.next_power_of_2(group)), head_dim, itemsize)


def _tiles(vectors: int, head_dim: int, itemsize: int) -> Tiles:
    positions = 64 if head_dim <= 128 else 32
    stage_bytes = 2 * positions * _padded(head_dim) * itemsize
    return Tiles(vectors, positions, 4, min(3, max(1, _STAGES_BYTES // stage_bytes)))


class PagedAttention:
    """`attention` of the op table.

    split_tokens: see `split_tokens_of`.   batch_invariant: give a query the same bits in a decode and in a chunk of
    any length: both kernels then have the same tiles, and the softmax of a chunk restarts where a decode's splits do.
    """

    def __init__(self, split_tokens: int = _LEAST_SPLIT_TOKENS, batch_invariant: bool = False) -> None:
        self._split_tokens = split_tokens
        self._batch_invariant = batch_invariant

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
        tokens, num_heads, head_dim = q.shape
        if q.stride(2) != 1 or q.stride(1) != head_dim:
            q = q.contiguous()
        group = num_heads // cache.k.shape[1]
        out = torch.empty((tokens, num_heads * head_dim), dtype=q.dtype, device=q.device)
        many = prefill_tiles(head_dim, group, q.element_size())
        few = many if self._batch_invariant else decode_tiles(head_dim, group, q.element_size())
        numbers = (scale * _LOG2_E, softcap, window)
        num_rows = metadata.seq_lens.shape[0]
        is_all_short = metadata.max_query_len * group <= few.vectors
        if is_all_short or num_rows > 1:
            self._run_few(q, out, cache, metadata, numbers, few)
        if not is_all_short:
            skipped = few.vectors if num_rows > 1 else 0
            self._run_many(q, out, cache, metadata, numbers, many, skipped)
        return out

    def _run_few(
        self,
        q: torch.Tensor,
        out: torch.Tensor,
        cache: KVLayer,
        metadata: AttentionMetadata,
        numbers: tuple[float, float, int],
        tiles: Tiles,
    ) -> None:
        tokens, num_heads, head_dim = q.shape
        num_kv_heads, num_rows = cache.k.shape[1], metadata.seq_lens.shape[0]
        num_splits = triton.cdiv(metadata.max_seq_len, self._split_tokens)
        acc = torch.empty((tokens, num_heads, num_splits, head_dim), dtype=torch.float32, device=q.device)
        total, top = torch.empty((2, tokens, num_heads, num_splits), dtype=torch.float32, device=q.device)
        group, block_d = num_heads // num_kv_heads, _padded(head_dim)
        attend_splits[(num_rows, num_kv_heads, num_splits)](
            q, acc, total, top, metadata.query_start, metadata.seq_lens, metadata.block_table,
            *_pages(cache), q.stride(0), metadata.block_table.stride(0), *_strides(cache),
            num_heads, num_splits, *numbers,
            group, head_dim, metadata.block_size, tiles.vectors, tiles.positions, block_d,
            numbers[1] > 0, numbers[2] > 0, cache.k_scale is not None, self._split_tokens,
            num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
        merge_splits[(num_rows, num_heads)](
            out, acc, total, top, metadata.query_start, metadata.seq_lens, num_heads, num_splits, numbers[2],
            group, head_dim, tiles.vectors, block_d, numbers[2] > 0, self._split_tokens, num_warps=1,
        )  # fmt: skip

    def _run_many(
        self,
        q: torch.Tensor,
        out: torch.Tensor,
        cache: KVLayer,
        metadata: AttentionMetadata,
        numbers: tuple[float, float, int],
        tiles: Tiles,
        longest_skipped: int,
    ) -> None:
        tokens, num_heads, head_dim = q.shape
        num_kv_heads, num_rows = cache.k.shape[1], metadata.seq_lens.shape[0]
        group = num_heads // num_kv_heads
        num_tiles = tokens * group // tiles.vectors + num_rows
        attend_tiles[(num_tiles, num_kv_heads)](
            q, out, metadata.query_start, metadata.seq_lens, metadata.block_table,
            *_pages(cache), q.stride(0), metadata.block_table.stride(0), *_strides(cache),
            num_rows, num_heads, longest_skipped, *numbers,
            group, head_dim, metadata.block_size, tiles.vectors, tiles.positions, _padded(head_dim),
            numbers[1] > 0, numbers[2] > 0, cache.k_scale is not None,
            self._split_tokens if self._batch_invariant else 0,
            num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip


def _padded(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


def _pages(cache: KVLayer) -> tuple[torch.Tensor, ...]:
    k_scale, v_scale = (cache.k if scale is None else scale for scale in (cache.k_scale, cache.v_scale))
    return cache.k, cache.v, k_scale, v_scale


def _strides(cache: KVLayer) -> tuple[int, int, int]:
    return cache.k.stride(0), cache.v.stride(0), 0 if cache.k_scale is None else cache.k_scale.stride(0)
