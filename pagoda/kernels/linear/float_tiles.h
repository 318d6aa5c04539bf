// Tiles of a product in floating point: a few rows of x times a few panels, accumulated in registers.
//
// Every output element is summed by segments along K, whatever the tile (packed.h). So a row has the same bits alone and
// in any batch.
#pragma once

#include <algorithm>

#include "packed.h"
#include "simd.h"

#if defined(PAGODA_AVX512)
constexpr bool MANY_REGISTERS = true;  // 32 of 16 lanes; without AVX-512, 16 of 8 or fewer
#else
constexpr bool MANY_REGISTERS = false;
#endif
#if defined(PAGODA_AVX512_BF16)
constexpr bool WIDENS_BF16 = false;  // an instruction multiplies and adds pairs of bf16
#else
constexpr bool WIDENS_BF16 = true;
#endif

// One step along K: a word of x for each product, broadcast and multiplied with 16 columns of weights.
// PRODUCTS: adjacent words of x that one step reads, the last first.
struct StepF32 {
    using Word = float;
    using Weight = float;
    static constexpr int PRODUCTS = 1;
    static f32x16 factor(const float* p, int) { return load(p); }
    static f32x16 splat_word(const float* p) { return splat(*p); }
    static f32x16 accumulate(f32x16 acc, f32x16 x, f32x16 w) { return fma(x, w, acc); }
};
struct StepF16 {
    using Word = float;
    using Weight = f16;
    static constexpr int PRODUCTS = 1;
    static f32x16 factor(const f16* p, int) { return load(p); }
    static f32x16 splat_word(const float* p) { return splat(*p); }
    static f32x16 accumulate(f32x16 acc, f32x16 x, f32x16 w) { return fma(x, w, acc); }
};
#if defined(PAGODA_AVX512_BF16)
// Pairs of bf16 as they are.
struct StepBF16 {
    using Word = uint32_t;
    using Weight = uint32_t;
    static constexpr int PRODUCTS = 1;
    static u32x16 factor(const uint32_t* p, int) { return load_words(p); }
    // Rows of x may begin at any element, so a pair may be unaligned.
    static u32x16 splat_word(const uint32_t* p) {
        uint32_t word;
        memcpy(&word, p, 4);
        return u32x16{} + word;
    }
    static f32x16 accumulate(f32x16 acc, u32x16 x, u32x16 w) { return dot_pairs(acc, x, w); }
};
#else
// Pairs of bf16 weights, widened one after the other, and floats of x. The second of a pair is first, as the instruction
// for pairs has it: the bits are the same (but for denormal sums, which the instruction takes for 0).
struct StepBF16 {
    using Word = float;
    using Weight = uint32_t;
    static constexpr int PRODUCTS = 2;
    static f32x16 factor(const uint32_t* p, int product) {
        u32x16 pair = load_words(p);
        return (f32x16)(product == 0 ? pair << 16 : pair & 0xffff0000u);
    }
    static f32x16 splat_word(const float* p) { return splat(*p); }
    static f32x16 accumulate(f32x16 acc, f32x16 x, f32x16 w) { return fma(x, w, acc); }
};
#endif

// `VECTORS` vectors of columns at a time. OUT_STRIDE: between rows of sums.
template <class Step, int ROWS, int VECTORS, int OUT_STRIDE>
inline __attribute__((always_inline)) void float_pass(const typename Step::Word* x, int64_t x_stride,
                                                      const typename Step::Weight* const* columns, int64_t steps,
                                                      float* out, bool adds, Prefetch& prefetch) {
    f32x16 acc[ROWS][VECTORS] = {};
    for (int64_t s = 0; s < steps; s++) {
        prefetch.next();
#pragma GCC unroll 2
        for (int product = Step::PRODUCTS - 1; product >= 0; product--) {
            decltype(Step::factor(columns[0], 0)) w[VECTORS];
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++) w[v] = Step::factor(columns[v] + s * PANEL, product);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                auto word = Step::splat_word(x + r * x_stride + s * Step::PRODUCTS + product);
#pragma GCC unroll 8
                for (int v = 0; v < VECTORS; v++) acc[r][v] = Step::accumulate(acc[r][v], word, w[v]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) store_sum(out + r * OUT_STRIDE + v * 16, acc[r][v], adds);
}

// With few registers, a tile of many rows computes one of a panel's two vectors of columns after the other.
constexpr int float_passes(int rows) { return MANY_REGISTERS || rows <= 2 ? 1 : 2; }

// out [ROWS][PANELS * 32] = x [ROWS] (x_stride words apart) times PANELS panels (panel_stride elements apart), of a
// segment of `steps` steps. adds: to what is in `out`, the segments before.
template <class Step, int ROWS, int PANELS>
inline void float_tile(const typename Step::Word* x, int64_t x_stride, const typename Step::Weight* panel,
                       int64_t panel_stride, int64_t steps, float* out, bool adds, Prefetch prefetch) {
    constexpr int VECTORS = 2 * PANELS;
    constexpr int AT_ONCE = VECTORS / float_passes(ROWS);
    static_assert(PANELS == 1 || float_passes(ROWS) == 1, "a pass is half a panel, or all panels");
    const typename Step::Weight* columns[VECTORS];
    for (int v = 0; v < VECTORS; v++) columns[v] = panel + (v / 2) * panel_stride + (v % 2) * 16;
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v += AT_ONCE)
        float_pass<Step, ROWS, AT_ONCE, PANELS * PANEL>(x, x_stride, columns + v, steps, out + v * 16, adds, prefetch);
}
