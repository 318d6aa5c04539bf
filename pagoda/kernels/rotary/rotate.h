// One head vector rotated (NeoX halves), shared by the rotary op and the one fused with the KV write.
#pragma once

#include "simd.h"

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
