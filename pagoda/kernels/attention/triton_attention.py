"""Paged attention in Triton: its kernels, which of them a step takes, and the sizes of their tiles.

Rows with few query vectors (decodes, drafts): the context of a row is split over programs, at multiples of
`split_tokens` counted from its first position, whose results are merged. Splits of a prefix that the first rows share
are attended to once, with the queries of all of these rows (cascade attention); the other splits and the merging are
those of any other row. The other rows (prompts, their chunks) have a kernel of their own, `attend_tiles`.
"""

import math
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from pagoda.kernels.attention import library
from pagoda.kernels.attention.triton_tiles import (
    attend,
    first_tile_of,
    load_queries,
    merge,
    row_of_tile,
    store_attended,
)
from pagoda.kernels.batch import AttentionMetadata, KVLayer
from pagoda.kernels.kv_cache.triton_kv_cache import adjacent_heads, pages_of, strides_of
from pagoda.kernels.triton_support import jit, jit_for_any

LOG2_E = math.log2(math.e)
"""Kernels compute exp2: what a score is multiplied by."""

_STAGES_BYTES = 80 * 1024  # of shared memory, for K and V on their way: the smallest GPUs have 99 KiB per program


@dataclass(frozen=True, slots=True)
class Tiles:
    """vectors: query vectors of a tile.   positions: of the context, loaded at once.   warps: of a program.

    stages: how many chunks of the context are loaded ahead, the current one included.   apart: see `attend`.
    """

    vectors: int
    positions: int
    warps: int
    stages: int
    apart: bool = False


def prefill_tiles(head_dim: int, group: int, itemsize: int, few_registers: bool = False) -> Tiles:
    """Return the tiles of rows with many queries. A tile has at least the `group` heads of one token.

    few_registers: registers are scarce, because two results are merged or pages of 8-bit floats are converted.
    """
    vectors = 64 if head_dim <= 128 else 32
    if itemsize == 4:
        vectors //= 2  # see _tiles
    tiles = _tiles(max(vectors, triton.next_power_of_2(group)), head_dim, itemsize)
    if not few_registers:
        return tiles
    return replace(tiles, positions=min(tiles.positions, 32), warps=4 if head_dim <= 128 else 8)


_PROMPTS, _PROMPTS_OF_64 = Tiles(128, 128, 8, 5, True), Tiles(64, 64, 4, 5, True)
"""The tiles of prompts on GPUs of compute capability 9.0, for heads of 65 to 128 elements and smaller ones, measured on
an H200. Of the 232,448 bytes of shared memory that a program has there, Triton 3.6 and 3.9 take 230,400 and 58,368.
"""


def prompt_tiles(q: torch.Tensor, group: int) -> Tiles:
    """Return the tiles of prompts whose pages are not quantised, without windows and soft caps. See prefill_tiles."""
    head_dim, tiles = q.shape[2], _PROMPTS if q.shape[2] > 64 else _PROMPTS_OF_64
    if _is_hopper(q) and head_dim <= 128 and q.element_size() == 2 and group <= tiles.vectors:
        return tiles
    return prefill_tiles(head_dim, group, q.element_size())


def _is_hopper(q: torch.Tensor) -> bool:
    """Say whether the GPU is one whose tiles were measured; others have other products, or less shared memory."""
    return q.device.type == "cuda" and torch.cuda.get_device_capability(q.device) == (9, 0)


def decode_tiles(head_dim: int, group: int, itemsize: int) -> Tiles:
    """Return the tiles of rows with few queries: as small as a matrix product may be.

    A chunk is found through the block table, which is loaded a stage before it: with two stages nothing of the chunk
    itself would be loaded ahead.
    """
    tiles = _tiles(max(16, triton.next_power_of_2(group)), head_dim, itemsize)
    return replace(tiles, stages=max(tiles.stages, 3)) if itemsize < 4 else tiles


def _tiles(vectors: int, head_dim: int, itemsize: int) -> Tiles:
    positions = 64 if head_dim <= 128 else 32
    if itemsize == 4:
        positions = 16  # tensor cores would round float32: products are computed in registers, which hold no more
    stage_bytes = 2 * positions * padded_dim(head_dim) * itemsize
    return Tiles(vectors, positions, 4, min(3, max(1, _STAGES_BYTES // stage_bytes)))


def padded_dim(head_dim: int) -> int:
    """Return the width of a tile for heads of this size."""
    return max(16, triton.next_power_of_2(head_dim))


@jit
def _first_state(row, first_token, states_per_row):
    """Return where the states of a row's queries begin: those of all tokens are kept if `states_per_row` is 0."""
    return tl.where(states_per_row > 0, row * states_per_row, first_token)


@jit
def _store_split(
    acc_out, total_out, top_out, acc, total, top, first_state, query, query_len, first_vector, kv_head, split,
    num_heads, num_splits,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Store the states of a tile's queries: acc [states, H, splits, D], total and top [states, H, splits]."""
    head = kv_head * GROUP + (first_vector + tl.arange(0, BLOCK_M)) % GROUP
    at = ((first_state + query).to(tl.int64) * num_heads + head) * num_splits + split
    inside = query < query_len
    dim = tl.arange(0, BLOCK_D)
    tl.store(total_out + at, total, mask=inside)
    tl.store(top_out + at, top, mask=inside)
    target = acc_out + at[:, None] * HEAD_DIM + dim[None, :]
    tl.store(target, acc, mask=inside[:, None] & (dim < HEAD_DIM)[None, :])


@jit_for_any("num_splits")
def attend_shared(
    q, acc_out, total_out, top_out, query_start, shared_prefix, block_table,
    k_pages, v_pages, k_scales, v_scales, q_stride, page_stride, v_page_stride, scale_stride,
    num_heads, num_splits, scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, QUANTIZED: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Attend with a tile of the queries of the rows that share a prefix, and one KV head, to a split of the prefix."""
    first_vector, kv_head, split = tl.program_id(0) * BLOCK_M, tl.program_id(1), tl.program_id(2)
    shared = tl.load(shared_prefix)
    num_tokens = tl.load(query_start + tl.load(shared_prefix + 1))
    end = (split + 1) * SPLIT
    if (first_vector < num_tokens * GROUP) & (end <= shared):
        vectors, query = load_queries(
            q, q_stride, 0, first_vector, num_tokens, kv_head, GROUP, HEAD_DIM, BLOCK_M, BLOCK_D
        )  # fmt: skip
        acc, total, top = attend(
            vectors, tl.zeros_like(query) + shared, block_table,  # of the first row; all of the prefix is visible
            k_pages, v_pages, k_scales, v_scales, page_stride, v_page_stride, scale_stride,
            kv_head, split * SPLIT, 0, end, scale, 0.0, 0,
            HEAD_DIM, BLOCK_SIZE, BLOCK_M, BLOCK_N, BLOCK_D, False, False, QUANTIZED,
        )  # fmt: skip
        _store_split(
            acc_out, total_out, top_out, acc, total, top, 0, query, num_tokens, first_vector, kv_head, split,
            num_heads, num_splits, GROUP, HEAD_DIM, BLOCK_M, BLOCK_D,
        )  # fmt: skip


@jit_for_any("table_stride", "num_splits", "most_queries", "states_per_row")
def attend_splits(
    q, acc_out, total_out, top_out, query_start, seq_lens, shared_prefix, block_table,
    k_pages, v_pages, k_scales, v_scales, q_stride, table_stride, page_stride, v_page_stride, scale_stride,
    num_heads, num_splits, most_queries, states_per_row, scale, softcap, window,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
    QUANTIZED: tl.constexpr, SPLIT: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Attend to one split, SPLIT positions counted from the row's first, of one row and KV head.

    Skip a row with more than `most_queries`, and with SHARED the splits of `attend_shared`.
    """
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_token = tl.load(query_start + row)
    query_len = tl.load(query_start + row + 1) - first_token
    seq_len = tl.load(seq_lens + row)
    begin = split * SPLIT
    end = tl.minimum(begin + SPLIT, seq_len)
    first = 0
    if WINDOW:
        first = tl.maximum(seq_len - query_len - window + 1, 0)
    is_wanted = (query_len <= most_queries) & (begin < end) & (end > first)
    if SHARED:
        is_wanted &= (row >= tl.load(shared_prefix + 1)) | (begin + SPLIT > tl.load(shared_prefix))
    if is_wanted:
        vectors, query = load_queries(
            q, q_stride, first_token, 0, query_len, kv_head, GROUP, HEAD_DIM, BLOCK_M, BLOCK_D
        )  # fmt: skip
        skipped = tl.maximum(first - begin, 0) // BLOCK_N * BLOCK_N
        acc, total, top = attend(
            vectors, seq_len - query_len + query, block_table + row.to(tl.int64) * table_stride,
            k_pages, v_pages, k_scales, v_scales, page_stride, v_page_stride, scale_stride,
            kv_head, begin + skipped, first, end, scale, softcap, window,
            HEAD_DIM, BLOCK_SIZE, BLOCK_M, BLOCK_N, BLOCK_D, SOFTCAP, WINDOW, QUANTIZED,
        )  # fmt: skip
        _store_split(
            acc_out, total_out, top_out, acc, total, top, _first_state(row, first_token, states_per_row), query,
            query_len, 0, kv_head, split, num_heads, num_splits, GROUP, HEAD_DIM, BLOCK_M, BLOCK_D,
        )  # fmt: skip


@jit_for_any("num_splits", "most_queries", "states_per_row")
def merge_splits(
    out, acc_in, total_in, top_in, query_start, seq_lens, num_heads, num_splits, most_queries, states_per_row, window,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Merge the splits of a row's queries and one head, from left to right, into out [T, H * D]."""
    row, head = tl.program_id(0), tl.program_id(1)
    first_token = tl.load(query_start + row)
    query_len = tl.load(query_start + row + 1) - first_token
    seq_len = tl.load(seq_lens + row)
    first_split = 0
    if WINDOW:
        first_split = tl.maximum(seq_len - query_len - window + 1, 0) // SPLIT
    if query_len <= most_queries:
        dim = tl.arange(0, BLOCK_D)
        some = (dim < HEAD_DIM)[None, :]
        for query in range(query_len):
            place = (first_token + query).to(tl.int64) * num_heads + head
            state = (_first_state(row, first_token, states_per_row) + query).to(tl.int64) * num_heads + head
            acc = tl.zeros([1, BLOCK_D], tl.float32)
            total = tl.zeros([1], tl.float32)
            top = tl.full([1], float("-inf"), tl.float32)
            for split in range(first_split, tl.cdiv(seq_len, SPLIT)):
                at = state * num_splits + split + tl.arange(0, 1)
                more = tl.load(acc_in + at[:, None] * HEAD_DIM + dim[None, :], mask=some, other=0.0)
                acc, total, top = merge(acc, total, top, more, tl.load(total_in + at), tl.load(top_in + at))
            target = out + place * HEAD_DIM + dim[None, :]
            tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=some)


@jit_for_any("table_stride", "num_rows", "longest_skipped")
def attend_tiles(
    q, out, query_start, seq_lens, block_table,
    k_pages, v_pages, k_scales, v_scales, q_stride, table_stride, page_stride, v_page_stride, scale_stride,
    num_rows, num_heads, longest_skipped, scale, softcap, window,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
    QUANTIZED: tl.constexpr, SPLIT: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Attend with one tile of queries of a row and one KV head to all that they see; write to out [T, H * D].

    longest_skipped: rows with at most so many query vectors are left out.   SPLIT: restart the softmax after so many
    positions, counted from the row's first, and merge, with the bits of `triton_decode`; 0: one softmax.
    """
    # The last tiles of a row see most of its context: start with them.
    tile, kv_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    row = row_of_tile(query_start, num_rows, tile, GROUP, BLOCK_M)
    first_token = tl.load(query_start + row)
    query_len = tl.load(query_start + row + 1) - first_token
    first_vector = (tile - first_tile_of(query_start, row, GROUP, BLOCK_M)) * BLOCK_M
    num_vectors = query_len * GROUP
    if (first_vector < num_vectors) & (num_vectors > longest_skipped):
        context = tl.load(seq_lens + row) - query_len
        vectors, query = load_queries(
            q, q_stride, first_token, first_vector, query_len, kv_head, GROUP, HEAD_DIM, BLOCK_M, BLOCK_D
        )  # fmt: skip
        end = context + tl.minimum((first_vector + BLOCK_M - 1) // GROUP, query_len - 1) + 1
        first = 0
        if WINDOW:
            first = tl.maximum(context + first_vector // GROUP - window + 1, 0)
        table = block_table + row.to(tl.int64) * table_stride
        query_at = context + query
        if SPLIT == 0:
            acc, total, _ = attend(
                vectors, query_at, table, k_pages, v_pages, k_scales, v_scales,
                page_stride, v_page_stride, scale_stride, kv_head, first // BLOCK_N * BLOCK_N, first, end,
                scale, softcap, window,
                HEAD_DIM, BLOCK_SIZE, BLOCK_M, BLOCK_N, BLOCK_D, SOFTCAP, WINDOW, QUANTIZED,
                context + first_vector // GROUP + 1, APART,
            )  # fmt: skip
        else:
            acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            top = tl.full([BLOCK_M], float("-inf"), tl.float32)
            for begin in range(first // SPLIT * SPLIT, end, SPLIT):
                skipped = tl.maximum(first - begin, 0) // BLOCK_N * BLOCK_N
                more_acc, more_total, more_top = attend(
                    vectors, query_at, table, k_pages, v_pages, k_scales, v_scales,
                    page_stride, v_page_stride, scale_stride, kv_head,
                    begin + skipped, first, tl.minimum(begin + SPLIT, end), scale, softcap, window,
                    HEAD_DIM, BLOCK_SIZE, BLOCK_M, BLOCK_N, BLOCK_D, SOFTCAP, WINDOW, QUANTIZED,
                )  # fmt: skip
                acc, total, top = merge(acc, total, top, more_acc, more_total, more_top)
        store_attended(
            out, acc, total, first_token, first_vector, query, query_len, kv_head, num_heads,
            GROUP, HEAD_DIM, BLOCK_M, BLOCK_D,
        )  # fmt: skip


_MOST_SPLITS = 64
_LEAST_SPLIT_TOKENS = 256
_MANY_PROGRAMS = 512  # more would not be faster: the largest GPUs run about so many at a time
_MOST_STATES = 256  # of queries of a mixed batch, per split: each has the size of a head in float32


def split_tokens_of(max_model_len: int) -> int:
    """Return how much of a context one program reads: so much that the longest has at most 64 splits.

    It follows from the settings alone. With --batch-invariant it holds for all steps.
    """
    return max(_LEAST_SPLIT_TOKENS, triton.next_power_of_2(triton.cdiv(max_model_len, _MOST_SPLITS)))


@dataclass(frozen=True, slots=True, eq=False)
class _Problem:
    """One call of `attention`.   scale: times log2(e), for exp2."""

    q: torch.Tensor
    out: torch.Tensor
    cache: KVLayer
    metadata: AttentionMetadata
    scale: float
    softcap: float
    window: int

    @property
    def group(self) -> int:
        """Return the query heads per KV head."""
        return self.q.shape[1] // self.num_kv_heads

    @property
    def num_kv_heads(self) -> int:
        return self.cache.k.shape[1]

    @property
    def num_rows(self) -> int:
        return self.metadata.seq_lens.shape[0]

    def constants(self, tiles: Tiles) -> tuple[object, ...]:
        """Return the kernels' constants from GROUP to BLOCK_D."""
        head_dim = self.q.shape[2]
        return (
            self.group, head_dim, self.metadata.block_size, tiles.vectors, tiles.positions, padded_dim(head_dim)
        )  # fmt: skip

    @property
    def kinds(self) -> tuple[bool, bool, bool]:
        """Return the kernels' constants SOFTCAP, WINDOW and QUANTIZED."""
        return self.softcap > 0, self.window > 0, self.cache.k_scale is not None


class PagedAttention:
    """`attention` of the op table.

    split_tokens: see `split_tokens_of`.   batch_invariant: give a query the same bits in a decode and in a chunk of
    any length: both kernels then have the same tiles, the softmax of a chunk restarts where a decode's splits do, a
    prefix is attended to by each row for itself, and splits are not shorter in a step of a few rows.
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
        bias: torch.Tensor | None = None,
        first: int = 0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See reference.attention. With a bias, sinks or chunks, in plain torch."""
        if bias is not None or sinks is not None or window < 0:
            return library.attention(q, cache, metadata, scale, window, softcap, bias, first, sinks)
        q = adjacent_heads(q)
        tokens, num_heads, head_dim = q.shape
        out = torch.empty((tokens, num_heads * head_dim), dtype=q.dtype, device=q.device)
        problem = _Problem(q, out, cache, metadata, scale * LOG2_E, softcap, window)
        few_registers = self._batch_invariant or cache.k.dtype == torch.float8_e4m3fn
        many = prefill_tiles(head_dim, problem.group, q.element_size(), few_registers)
        few = many if self._batch_invariant else decode_tiles(head_dim, problem.group, q.element_size())
        most_queries = few.vectors // problem.group
        is_all_short = metadata.max_query_len <= most_queries
        if not is_all_short:
            most_queries = min(most_queries, max(1, _MOST_STATES // problem.num_rows))
        if is_all_short or problem.num_rows > 1:
            shares = is_all_short and not (self._batch_invariant or window or softcap)
            self._run_few(problem, few, most_queries, many if shares and metadata.shared_prefix is not None else None)
        if not is_all_short:
            if not (self._batch_invariant or any(problem.kinds)):
                many = prompt_tiles(q, problem.group)
            self._run_many(problem, many, most_queries * problem.group if problem.num_rows > 1 else 0)
        return out

    def _split_for(self, of: _Problem) -> int:
        """Return short splits for a few rows of short contexts, so that they keep more of a GPU busy.

        Of two lengths, because each is compiled for itself.
        """
        longest = of.metadata.max_seq_len
        num_programs = of.num_rows * of.num_kv_heads * triton.cdiv(longest, self._split_tokens)
        is_few = num_programs < _MANY_PROGRAMS and triton.cdiv(longest, _LEAST_SPLIT_TOKENS) <= _MOST_SPLITS
        return min(_LEAST_SPLIT_TOKENS, self._split_tokens) if is_few else self._split_tokens

    def _run_few(self, of: _Problem, tiles: Tiles, most_queries: int, shared: Tiles | None) -> None:
        """most_queries: rows with more are left out.

        shared: the tiles of a prefix that rows share; None if each row attends for itself.
        """
        tokens, num_heads, head_dim = of.q.shape
        metadata, cache = of.metadata, of.cache
        split_tokens = self._split_tokens if self._batch_invariant or shared is not None else self._split_for(of)
        num_splits = triton.cdiv(metadata.max_seq_len, split_tokens)
        # A prompt in the batch may have thousands of tokens, for which there must not be states.
        states_per_row = 0 if metadata.max_query_len <= most_queries else most_queries
        states = of.num_rows * states_per_row if states_per_row else tokens
        acc = torch.empty((states, num_heads, num_splits, head_dim), dtype=torch.float32, device=of.q.device)
        total, top = torch.empty((2, states, num_heads, num_splits), dtype=torch.float32, device=of.q.device)
        prefix = metadata.query_start if shared is None else metadata.shared_prefix
        attend_splits[(of.num_rows, of.num_kv_heads, num_splits)](
            of.q, acc, total, top, metadata.query_start, metadata.seq_lens, prefix, metadata.block_table,
            *pages_of(cache), of.q.stride(0), metadata.block_table.stride(0), *strides_of(cache),
            num_heads, num_splits, most_queries, states_per_row, of.scale, of.softcap, of.window,
            *of.constants(tiles), *of.kinds, split_tokens, shared is not None,
            num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
        if shared is not None:
            attend_shared[(triton.cdiv(tokens * of.group, shared.vectors), of.num_kv_heads, num_splits)](
                of.q, acc, total, top, metadata.query_start, prefix, metadata.block_table,
                *pages_of(cache), of.q.stride(0), *strides_of(cache), num_heads, num_splits, of.scale,
                *of.constants(shared), cache.k_scale is not None, split_tokens,
                num_warps=shared.warps, num_stages=shared.stages,
            )  # fmt: skip
        merge_splits[(of.num_rows, num_heads)](
            of.out, acc, total, top, metadata.query_start, metadata.seq_lens, num_heads, num_splits,
            most_queries, states_per_row, of.window,
            head_dim, padded_dim(head_dim), of.window > 0, split_tokens, num_warps=1,
        )  # fmt: skip

    def _run_many(self, of: _Problem, tiles: Tiles, longest_skipped: int) -> None:
        tokens, num_heads, _ = of.q.shape
        metadata, cache = of.metadata, of.cache
        attend_tiles[(tokens * of.group // tiles.vectors + of.num_rows, of.num_kv_heads)](
            of.q, of.out, metadata.query_start, metadata.seq_lens, metadata.block_table,
            *pages_of(cache), of.q.stride(0), metadata.block_table.stride(0), *strides_of(cache),
            of.num_rows, num_heads, longest_skipped, of.scale, of.softcap, of.window,
            *of.constants(tiles), *of.kinds, self._split_tokens if self._batch_invariant else 0, tiles.apart,
            num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
