// Rotation of head vectors (NeoX halves), shared by the rotary op and the one fused with the KV write.
#pragma once

#include "elementwise.h"

// cos, sin: half = head_dim / 2 floats of the vector's position. out may be x.
template <class T, class Out>
inline void rotate_vector(const T* x, const float* cos, const float* sin, Out* out, int64_t half) {
    for_lanes(half, [&](int64_t i, int n) {
        f32x16 first = load_lanes(x + i, n), second = load_lanes(x + half + i, n);
        f32x16 c = load_lanes(cos + i, n), s = load_lanes(sin + i, n);
        store_lanes(out + i, first * c - second * s, n);
        store_lanes(out + half + i, second * c + first * s, n);
    });
}

// Rotate every head of x by the position of its row into out. cos, sin: [max_position, dim / 2].
inline void rotate_rows(const Tensor& x, const Tensor& positions, const Tensor& cos, const Tensor& sin, const Tensor& out,
                        int threads) {
    int64_t half = x.dim / 2;
    const int32_t* at = elements_of<int32_t>(positions);
    by_dtype(x.dtype, [&](auto element) {
        using T = decltype(element);
        parallel(threads_for(num_elements(x), threads), [&](int thread, int num_threads) {
            Range mine = share_of(x.rows, thread, num_threads);
            for (int64_t t = mine.begin; t < mine.end; t++) {
                const float *row_cos = elements_of<float>(cos) + at[t] * half, *row_sin = elements_of<float>(sin) + at[t] * half;
                for (int64_t h = 0; h < x.heads; h++)
                    rotate_vector(elements_of<const T>(x) + t * x.stride + h * x.dim, row_cos, row_sin,
                                  elements_of<T>(out) + (t * x.heads + h) * x.dim, half);
            }
        });
    });
}
