// The two products of attention for a few query vectors and one chunk of context.
//
// Every result is one chain of operations in a fixed order (over the head's dimensions for a score, over the context's
// positions for an output), each explicit: the number of query vectors in a tile does not change any bit.
#pragma once

#include "prefetch.h"
#include "simd.h"

constexpr int CHUNK = 64;         // positions scored at once, aligned to their absolute position
constexpr int LANE_GROUPS = CHUNK / 16;
#if defined(PAGODA_AVX512)
constexpr int TILE_ROWS = 6, TILE_VECTORS = 4;  // 24 sums, 4 loads and a broadcast fit 32 registers
#else
constexpr int TILE_ROWS = 2, TILE_VECTORS = 2;
#endif

// Operand formats. Paired: a 32-bit lane holds two bf16, multiplied and summed at once. Single: one float per lane.
struct Paired {
    using Lane = uint32_t;
    using Lanes = u32x16;
    static constexpr int WIDTH = 2;
    static Lanes load_lanes(const Lane* p) { return load_words(p); }
    static Lanes broadcast(Lane x) { return Lanes{} + x; }
    static f32x16 multiply_add(f32x16 acc, Lanes a, Lanes b) { return dot_pairs(acc, a, b); }
};
struct Single {
    using Lane = float;
    using Lanes = f32x16;
    static constexpr int WIDTH = 1;
    static Lanes load_lanes(const Lane* p) { return load(p); }
    static Lanes broadcast(Lane x) { return splat(x); }
    static f32x16 multiply_add(f32x16 acc, Lanes a, Lanes b) { return fma(a, b, acc); }
};

// Without AVX-512, a tile of one vector and many rows has enough sums to keep the multipliers busy, and loads less for
// each; pairs of bf16 need registers to be widened in.
constexpr int TALL_ROWS = 6;
template <class Kind>
bool takes_tall_tiles(int rows) {
    return TILE_ROWS < TALL_ROWS && Kind::WIDTH == 1 && rows > TILE_ROWS;
}

// K of one chunk in groups of 16 positions: dimension (pair) i is at keys[group] + i * stride. Queries see positions of
// the first `groups` groups only.
template <class Kind>
struct KeyChunk {
    const typename Kind::Lane* keys[LANE_GROUPS];
    int64_t stride;
    int groups;
};
// V of one chunk: positions (pairs) begin .. end - 1 are used, each a row of head_dim lanes.
// If `half_at_end`, the last pair's high half is skipped: it has not been written.
template <class Kind>
struct ValueChunk {
    const typename Kind::Lane* rows[CHUNK / Kind::WIDTH];
    int begin, end;
    bool half_at_end;
};

// scores[r][0..63] = q[r] . K for M query vectors of `depth` lanes each.
template <class Kind, int M, int N>
inline void score_tile(const typename Kind::Lane* q, const KeyChunk<Kind>& chunk, int first_group, int64_t depth,
                       float* scores, PagePrefetcher& ahead) {
    f32x16 sums[M][N] = {};
    for (int64_t i = 0; i < depth; i++) {
        ahead.ask();
        typename Kind::Lanes k[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) k[n] = Kind::load_lanes(chunk.keys[first_group + n] + i * chunk.stride);
#pragma GCC unroll 6
        for (int r = 0; r < M; r++) {
            typename Kind::Lanes x = Kind::broadcast(q[r * depth + i]);
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) sums[r][n] = Kind::multiply_add(sums[r][n], x, k[n]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < M; r++)
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) store(scores + r * CHUNK + 16 * (first_group + n), sums[r][n]);
}

// acc[r][column ..] = acc * keep[r] + weights[r] . V for M query vectors and N vectors of columns.
template <class Kind, int M, int N>
inline void output_tile(const typename Kind::Lane* weights, const ValueChunk<Kind>& chunk, int64_t column,
                        int64_t head_dim, const float* keep, float* acc, PagePrefetcher& ahead) {
    constexpr int DEPTH = CHUNK / Kind::WIDTH;
    f32x16 sums[M][N];
#pragma GCC unroll 6
    for (int r = 0; r < M; r++)
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) sums[r][n] = load(acc + r * head_dim + column + 16 * n) * keep[r];
    auto step = [&](int j, bool half) __attribute__((always_inline)) {
        ahead.ask();
        typename Kind::Lanes v[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) {
            v[n] = Kind::load_lanes(chunk.rows[j] + column + 16 * n);
            if constexpr (Kind::WIDTH == 2) {
                if (half) v[n] &= 0xffffu;
            }
        }
#pragma GCC unroll 6
        for (int r = 0; r < M; r++) {
            typename Kind::Lanes x = Kind::broadcast(weights[r * DEPTH + j]);
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) sums[r][n] = Kind::multiply_add(sums[r][n], x, v[n]);
        }
    };
    int whole = chunk.end - (chunk.half_at_end ? 1 : 0);
    for (int j = chunk.begin; j < whole; j++) step(j, false);
    if (chunk.half_at_end) step(whole, true);
#pragma GCC unroll 6
    for (int r = 0; r < M; r++)
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) store(acc + r * head_dim + column + 16 * n, sums[r][n]);
}

// ---- any number of rows and columns, divided into tiles ----

// Call body(first, integral M) with M <= LIMIT to cover `count` as evenly as possible.
template <int LIMIT, class Body>
inline void for_tiles(int count, Body&& body) {
    int tiles = (count + LIMIT - 1) / LIMIT;
    for (int t = 0; t < tiles; t++) {
        int first = count * t / tiles, size = count * (t + 1) / tiles - first;
        switch (size) {
            case 1: body(first, std::integral_constant<int, 1>()); break;
            case 2: body(first, std::integral_constant<int, 2>()); break;
            case 3: if constexpr (LIMIT >= 3) body(first, std::integral_constant<int, 3>()); break;
            case 4: if constexpr (LIMIT >= 4) body(first, std::integral_constant<int, 4>()); break;
            case 5: if constexpr (LIMIT >= 5) body(first, std::integral_constant<int, 5>()); break;
            case 6: if constexpr (LIMIT >= 6) body(first, std::integral_constant<int, 6>()); break;
        }
    }
}

template <class Kind, int ROWS, int VECTORS>
void scores_in_tiles(const typename Kind::Lane* q, int rows, const KeyChunk<Kind>& chunk, int64_t depth, float* scores,
                     PagePrefetcher& ahead) {
    for_tiles<ROWS>(rows, [&](int first, auto m) {
        for (int group = 0; group < chunk.groups; group += VECTORS)
            score_tile<Kind, decltype(m)::value, VECTORS>(q + first * depth, chunk, group, depth,
                                                          scores + first * CHUNK, ahead);
    });
}
template <class Kind, int ROWS, int VECTORS>
void outputs_in_tiles(const typename Kind::Lane* weights, int rows, const ValueChunk<Kind>& chunk, int64_t head_dim,
                      const float* keep, float* acc, PagePrefetcher& ahead) {
    for_tiles<VECTORS>(static_cast<int>(head_dim / 16), [&](int first_vector, auto n) {
        for_tiles<ROWS>(rows, [&](int first, auto m) {
            output_tile<Kind, decltype(m)::value, decltype(n)::value>(weights + first * (CHUNK / Kind::WIDTH), chunk,
                                                                      first_vector * 16, head_dim, keep + first,
                                                                      acc + first * head_dim, ahead);
        });
    });
}

template <class Kind>
void scores_of(const typename Kind::Lane* q, int rows, const KeyChunk<Kind>& chunk, int64_t depth, float* scores,
               PagePrefetcher& ahead) {
    if (takes_tall_tiles<Kind>(rows))
        scores_in_tiles<Kind, TALL_ROWS, 1>(q, rows, chunk, depth, scores, ahead);
    else
        scores_in_tiles<Kind, TILE_ROWS, TILE_VECTORS>(q, rows, chunk, depth, scores, ahead);
}
template <class Kind>
void outputs_of(const typename Kind::Lane* weights, int rows, const ValueChunk<Kind>& chunk, int64_t head_dim,
                const float* keep, float* acc, PagePrefetcher& ahead) {
    if (takes_tall_tiles<Kind>(rows))
        outputs_in_tiles<Kind, TALL_ROWS, 1>(weights, rows, chunk, head_dim, keep, acc, ahead);
    else
        outputs_in_tiles<Kind, TILE_ROWS, TILE_VECTORS>(weights, rows, chunk, head_dim, keep, acc, ahead);
}
