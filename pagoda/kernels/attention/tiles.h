// The two products of attention for a few query vectors and one chunk of context.
//
// Every result is one chain of operations in a fixed order (over the head's dimensions for a score, over the context's
// positions for an output), each explicit: the number of query vectors in a tile does not change any bit.
#pragma once

#include "prefetch.h"
#include "simd.h"

constexpr int CHUNK = 64;         // positions scored at once, aligned to their absolute position
constexpr int LANE_GROUPS = CHUNK / 16;
constexpr int TILE_ROWS = 6;
constexpr uint32_t ALL_BITS = 0xffffffffu;

// Vectors of a tile of `rows` query vectors. AVX-512: 24 sums, 4 vectors of K or V and a broadcast fit its 32 registers.
// Otherwise there are 16 registers of half the size, and 8 sums of half a vector keep the multipliers busy.
constexpr int tile_vectors(int rows) {
#if defined(PAGODA_AVX512)
    return rows > 0 ? 4 : 0;
#else
    return rows == 1 ? 4 : rows == 2 ? 2 : 1;
#endif
}

// Operand formats. A `Lane` is 32 bits of K or V and holds WIDTH elements. It is multiplied by PRODUCTS words of a query
// vector or of its weights, one after the other, the last first.

#if defined(PAGODA_AVX512_BF16)
// Two bf16 in a lane and in a word, multiplied and summed at once.
struct PairsOfBF16 {
    using Lane = uint32_t;
    using Word = uint32_t;
    static constexpr int WIDTH = 2, PRODUCTS = 1;
    static u32x16 factor(u32x16 lanes, int) { return lanes; }
    static u32x16 broadcast(Word x) { return u32x16{} + x; }
    static f32x16 multiply_add(f32x16 acc, u32x16 a, u32x16 b) { return dot_pairs(acc, a, b); }
    // Write 16 elements from element i of `words` on.
    static void put(Word* words, int64_t i, f32x16 v) { store(reinterpret_cast<bf16*>(words) + i, v); }
};
#else
// Two bf16 in a lane, each widened in a register once for all query vectors of a tile; words are floats with bf16 values,
// widened once for all tiles. The second of a pair is first, as with the instruction for pairs.
struct PairsOfBF16 {
    using Lane = uint32_t;
    using Word = float;
    static constexpr int WIDTH = 2, PRODUCTS = 2;
    static f32x16 factor(u32x16 lanes, int product) {
        return (f32x16)(product == 0 ? lanes << 16 : lanes & 0xffff0000u);
    }
    static f32x16 broadcast(Word x) { return splat(x); }
    static f32x16 multiply_add(f32x16 acc, f32x16 a, f32x16 b) { return fma(a, b, acc); }
    // Write 16 elements from element i of `words` on.
    static void put(Word* words, int64_t i, f32x16 v) { store(words + i, rounded<bf16>(v)); }
};
#endif
// Single: one float in a lane and in a word.
struct Single {
    using Lane = float;
    using Word = float;
    static constexpr int WIDTH = 1, PRODUCTS = 1;
    static f32x16 factor(u32x16 lanes, int) { return (f32x16)lanes; }
    static f32x16 broadcast(Word x) { return splat(x); }
    static f32x16 multiply_add(f32x16 acc, f32x16 a, f32x16 b) { return fma(a, b, acc); }
    static void put(Word* words, int64_t i, f32x16 v) { store(words + i, v); }
};
// Words of a query vector of `depth` lanes, and of its weights for one chunk.
template <class Kind>
constexpr int64_t words_of(int64_t depth) {
    return depth * Kind::PRODUCTS;
}
template <class Kind>
constexpr int64_t WEIGHT_WORDS = words_of<Kind>(CHUNK / Kind::WIDTH);

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

// sums[r][n] += word(r, product) * lanes[n] for M query vectors and N vectors of lanes.
template <class Kind, int M, int N, class WordOf>
inline __attribute__((always_inline)) void multiply_lanes(f32x16 (&sums)[M][N], const typename Kind::Lane* const (&lanes)[N],
                                                          uint32_t mask, WordOf&& word) {
#pragma GCC unroll 2
    for (int product = Kind::PRODUCTS - 1; product >= 0; product--) {
        decltype(Kind::factor(u32x16(), 0)) factors[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) factors[n] = Kind::factor(load_words(lanes[n]) & mask, product);
#pragma GCC unroll 6
        for (int r = 0; r < M; r++) {
            auto x = Kind::broadcast(word(r, product));
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) sums[r][n] = Kind::multiply_add(sums[r][n], x, factors[n]);
        }
    }
}

// scores[r][0..63] = q[r] . K for M query vectors of `depth` lanes each. q: words [depth][PRODUCTS][M].
template <class Kind, int M, int N>
inline void score_tile(const typename Kind::Word* q, const KeyChunk<Kind>& chunk, int first_group, int64_t depth,
                       float* scores, PagePrefetcher& ahead) {
    f32x16 sums[M][N] = {};
    const typename Kind::Lane* keys[N];
    for (int n = 0; n < N; n++) keys[n] = chunk.keys[first_group + n];
    int64_t stride = chunk.stride;
    for (int64_t i = 0; i < depth; i++, q += words_of<Kind>(M)) {
        ahead.issue();
        multiply_lanes<Kind, M, N>(sums, keys, ALL_BITS, [&](int r, int product) { return q[product * M + r]; });
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) keys[n] += stride;
    }
#pragma GCC unroll 6
    for (int r = 0; r < M; r++)
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) store(scores + r * CHUNK + 16 * (first_group + n), sums[r][n]);
}

// acc[r][column ..] = acc * keep[r] + weights[r] . V for M query vectors and N vectors of columns.
template <class Kind, int M, int N>
inline void output_tile(const typename Kind::Word* weights, const ValueChunk<Kind>& chunk, int64_t column,
                        int64_t head_dim, const float* keep, float* acc, PagePrefetcher& ahead) {
    f32x16 sums[M][N];
#pragma GCC unroll 6
    for (int r = 0; r < M; r++)
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) sums[r][n] = load(acc + r * head_dim + column + 16 * n) * keep[r];
    auto step = [&](int j, uint32_t mask) __attribute__((always_inline)) {
        ahead.issue();
        const typename Kind::Lane* values[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) values[n] = chunk.rows[j] + column + 16 * n;
        const typename Kind::Word* words = weights + words_of<Kind>(j);
        multiply_lanes<Kind, M, N>(sums, values, mask,
                                   [&](int r, int product) { return words[r * WEIGHT_WORDS<Kind> + product]; });
    };
    int whole = chunk.end - (chunk.half_at_end ? 1 : 0);
    for (int j = chunk.begin; j < whole; j++) step(j, ALL_BITS);
    if (chunk.half_at_end) step(whole, 0xffffu);
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

// The query vectors q[0 .. rows - 1] of `depth` lanes as the tiles read them: tile by tile, word(r, i) the i-th of q[r].
template <class Kind, class WordOf>
void order_by_tile(typename Kind::Word* to, int rows, int64_t depth, WordOf&& word) {
    for_tiles<TILE_ROWS>(rows, [&](int first, auto m) {
        for (int64_t i = 0; i < words_of<Kind>(depth); i++)
            for (int r = 0; r < m; r++) *to++ = word(first + r, i);
    });
}

// q: as order_by_tile leaves it.
template <class Kind>
void scores_of(const typename Kind::Word* q, int rows, const KeyChunk<Kind>& chunk, int64_t depth, float* scores,
               PagePrefetcher& ahead) {
    for_tiles<TILE_ROWS>(rows, [&](int first, auto m) {
        constexpr int M = decltype(m)::value, N = tile_vectors(M);
        for (int group = 0; group < chunk.groups; group += N)
            score_tile<Kind, M, N>(q + first * words_of<Kind>(depth), chunk, group, depth, scores + first * CHUNK, ahead);
    });
}
template <class Kind>
void outputs_of(const typename Kind::Word* weights, int rows, const ValueChunk<Kind>& chunk, int64_t head_dim,
                const float* keep, float* acc, PagePrefetcher& ahead) {
    for_tiles<TILE_ROWS>(rows, [&](int first, auto m) {
        constexpr int M = decltype(m)::value;
        for_tiles<tile_vectors(M)>(static_cast<int>(head_dim / 16), [&](int first_vector, auto n) {
            output_tile<Kind, M, decltype(n)::value>(weights + first * WEIGHT_WORDS<Kind>, chunk, first_vector * 16,
                                                     head_dim, keep + first, acc + first * head_dim, ahead);
        });
    });
}
