// Pages of K and V that exist while one op runs: the tokens of the batch as if a cache held them. Heads that do not fill
// whole lanes are widened with zeros, which change no score; their queries and results are then copies, too.
#pragma once

#include "../kv_cache/pages.h"
#include "elementwise.h"
#include "problem.h"

constexpr int TRANSIENT_BLOCK = 16;
constexpr int64_t WIDEST_HEAD = 512;  // native/arguments.py refuses larger ones

// Copy a vector of `dim` elements, and zeros after it up to `wide`.
template <class T>
void copy_padded(const T* x, int64_t dim, T* to, int64_t wide) {
    memcpy(static_cast<void*>(to), x, sizeof(T) * dim);
    memset(static_cast<void*>(to + dim), 0, sizeof(T) * (wide - dim));
}

// Copy K and V of the batch into pages; return the problem of attending to them without a causal mask. The pages are this
// thread's scratch memory. A row's blocks follow each other.
template <class T>
Problem with_transient_pages(const BidirectionalAttentionArgs& a, int threads) {
    const RowGroup& rows = *a.metadata;
    int64_t kv_heads = a.k.heads, dim = a.k.dim, head_dim = (dim + 15) / 16 * 16, page = TRANSIENT_BLOCK * head_dim;
    int64_t heads = a.q.heads;
    bool is_wider = head_dim != dim;
    auto blocks_of = [&](int64_t row) { return (rows.seq_lens[row] + TRANSIENT_BLOCK - 1) / TRANSIENT_BLOCK; };
    int64_t blocks = 0, width = 1;
    for (int64_t row = 0; row < rows.num_rows; row++) {
        blocks += blocks_of(row);
        width = std::max<int64_t>(width, blocks_of(row));
    }
    size_t page_elements = blocks * kv_heads * page, query_elements = is_wider ? a.q.rows * heads * head_dim : 0;
    auto* k_pages = static_cast<T*>(thread_scratch(2 * sizeof(T) * (page_elements + query_elements), 4));
    T *v_pages = k_pages + page_elements, *queries = v_pages + page_elements, *results = queries + query_elements;
    auto* tables = static_cast<int32_t*>(thread_scratch(sizeof(int32_t) * rows.num_rows * width, 5));
    int32_t next = 0;
    for (int64_t row = 0; row < rows.num_rows; row++)
        for (int64_t i = 0; i < blocks_of(row); i++) tables[row * width + i] = next++;

    for_shares(a.k.rows, 2 * num_elements(a.k), threads, [&](int64_t t) {
        T wide_k[WIDEST_HEAD], wide_v[WIDEST_HEAD];
        int64_t row = std::upper_bound(rows.query_start, rows.query_start + rows.num_rows, t) - rows.query_start - 1;
        int64_t at = t - rows.query_start[row], slot = at % TRANSIENT_BLOCK;
        int64_t block = tables[row * width + at / TRANSIENT_BLOCK];
        for (int64_t h = 0; h < kv_heads; h++) {
            int64_t to = (block * kv_heads + h) * page;
            const T* k = elements_of<const T>(a.k) + t * a.k.stride + h * dim;
            const T* v = elements_of<const T>(a.v) + t * a.v.stride + h * dim;
            if (is_wider) {
                copy_padded(k, dim, wide_k, head_dim);
                copy_padded(v, dim, wide_v, head_dim);
                k = wide_k, v = wide_v;
            }
            scatter_k<T>(k, k_pages + to, slot, TRANSIENT_BLOCK, head_dim);
            scatter_v<T>(v, v_pages + to, slot, head_dim);
        }
        for (int64_t h = 0; is_wider && h < heads; h++)
            copy_padded(elements_of<const T>(a.q) + t * a.q.stride + h * dim, dim, queries + (t * heads + h) * head_dim,
                        head_dim);
    });
    KVPages pages{k_pages, v_pages, nullptr, nullptr, kv_heads * page, kv_heads * page, 0,
                  blocks, kv_heads, TRANSIENT_BLOCK, head_dim, head_dim, a.k.dtype, 0};
    RowGroup paged = rows;
    paged.block_table = tables, paged.table_stride = width, paged.last_seen = nullptr;
    Tensor q = a.q, out = a.out;
    if (is_wider) q.data = queries, q.stride = heads * head_dim, out.data = results;
    Problem p = paged_problem(q, out, pages, paged, a.scale, a.window, a.softcap);
    p.causal = false;
    return p;
}

// Copy results of widened heads to where the op's are.
template <class T>
void cut_heads(const Problem& p, const BidirectionalAttentionArgs& a) {
    int64_t dim = a.k.dim, count = a.q.rows * a.q.heads;
    if (p.out == a.out.data) return;
    for (int64_t i = 0; i < count; i++)
        memcpy(elements_of<T>(a.out) + i * dim, static_cast<const T*>(p.out) + i * p.head_dim, sizeof(T) * dim);
}
