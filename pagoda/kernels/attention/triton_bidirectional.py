"""Bidirectional attention in Triton, over the keys and values of the batch itself."""

import torch
import triton.language as tl

from pagoda.kernels.attention import library
from pagoda.kernels.attention.triton_attention import LOG2_E, padded_dim, prefill_tiles
from pagoda.kernels.attention.triton_tiles import (
    first_tile_of,
    load_queries,
    row_of_tile,
    soft_capped,
    store_attended,
    weigh,
)
from pagoda.kernels.batch import AttentionMetadata
from pagoda.kernels.kv_cache.triton_kv_cache import adjacent_heads
from pagoda.kernels.triton_support import jit_for_any

_WIDEST_WINDOW = 1 << 30  # positions on both sides of a window fit in int32


def bidirectional_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    bias: torch.Tensor | None = None,
    first: int = 0,
) -> torch.Tensor:
    """See reference.bidirectional_attention; a bias is for plain torch. A row's bits do not depend on other rows."""
    if bias is not None:
        return library.bidirectional_attention(q, k, v, metadata, scale, window, softcap, bias, first)
    q, k, v = map(adjacent_heads, (q, k, v))
    tokens, num_heads, head_dim = q.shape
    num_kv_heads, num_rows = k.shape[1], metadata.seq_lens.shape[0]
    group = num_heads // num_kv_heads
    tiles = prefill_tiles(head_dim, group, q.element_size())
    out = torch.empty((tokens, num_heads * head_dim), dtype=q.dtype, device=q.device)
    attend_bidirectional[(tokens * group // tiles.vectors + num_rows, num_kv_heads)](
        q, k, v, out, metadata.query_start, q.stride(0), k.stride(0), v.stride(0),
        num_rows, num_heads, scale * LOG2_E, softcap, min(window, _WIDEST_WINDOW),
        group, head_dim, tiles.vectors, tiles.positions, padded_dim(head_dim), softcap > 0, window > 0,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out


@jit_for_any("num_rows")
def attend_bidirectional(
    q, k, v, out, query_start, q_stride, k_stride, v_stride, num_rows, num_heads, scale, softcap, window,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Attend with one tile of queries of a row and one KV head to all of the row's tokens in the window."""
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    row = row_of_tile(query_start, num_rows, tile, GROUP, BLOCK_M)
    first_token = tl.load(query_start + row)
    length = tl.load(query_start + row + 1) - first_token
    first_vector = (tile - first_tile_of(query_start, row, GROUP, BLOCK_M)) * BLOCK_M
    if first_vector < length * GROUP:
        vectors, query = load_queries(
            q, q_stride, first_token, first_vector, length, kv_head, GROUP, HEAD_DIM, BLOCK_M, BLOCK_D
        )  # fmt: skip
        first, end = 0, length
        if WINDOW:
            first = tl.maximum(first_vector // GROUP - window + 1, 0)
            end = tl.minimum((first_vector + BLOCK_M - 1) // GROUP + window, length)
        dim = tl.arange(0, BLOCK_D)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        # Chunks are counted from the row's first token: a query sums the same ones in any tile.
        for start in range(first // BLOCK_N * BLOCK_N, end, BLOCK_N):
            at = start + tl.arange(0, BLOCK_N)
            inside = at < end
            token, column = (first_token + at).to(tl.int64), kv_head * HEAD_DIM + dim
            some = inside[:, None] & (dim < HEAD_DIM)[None, :]
            keys = tl.load(k + token[:, None] * k_stride + column[None, :], mask=some, other=0.0)
            scores = tl.dot(vectors, tl.trans(keys), input_precision="ieee") * scale
            if SOFTCAP:
                scores = soft_capped(scores, softcap)
            visible = inside[None, :]
            if WINDOW:
                distance = at[None, :] - query[:, None]
                visible = visible & (distance < window) & (distance > -window)
            scores = tl.where(visible, scores, float("-inf"))
            weights, keep, total, top = weigh(scores, total, top)
            values = tl.load(v + token[:, None] * v_stride + column[None, :], mask=some, other=0.0)
            acc = tl.dot(weights.to(vectors.dtype), values, acc * keep[:, None], input_precision="ieee")
        store_attended(
            out, acc, total, first_token, first_vector, query, length, kv_head, num_heads,
            GROUP, HEAD_DIM, BLOCK_M, BLOCK_D,
        )  # fmt: skip
