// The attention problem, its division into parts, and the partial sums of a part.
#pragma once

#include <algorithm>

#include "parallel.h"
#include "simd.h"

constexpr int SEGMENT = 256;
constexpr int FEW_VECTORS = 12;  // tiles of more query vectors are bound by arithmetic, not by memory

struct Problem {
    int dtype;
    const void* q;
    void* out;
    const char *k_pages, *v_pages;
    const float *k_scale, *v_scale;
    const int32_t *query_start, *seq_lens, *block_table;
    int64_t table_stride, q_stride, k_stride, v_stride, scale_stride;
    int num_rows, num_heads, num_kv_heads, head_dim, block_size, window;
    float scale, softcap;
    bool causal = true;
    const void* sinks = nullptr;  // of the q heads, in q's dtype: a score of each that has no value
    const int32_t* last_seen = nullptr;  // of each query token, not less than its own position; or null
    const float* bias = nullptr;  // [num_heads][2 * bias_reach + 1]: added to a score, by distance of key and query; or null
    int bias_reach = 0;
    // Latent attention, if rope_dim > 0: a key is the value, of head_dim elements, then a K of rope_dim; so is a query.
    int rope_dim = 0;
    const void* q_rope = nullptr;
    int64_t q_rope_stride = 0;
    const int32_t* tokens = nullptr;  // the batch's tokens in the order of tiles
    // Sums over the prefixes that rows share, from which they continue: of `num_kept` queries, by KV head.
    float* kept = nullptr;
    int num_kept = 0;
    int key_dim() const { return head_dim + rope_dim; }
    int k_page_dim() const { return rope_dim > 0 ? rope_dim : head_dim; }
    int group() const { return num_heads / num_kv_heads; }
    // The first and last position that query `token` at `at` sees in a row of `length` positions.
    int first_visible(int at) const {
        return window > 0 ? std::max(0, at - window + 1) : window < 0 ? at - at % -window : 0;  // below 0: chunks
    }
    int last_visible(int token, int at, int length) const {
        if (last_seen != nullptr) return last_seen[token];
        if (causal) return at;
        return window > 0 && window < length - at ? at + window - 1 : length - 1;
    }
};

// Head sizes of a cache are multiples of 16, block sizes multiples of 8. seq_lens counts the tokens in the cache, this step's
// included.
inline Problem paged_problem(const Tensor& q, const Tensor& out, const KVPages& cache, const RowGroup& rows, float scale,
                             int window = 0, float softcap = 0.0f) {
    Problem p{q.dtype,
              q.data,
              out.data,
              static_cast<const char*>(cache.k),
              static_cast<const char*>(cache.v),
              cache.k_scale,
              cache.v_scale,
              rows.query_start,
              rows.seq_lens,
              rows.block_table,
              rows.table_stride,
              q.stride,
              cache.k_stride,
              cache.v_stride,
              cache.scale_stride,
              static_cast<int>(rows.num_rows),
              static_cast<int>(q.heads),
              static_cast<int>(cache.kv_heads),
              static_cast<int>(cache.value_dim),
              static_cast<int>(cache.block_size),
              window,
              scale,
              softcap};
    p.last_seen = rows.last_seen;
    return p;
}

// Consecutive queries of one row: `num_queries` of Problem::tokens, from `first` on. Or the queries of several rows that all
// see a prefix that the rows share, and of this row's table only that. `first_at`: position of the first one. `length`:
// positions of the row. The positions begin .. end - 1 are read: some query sees them, and no sums of others have them.
// `kept`: of the first query in Problem::kept, which a prefix fills in and the rest of a row continues from; or -1.
struct Tile {
    int row, first, num_queries, first_at, length, begin, end, kept;
    bool is_prefix() const { return kept >= 0 && begin == 0; }
    bool continues() const { return kept >= 0 && begin > 0; }
    int first_segment() const { return begin / SEGMENT; }
    int num_segments() const { return (end - 1) / SEGMENT - first_segment() + 1; }
    int64_t cost() const { return int64_t(end - begin) * (num_queries + 1); }
};

// KV heads first .. first + count - 1.
struct Heads {
    int first, count;
};
// What a thread claims: some heads of a tile, processed together.
struct Unit {
    const Tile* tile;
    Heads heads;
};

// vdpbf16ps flushes a denormal sum to 0 even if it adds nothing, so a denormal would depend on what other rows see.
inline f32x16 without_denormals(f32x16 v) { return select(magnitude_bits(v) < 0x00800000, f32x16{}, v); }

// Running softmax of `rows` query vectors.
struct Partial {
    float *top, *total, *acc;  // [rows], [rows], [rows][head_dim]
    static size_t floats(size_t rows, int head_dim) { return rows * (head_dim + 2); }
    static Partial at(float* memory, size_t rows) { return {memory, memory + rows, memory + 2 * rows}; }
    Partial from(size_t row, int head_dim) const { return {top + row, total + row, acc + row * head_dim}; }
};

// sums = sums combined with next, which covers later positions.
inline void combine(Partial sums, Partial next, int rows, int head_dim) {
    for (int r = 0; r < rows; r++) {
        float top = std::max(sums.top[r], next.top[r]);
        float keep = exp2(splat(sums.top[r] - top))[0], take = exp2(splat(next.top[r] - top))[0];
        sums.top[r] = top;
        sums.total[r] = sums.total[r] * keep + next.total[r] * take;
        for (int d = 0; d < head_dim; d += 16) {
            float* acc = sums.acc + r * head_dim + d;
            store(acc, fma(load(next.acc + r * head_dim + d), splat(take), load(acc) * keep));
        }
    }
}
