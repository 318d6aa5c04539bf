"""Paged attention in Triton: chooses the kernels and their tiles.

Rows with few query vectors (decodes, drafts) go to `triton_decode`, the others to `triton_prefill`. A decode's context
is cut at multiples of `split_tokens`, counted from its first position.
"""

from dataclasses import dataclass

import torch
import triton

from pagoda.kernels.attention.tile_sizes import LOG2_E, Tiles, decode_tiles, padded_dim, prefill_tiles
from pagoda.kernels.attention.triton_decode import attend_shared, attend_splits, merge_splits
from pagoda.kernels.attention.triton_prefill import attend_tiles
from pagoda.kernels.batch import AttentionMetadata, KVLayer
from pagoda.kernels.kv_cache.triton_kv_cache import pages_of, strides_of

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
    ) -> torch.Tensor:
        """See reference.attention."""
        tokens, num_heads, head_dim = q.shape
        if q.stride(2) != 1 or q.stride(1) != head_dim:
            q = q.contiguous()
        out = torch.empty((tokens, num_heads * head_dim), dtype=q.dtype, device=q.device)
        problem = _Problem(q, out, cache, metadata, scale * LOG2_E, softcap, window)
        is_crowded = self._batch_invariant or cache.k.dtype == torch.float8_e4m3fn
        many = prefill_tiles(head_dim, problem.group, q.element_size(), is_crowded)
        few = many if self._batch_invariant else decode_tiles(head_dim, problem.group, q.element_size())
        most_queries = few.vectors // problem.group
        is_all_short = metadata.max_query_len <= most_queries
        if not is_all_short:
            most_queries = min(most_queries, max(1, _MOST_STATES // problem.num_rows))
        if is_all_short or problem.num_rows > 1:
            shares = is_all_short and not (self._batch_invariant or window or softcap)
            self._run_few(problem, few, most_queries, many if shares and metadata.shared_prefix is not None else None)
        if not is_all_short:
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
            *of.constants(tiles), *of.kinds, self._split_tokens if self._batch_invariant else 0,
            num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
