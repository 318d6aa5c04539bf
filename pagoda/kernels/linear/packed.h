// The memory layout of weights for the linear kernels (PackedLinear). Their forms are in abi.h, from linear/forms.py.
//
// Output columns are divided into panels of 32, padded with zeros. Within a panel, K is outermost, so a multiplication
// reads the panel as one stream:
//
//   F32, F16   [K][32]                          BF16      [K / 2][32][2], pairs of adjacent elements along K
//   codes      [K / group] of records: scale f16[32], of some a minimum f16[32] or a zero point u16[32], and the codes
//              [group * bits / 32][32][4 bytes]. Of a quad, four elements along K, each code has a byte. Of 8 / bits
//              quads, the first has the lowest bits of the bytes.
#pragma once

#include <type_traits>

#include "abi.h"

constexpr bool is_quantized(int32_t kind) { return WEIGHT_FORMS[kind].offset != OFFSET_NONE; }
inline int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

// Bytes in front of a record's codes: scales, and minima or zero points.
constexpr int64_t header_bytes(int32_t kind) {
    return WEIGHT_FORMS[kind].offset == OFFSET_MIDDLE ? 2 * PANEL : 4 * PANEL;
}
constexpr int64_t quantized_record_bytes(int32_t kind, int64_t group) {
    return header_bytes(kind) + group * WEIGHT_FORMS[kind].bits / 8 * PANEL;
}
// Call f with the index into CODE_GROUPS of a quantised weight, as a constant.
template <int AT = 0, class F>
void with_code_group(const PackedLinear& w, F&& f) {
    constexpr int COUNT = sizeof(CODE_GROUPS) / sizeof(CODE_GROUPS[0]);
    if constexpr (AT < COUNT) {
        if (w.kind == CODE_GROUPS[AT].kind && w.group == CODE_GROUPS[AT].size)
            f(std::integral_constant<int, AT>());
        else
            with_code_group<AT + 1>(w, f);
    }
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
