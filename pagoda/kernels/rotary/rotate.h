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

// cos and sin of a row's position, or of its positions: each is of an equal run of a head's pairs.
struct Angles {
    static constexpr int64_t MAX_PAIRS = 256;  // native/arguments.py refuses larger heads
    const int32_t* positions;
    int64_t runs;
    const float *cos, *sin;
    int64_t half;

    Angles(const Tensor& positions, const Tensor& cos, const Tensor& sin)
        : positions(elements_of<int32_t>(positions)),
          runs(positions.dim),
          cos(elements_of<float>(cos)),
          sin(elements_of<float>(sin)),
          half(cos.dim) {}

    // f(cos, sin) of row t.
    template <class F>
    void with_row(int64_t t, F f) const {
        if (runs == 1) return f(cos + positions[t] * half, sin + positions[t] * half);
        float mixed[2][MAX_PAIRS];
        int64_t run = half / runs;
        for (int64_t r = 0; r < runs; r++) {
            int64_t from = positions[t * runs + r] * half + r * run;
            memcpy(mixed[0] + r * run, cos + from, sizeof(float) * run);
            memcpy(mixed[1] + r * run, sin + from, sizeof(float) * run);
        }
        f(mixed[0], mixed[1]);
    }
};

// Rotate every head of x by the angles of its row into out.
inline void rotate_rows(const Tensor& x, const Angles& angles, const Tensor& out, int threads) {
    int64_t half = x.dim / 2;
    by_dtype(x.dtype, [&](auto element) {
        using T = decltype(element);
        for_shares(x.rows, num_elements(x), threads, [&](int64_t t) {
            angles.with_row(t, [&](const float* cos, const float* sin) {
                for (int64_t h = 0; h < x.heads; h++)
                    rotate_vector(elements_of<const T>(x) + t * x.stride + h * x.dim, cos, sin,
                                  elements_of<T>(out) + (t * x.heads + h) * x.dim, half);
            });
        });
    });
}
