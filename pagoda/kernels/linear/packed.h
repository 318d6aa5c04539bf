// The memory layout of weights for the linear kernels (PackedLinear, of abi.h).
//
// Output columns are divided into panels of 32, padded with zeros. Within a panel, K is outermost, so a multiplication
// reads the panel as one stream:
//
//   F32, F16   [K][32]                          BF16      [K / 2][32][2], pairs of adjacent elements along K
//   Q8         [K / group] of {scale f16[32], [group / 4][32][4] unsigned bytes, the value plus 128}
//   Q4         [K / 32] of {scale f16[32], [4][32][4] bytes}; a byte's low nibble is of quad 2i, the high of quad 2i + 1
//   Q4_MIN     as Q4 with {scale f16[32], minimum f16[32], ...}
//   Q4_ZERO    as Q4 with {scale f16[32], zero point u16[32], ...}
//
// Values of the quantised kinds: Q8 scale * (q - 128); Q4 scale * (q - 8); Q4_MIN scale * q + minimum;
// Q4_ZERO scale * (q - zero point).
#pragma once

#include "abi.h"

inline bool is_quantized(int32_t kind) { return kind >= KIND_Q8; }
inline int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

// Bytes in front of a record's codes: scales, and minima or zero points.
constexpr int64_t header_bytes(int32_t kind) {
    return kind == KIND_Q4_MIN || kind == KIND_Q4_ZERO ? 4 * PANEL : 2 * PANEL;
}
inline int64_t quantized_record_bytes(int32_t kind, int64_t group) {
    return header_bytes(kind) + (kind == KIND_Q8 ? group : group / 2) * PANEL;
}
// Bytes of one panel.
inline int64_t panel_bytes(const PackedLinear& w) {
    switch (w.kind) {
        case KIND_F32: return w.in_features * PANEL * 4;
        case KIND_BF16: return (w.in_features + 1) / 2 * PANEL * 4;
        case KIND_F16: return w.in_features * PANEL * 2;
        default: return (w.in_features + w.group - 1) / w.group * quantized_record_bytes(w.kind, w.group);
    }
}

// The panels that a tile prefetches, some bytes per step, so that they arrive while the tile computes instead of all at
// once before the next tile.
struct Prefetch {
    const char* at;
    int64_t step;    // bytes per step, or 0 to prefetch nothing new
    int64_t second;  // bytes to a step's second line, or 0 for one line per step
    void next() {
        __builtin_prefetch(at, 0, 2);
        __builtin_prefetch(at + second, 0, 2);
        at += step;
    }
};
