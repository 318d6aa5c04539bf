// The gated activations, shared by their own ops and by linear layers with a fused gate.
#pragma once

#include "simd.h"

struct Silu {
    static f32x16 of(f32x16 x) { return x * sigmoid(x); }
};
struct GeluTanh {
    static f32x16 of(f32x16 x) {
        // (1 + tanh(y)) / 2 as the sigmoid of 2 y, which does not cancel for tanh near -1.
        return x * sigmoid(1.5957691216057308f * (x + 0.044715f * (x * x * x)));
    }
};

// out[i] = activation(gate[i]) * gate[up + i] for `count` elements.
template <class Activation, class T>
inline void gate_lanes(const T* gate, int64_t up, T* out, int64_t count) {
    for_lanes(count, [&](int64_t i, int n) {
        store_lanes(out + i, Activation::of(load_lanes(gate + i, n)) * load_lanes(gate + up + i, n), n);
    });
}
