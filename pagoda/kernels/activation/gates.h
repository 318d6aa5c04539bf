// The gated activations, shared by their own op and by the linear layer that ends in one.
#pragma once

#include "simd.h"

struct Silu {
    static f32x16 of(f32x16 x) { return x * sigmoid(x); }
};
struct GeluTanh {
    static f32x16 of(f32x16 x) {
        // (1 + tanh(y)) / 2 is the sigmoid of 2 y, without the cancellation where tanh nears -1.
        return x * sigmoid(1.5957691216057308f * (x + 0.044715f * (x * x * x)));
    }
};
