// Quantisation to int8: symmetric, the largest magnitude of a group becomes 127.
#pragma once

#include <cfloat>
#include <cmath>

#include "simd.h"

// scale: from codes to values. inverse: from values to codes.
// If a value is not finite, `scale` is NaN, and so is every sum that includes the group; its codes must be 0.
struct Int8Scale {
    float scale, inverse;
    bool finite() const { return scale == scale; }
};

// largest: the lanes' largest magnitude_bits.
inline Int8Scale int8_scale(i32x16 largest) {
    float limit = largest_magnitude(largest);
    if (!(limit <= FLT_MAX)) return {NAN, 0.0f};
    return {limit / 127.0f, limit > 127.0f / FLT_MAX ? 127.0f / limit : 0.0f};  // too small to divide by: zeros
}
