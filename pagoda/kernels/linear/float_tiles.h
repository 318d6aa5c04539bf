// Tiles of a product in floating point: a few rows of x times a few panels, accumulated in registers.
//
// Every output element is summed along K from begin to end in one chain of fused multiply-adds, whatever
// the tile. So a row has the same bits alone and in any batch.
#pragma once

#include "packed.h"
#include "simd.h"

// One step along K: x is broadcast from a 32-bit word and multiplied with 16 columns of weights.
struct StepF32 {
    using Word = float;
    using Weight = float;
    static f32x16 weights(const float* p) { return load(p); }
    static f32x16 splat_word(const float* p) { return splat(*p); }
    static f32x16 accumulate(f32x16 acc, f32x16 x, f32x16 w) { return fma(x, w, acc); }
};
struct StepF16 {
    using Word = float;
    using Weight = f16;
    static f32x16 weights(const f16* p) { return load(p); }
    static f32x16 splat_word(const float* p) { return splat(*p); }
    static f32x16 accumulate(f32x16 acc, f32x16 x, f32x16 w) { return fma(x, w, acc); }
};
struct StepBF16 {
    using Word = uint32_t;
    using Weight = uint32_t;
    static u32x16 weights(const uint32_t* p) { return load_words(p); }
    // Rows of x may begin at any element, so a pair may be unaligned.
    static u32x16 splat_word(const uint32_t* p) {
        uint32_t word;
        memcpy(&word, p, 4);
        return u32x16{} + word;
    }
    static f32x16 accumulate(f32x16 acc, u32x16 x, u32x16 w) { return dot_pairs(acc, x, w); }
};

// out [ROWS][PANELS * 32] (out_stride apart) = x [ROWS] (x_stride words apart) times PANELS panels (panel_stride
// elements apart).
template <class Step, int ROWS, int PANELS>
inline void float_tile(const typename Step::Word* x, int64_t x_stride, const typename Step::Weight* panel,
                       int64_t panel_stride, int64_t steps, float* out, int64_t out_stride, Prefetch prefetch) {
    constexpr int VECTORS = 2 * PANELS;
    f32x16 acc[ROWS][VECTORS] = {};
    for (int64_t s = 0; s < steps; s++) {
        prefetch.next();
        decltype(Step::weights(panel)) w[VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) w[v] = Step::weights(panel + (v / 2) * panel_stride + s * PANEL + (v % 2) * 16);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            auto word = Step::splat_word(x + r * x_stride + s);
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++) acc[r][v] = Step::accumulate(acc[r][v], word, w[v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) store(out + r * out_stride + v * 16, acc[r][v]);
}
