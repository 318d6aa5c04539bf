// What is asked of attention, how it is cut up, and the sums that a part of it leaves.
#pragma once

#include <algorithm>

#include "parallel.h"
#include "simd.h"

constexpr int SEGMENT = 256;
constexpr int FEW_VECTORS = 12;  // tiles of more query vectors compute longer than their pages take to come

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
    int group() const { return num_heads / num_kv_heads; }
};

// Consecutive queries of one row. `first_at`: position of the first one.
struct Tile {
    int row, first_token, num_queries, first_at;
    int first_visible(const Problem& p) const { return p.window > 0 ? std::max(0, first_at - p.window + 1) : 0; }
    int end() const { return first_at + num_queries; }  // one past the last position any query sees
    int first_segment(const Problem& p) const { return first_visible(p) / SEGMENT; }
    int num_segments(const Problem& p) const { return (end() - 1) / SEGMENT - first_segment(p) + 1; }
    int64_t cost(const Problem& p) const { return int64_t(end() - first_visible(p)) * (num_queries + 1); }
};

// KV heads [first, first + count).
struct Heads {
    int first, count;
};
// What a thread claims: heads of a tile, which it walks through together.
struct Unit {
    const Tile* tile;
    Heads heads;
};

// vdpbf16ps takes a denormal sum for 0, also where it adds nothing; what ends as one would depend on what others saw.
inline f32x16 without_denormals(f32x16 v) { return magnitude_bits(v) < 0x00800000 ? f32x16{} : v; }

// Running softmax of `rows` query vectors.
struct Partial {
    float *top, *total, *acc;  // [rows], [rows], [rows][head_dim]
    static size_t floats(int rows, int head_dim) { return size_t(rows) * (head_dim + 2); }
    static Partial at(float* memory, int rows) { return {memory, memory + rows, memory + 2 * rows}; }
};

// folded <- folded then next, where `next` covers the later positions.
inline void fold(Partial folded, Partial next, int rows, int head_dim) {
    for (int r = 0; r < rows; r++) {
        float top = std::max(folded.top[r], next.top[r]);
        float keep = exp2(splat(folded.top[r] - top))[0], take = exp2(splat(next.top[r] - top))[0];
        folded.top[r] = top;
        folded.total[r] = folded.total[r] * keep + next.total[r] * take;
        for (int d = 0; d < head_dim; d += 16) {
            float* acc = folded.acc + r * head_dim + d;
            store(acc, fma(load(next.acc + r * head_dim + d), splat(take), load(acc) * keep));
        }
    }
}
