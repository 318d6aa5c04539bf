// The gated activations, shared by their own op and by the linear layer that ends in one.
#pragma once

#include "simd.h"

struct Silu {
    static f32x16 of(f32x16 x) { return x * sigmoid(x); }
};
struct GeluTanh {
    static f32x16 of(f32x16 x) {
        f32x16 inner = 0.7978845608028654f * (x + 0.044715f * (x * x * x));
        return 0.5f * x * (1.0f + tanh(inner));
    }
};
