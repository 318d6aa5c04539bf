"""What the Triton attention kernels share: tiles, the online softmax over a range of a context, merging.

A tile is up to BLOCK_M query vectors of one row and one KV head: a token's GROUP query heads that share the KV head,
then those of the next token. Its state is (acc [BLOCK_M, D], total [BLOCK_M], top [BLOCK_M]), all float32: the sum of
values weighted by exp2(score - top), the sum of the weights, and the largest score.
"""

import triton.language as tl

from pagoda.kernels.triton_support import from_e4m3, jit


@jit
def first_tile_of(query_start, row, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the first tile of a row: rows follow each other, each with room for all of its query vectors."""
    return tl.load(query_start + row) * GROUP // BLOCK_M + row


@jit
def row_of_tile(query_start, num_rows, tile, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the row that a tile belongs to."""
    low, high = 0, num_rows
    while high - low > 1:
        middle = (low + high) // 2
        before = first_tile_of(query_start, middle, GROUP, BLOCK_M) <= tile
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low


@jit
def load_queries(
    q, q_stride, first_token, first_vector, query_len, kv_head,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Return (the vectors [BLOCK_M, D] from `first_vector` of the row on, the query of each)."""
    vector = first_vector + tl.arange(0, BLOCK_M)
    query = vector // GROUP
    dim = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + vector % GROUP
    at = (first_token + query).to(tl.int64) * q_stride + head * HEAD_DIM
    inside = (query < query_len)[:, None] & (dim < HEAD_DIM)[None, :]
    return tl.load(q + at[:, None] + dim[None, :], mask=inside, other=0.0), query


@jit
def store_attended(
    out, acc, total, first_token, first_vector, query, query_len, kv_head, num_heads,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write the result of a tile to out [T, H * D].   query: [BLOCK_M], the query of each vector."""
    dim = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + (first_vector + tl.arange(0, BLOCK_M)) % GROUP
    at = ((first_token + query).to(tl.int64) * num_heads + head) * HEAD_DIM
    inside = (query < query_len)[:, None] & (dim < HEAD_DIM)[None, :]
    # Vectors past the row's end have seen nothing that counts: avoid 0 / 0.
    divisor = tl.where(query < query_len, total, 1.0)
    tl.store(out + at[:, None] + dim[None, :], (acc / divisor[:, None]).to(out.dtype.element_ty), mask=inside)


@jit
def soft_capped(scores, softcap):
    """Return softcap * tanh(scores / softcap); scores are in units of log2(e) before and after."""
    # tanh(x) = 1 - 2 / (exp(2 x) + 1)
    return softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 / softcap)) + 1.0)) * 1.4426950408889634


@jit
def weigh(scores, total, top):
    """Return (the weights of a chunk's scores, the factor of earlier weights, the new total, the new top).

    scores: [BLOCK_M, BLOCK_N], -inf where masked. fma says which product is rounded, so that all kernels agree.
    """
    highest = tl.maximum(top, tl.max(scores, 1))
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(scores - shift[:, None])
    keep = tl.exp2(top - shift)
    return weights, keep, tl.fma(total, keep, tl.sum(weights, 1)), highest


@jit
def _weigh_products(products, scale, total, top):
    """The same of scores that are products times `scale`, which is positive: the product is part of a sum here."""
    highest = tl.maximum(top, tl.max(products, 1) * scale)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    minus = tl.broadcast_to(-shift[:, None], products.shape)
    weights = tl.exp2(tl.fma(products, tl.full(products.shape, 0.0, tl.float32) + scale, minus))
    keep = tl.exp2(top - shift)
    return weights, keep, tl.fma(total, keep, tl.sum(weights, 1)), highest


@jit
def _load_pages(pages, scales, block, offset, page_stride, scale_stride, kv_head, dim, inside, dtype: tl.constexpr,
                HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, QUANTIZED: tl.constexpr,
                MASKED: tl.constexpr):  # fmt: skip
    """Return positions of one KV head as ([BLOCK_N, D] in `dtype`, the scale of each). Bytes are e4m3.

    MASKED: not all positions are `inside`.
    """
    slot = kv_head * BLOCK_SIZE + offset
    at = block * page_stride + slot * HEAD_DIM
    source = pages + at[:, None] + dim[None, :]
    if MASKED:
        values = tl.load(source, mask=inside[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
    elif dim.shape[0] == HEAD_DIM:
        values = tl.load(source)
    else:
        values = tl.load(source, mask=(dim < HEAD_DIM)[None, :], other=0.0)
    scale = tl.full(block.shape, 1.0, tl.float32)
    if QUANTIZED:
        of_slot = scales + block * scale_stride + slot
        scale = tl.load(of_slot, mask=inside, other=0.0) if MASKED else tl.load(of_slot)
    if values.dtype == tl.uint8:
        return from_e4m3(values, dtype), scale * 256.0
    else:
        return values.to(dtype), scale


@jit
def _attend_chunks(
    acc, total, top, q, query_at, table, k_pages, v_pages, k_scales, v_scales, page_stride, v_page_stride, scale_stride,
    kv_head, begin, first, end, scale, softcap, window,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, QUANTIZED: tl.constexpr, MASKED: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """Return a state with chunks added: begin, begin + BLOCK_N, ... below `end`. See `attend`.

    MASKED: not every query sees all positions of every chunk.   FOLD: scale products while they are shifted.
    """
    dim = tl.arange(0, BLOCK_D)
    for start in range(begin, end, BLOCK_N):
        place = tl.arange(0, BLOCK_N)
        at = start + place
        inside = (at >= first) & (at < end)
        if MASKED:
            block = tl.load(table + at // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
            offset = at % BLOCK_SIZE
        elif BLOCK_N % BLOCK_SIZE == 0:  # chunks begin with a block
            block = tl.load(table + start // BLOCK_SIZE + place // BLOCK_SIZE).to(tl.int64)
            offset = place % BLOCK_SIZE
        else:
            block = tl.load(table + at // BLOCK_SIZE).to(tl.int64)
            offset = at % BLOCK_SIZE
        k, k_scale = _load_pages(k_pages, k_scales, block, offset, page_stride, scale_stride, kv_head, dim, inside,
                                 q.dtype, HEAD_DIM, BLOCK_SIZE, QUANTIZED, MASKED)  # fmt: skip
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if not FOLD:
            scores *= scale
        if QUANTIZED:
            scores *= k_scale[None, :]
        if SOFTCAP:
            scores = soft_capped(scores, softcap)
        if MASKED:
            visible = inside[None, :] & (at[None, :] <= query_at[:, None])
            if WINDOW:
                visible &= at[None, :] > query_at[:, None] - window
            scores = tl.where(visible, scores, float("-inf"))
        if FOLD:
            weights, keep, total, top = _weigh_products(scores, scale, total, top)
        else:
            weights, keep, total, top = weigh(scores, total, top)
        v, v_scale = _load_pages(v_pages, v_scales, block, offset, v_page_stride, scale_stride, kv_head, dim, inside,
                                 q.dtype, HEAD_DIM, BLOCK_SIZE, QUANTIZED, MASKED)  # fmt: skip
        if QUANTIZED:
            weights *= v_scale[None, :]
        acc = tl.dot(weights.to(q.dtype), v, acc * keep[:, None], input_precision="ieee")
    return acc, total, top


@jit
def attend(
    q, query_at, table, k_pages, v_pages, k_scales, v_scales, page_stride, v_page_stride, scale_stride,
    kv_head, begin, first, end, scale, softcap, window,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, QUANTIZED: tl.constexpr,
    whole=0, APART: tl.constexpr = False,  # pyright: ignore[reportArgumentType]
):  # fmt: skip
    """Attend to positions first .. end - 1 of a row, in chunks counted from `begin` on; return (acc, total, top).

    query_at: [BLOCK_M], the queries' positions.   table: the row's blocks.   scale: times log2(e), for exp2.
    A masked position has weight 0, and a chunk without a visible one leaves the state unchanged: a query's result does
    not depend on the other queries of its tile.
    APART: chunks of which every query sees all positions have a loop of their own, without masks. Then `end` is the
    last query's position + 1, `whole` the first one's + 1, and `begin` a multiple of BLOCK_N.
    """
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    FOLD: tl.constexpr = APART and not SOFTCAP  # pyright: ignore[reportAssignmentType]
    if APART:
        from_whole = begin
        if WINDOW:
            from_whole = tl.cdiv(tl.maximum(end - window, begin), BLOCK_N) * BLOCK_N
            acc, total, top = _attend_chunks(
                acc, total, top, q, query_at, table, k_pages, v_pages, k_scales, v_scales,
                page_stride, v_page_stride, scale_stride, kv_head, begin, first, tl.minimum(from_whole, end),
                scale, softcap, window,
                HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, SOFTCAP, WINDOW, QUANTIZED, True, FOLD,
            )  # fmt: skip
        to_whole = tl.maximum(whole // BLOCK_N * BLOCK_N, from_whole)
        acc, total, top = _attend_chunks(
            acc, total, top, q, query_at, table, k_pages, v_pages, k_scales, v_scales,
            page_stride, v_page_stride, scale_stride, kv_head, from_whole, first, to_whole, scale, softcap, window,
            HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, SOFTCAP, WINDOW, QUANTIZED, False, FOLD,
        )  # fmt: skip
        begin = to_whole
    acc, total, top = _attend_chunks(
        acc, total, top, q, query_at, table, k_pages, v_pages, k_scales, v_scales,
        page_stride, v_page_stride, scale_stride, kv_head, begin, first, end, scale, softcap, window,
        HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, SOFTCAP, WINDOW, QUANTIZED, True, FOLD,
    )  # fmt: skip
    return acc, total, top


@jit
def merge(acc, total, top, more_acc, more_total, more_top):
    """Return the state of two consecutive ranges. fma says which product is rounded, so that all kernels agree."""
    highest = tl.maximum(top, more_top)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    keep, keep_more = tl.exp2(top - shift), tl.exp2(more_top - shift)
    total = tl.fma(more_total, keep_more, total * keep)
    acc = tl.fma(more_acc, tl.broadcast_to(keep_more[:, None], acc.shape), acc * keep[:, None])
    return acc, total, highest
