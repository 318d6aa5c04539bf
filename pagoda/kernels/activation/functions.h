// The activation functions, shared by their own ops and by linear layers that end in one.
#pragma once

#include "abi.h"
#include "simd.h"

struct Identity {
    static f32x16 of(f32x16 x) { return x; }
};
struct Silu {
    static f32x16 of(f32x16 x) { return x * sigmoid(x); }
};
struct GeluTanh {
    static f32x16 of(f32x16 x) {
        // (1 + tanh(y)) / 2 as the sigmoid of 2 y, which does not cancel for tanh near -1.
        return x * sigmoid(1.5957691216057308f * (x + 0.044715f * (x * x * x)));
    }
};

struct Gelu {
    // x times the normal distribution's integral. Of |x|, one minus that integral is a polynomial in t times the density
    // (Abramowitz and Stegun 7.1.26, within 1.5e-7): for negative x that is the result itself, so nothing cancels.
    static f32x16 of(f32x16 x) {
        f32x16 z = select(x > 0.0f, x, -x) * 0.70710678118654752f;
        f32x16 t = 1.0f / (1.0f + 0.3275911f * z);
        f32x16 p = fma(splat(1.061405429f), t, splat(-1.453152027f));
        p = fma(p, t, splat(1.421413741f));
        p = fma(p, t, splat(-0.284496736f));
        p = fma(p, t, splat(0.254829592f));
        f32x16 above = 0.5f * (p * t) * exp(-(z * z));
        return x * select(x > 0.0f, 1.0f - above, above);
    }
};
struct Relu {
    static f32x16 of(f32x16 x) { return select(x < 0.0f, f32x16{}, x); }  // NaN stays NaN
};
struct ReluSquared {
    static f32x16 of(f32x16 x) { return Relu::of(x) * x; }
};
struct Sigmoid {
    static f32x16 of(f32x16 x) { return sigmoid(x); }
};
struct Tanh {
    static f32x16 of(f32x16 x) { return tanh(x); }
};

// Call body(function) for the kind's function.
template <class Body>
inline void by_activation(int32_t kind, Body&& body) {
    switch (kind) {
        case ACTIVATION_IDENTITY: return body(Identity{});
        case ACTIVATION_SILU: return body(Silu{});
        case ACTIVATION_GELU: return body(Gelu{});
        case ACTIVATION_GELU_TANH: return body(GeluTanh{});
        case ACTIVATION_RELU: return body(Relu{});
        case ACTIVATION_RELU_SQUARED: return body(ReluSquared{});
        case ACTIVATION_SIGMOID: return body(Sigmoid{});
        case ACTIVATION_TANH: return body(Tanh{});
        default: abort();
    }
}

// out[i] = function(gate[i]) * gate[up + i] for `count` elements.
template <class Function, class T>
inline void gate_lanes(const T* gate, int64_t up, T* out, int64_t count) {
    for_lanes(count, [&](int64_t i, int n) {
        store_lanes(out + i, Function::of(load_lanes(gate + i, n)) * load_lanes(gate + up + i, n), n);
    });
}
