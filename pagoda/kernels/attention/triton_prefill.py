"""Paged attention of rows with many queries: prompts, their chunks, and whatever else is in the batch."""

import triton.language as tl

from pagoda.kernels.attention.triton_tiles import (
    attend,
    first_tile_of,
    load_queries,
    merge,
    row_of_tile,
    store_attended,
)
from pagoda.kernels.triton_jit import jit_for_any


@jit_for_any("table_stride", "num_rows", "longest_skipped")
def attend_tiles(
    q, out, query_start, seq_lens, block_table,
    k_pages, v_pages, k_scales, v_scales, q_stride, table_stride, page_stride, v_page_stride, scale_stride,
    num_rows, num_heads, longest_skipped, scale, softcap, window,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
    QUANTIZED: tl.constexpr, SPLIT: tl.constexpr,
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
