"""Paged attention of rows with few queries: the context of a row is split over programs, whose results are merged.

Splits of a prefix that the first rows share are attended to once, with the queries of all of these rows (cascade
attention); the other splits and the merging are those of any other row.
"""

import triton.language as tl

from pagoda.kernels.attention.triton_tiles import attend, load_queries, merge
from pagoda.kernels.triton_jit import jit, jit_for_any


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
