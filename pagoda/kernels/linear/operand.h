// x in the form that the tiles read: unchanged, widened, padded, or quantised by the groups of the weights.
#pragma once

#include "float_tiles.h"
#include "gemm.h"
#include "int8.h"
#include "int_tiles.h"

struct Operand {
    const void* words;  // float tiles
    int64_t stride;     // in words
    QuantizedRows quantized;
};

inline int64_t groups_of(const PackedLinear& w) { return (w.in_features + w.group - 1) / w.group; }
// Elements along K that are multiplied with all rows and panels that a thread is given, before the next.
inline int64_t elements_at_once(const PackedLinear& w) {
    return is_quantized(w.kind) ? w.in_features : std::min(w.in_features, K_SEGMENT);
}
// Steps along K of float tiles for `count` elements, and the words of x that they read.
inline int64_t word_steps(const PackedLinear& w, int64_t count) { return w.kind == KIND_BF16 ? (count + 1) / 2 : count; }
inline int64_t words_of(const PackedLinear& w, int64_t count) {
    return w.kind == KIND_BF16 && WIDENS_BF16 ? 2 * word_steps(w, count) : word_steps(w, count);
}
// Bytes of what is multiplied at once of a row of x, in the form that the tiles read.
inline int64_t row_bytes(const PackedLinear& w) {
    return is_quantized(w.kind) ? w.in_features : 4 * words_of(w, elements_at_once(w));
}
// How many times a tile of `rows` rows prefetches a line of what is next, for `count` elements along K.
inline int64_t tile_steps(const PackedLinear& w, int64_t rows, int64_t count) {
    if (is_quantized(w.kind)) return groups_of(w) * w.group * WEIGHT_FORMS[w.kind].bits / 32;
    return word_steps(w, count) * float_passes(static_cast<int>(rows));
}

inline bool converts(const LinearJob& job) {
    switch (job.weight->kind) {
        case KIND_F32: return false;
        case KIND_BF16: return WIDENS_BF16 || job.weight->in_features % 2 != 0 || job.x_stride % 2 != 0;
        default: return true;
    }
}

inline Operand operand(const LinearJob& job) {
    const PackedLinear& w = *job.weight;
    if (is_quantized(w.kind)) {
        int64_t groups = groups_of(w);
        auto* bytes = static_cast<int8_t*>(job.scratch);
        auto* scales = reinterpret_cast<float*>(bytes + round_up(job.rows * groups * w.group, 64));
        auto* sums = reinterpret_cast<int32_t*>(scales + job.rows * groups);
        return {nullptr, 0, {bytes, scales, sums}};
    }
    if (converts(job)) return {job.scratch, words_of(w, w.in_features), {}};
    return {job.x, w.kind == KIND_BF16 ? job.x_stride / 2 : job.x_stride, {}};
}

template <class T>
void widen(const T* x, float* to, int64_t count) {
    for_lanes(count, [&](int64_t i, int n) { store_lanes(to + i, load_lanes(x + i, n), n); });
}

// Quantise one group: bytes, their scale, and their sum or what QuantizedRows has in its place. Of the group `count`
// elements exist and the rest are zero. BELOW_ZERO: the middle of a form of which `begins_below_zero`; 0 of others.
template <int GROUP, int BELOW_ZERO, class T>
void quantize_group(const T* x, int64_t count, int8_t* bytes, float* scale, int32_t* sum) {
    constexpr int PARTS = GROUP / 16;
    f32x16 values[PARTS] = {};
    if (count == GROUP) {
        for (int part = 0; part < PARTS; part++) values[part] = load(x + 16 * part);
    } else {
        for_lanes(count, [&](int64_t i, int n) { values[i / 16] = load_lanes(x + i, n); });
    }
    i32x16 largest = {};
    for (f32x16 v : values) largest = vmax(largest, magnitude_bits(v));
    Int8Scale found = int8_scale(largest);
    *scale = found.scale;
    if (!found.finite()) {
        memset(bytes, 0, GROUP);
        *sum = 0;
        return;
    }
    i32x16 total = {};
    for (int part = 0; part < PARTS; part++) {
        i32x16 whole = to_nearest(values[part] * found.inverse);
        total += whole;
        store(bytes + 16 * part, whole);
    }
    if constexpr (BELOW_ZERO == 0) {
        *sum = lane_sum(total);
        return;
    }
    static constexpr uint32_t HALVES[16] = {1, 1, 1 << 16, 1 << 16, 1, 1, 1 << 16, 1 << 16,
                                            1, 1, 1 << 16, 1 << 16, 1, 1, 1 << 16, 1 << 16};
    int32_t both = lane_sum(total * (i32x16)load_words(HALVES)), first = static_cast<int16_t>(both);
    int32_t second = (both - first) >> 16;
    *sum = static_cast<int32_t>(static_cast<uint16_t>(-BELOW_ZERO * first) |
                                static_cast<uint32_t>(-BELOW_ZERO * second) << 16);
}

// Elements order[0] .. order[GROUP - 1] of a row; zeros for those below 0.
template <int GROUP, class T>
void gather_group(const T* row, const int32_t* order, T* to) {
    for (int i = 0; i < GROUP; i++) to[i] = order[i] < 0 ? T{} : row[order[i]];
}

template <int32_t KIND, int GROUP, class T>
void quantize_rows(const LinearJob& job, int64_t begin, int64_t end) {
    const PackedLinear& w = *job.weight;
    QuantizedRows to = operand(job).quantized;
    int64_t groups = groups_of(w);
    constexpr const WeightForm& FORM = WEIGHT_FORMS[KIND];
    constexpr int BELOW_ZERO = begins_below_zero(FORM, GROUP) ? FORM.middle : 0;
    int64_t segments = num_segments(w);
    for (int64_t piece = begin; piece < end; piece++) {
        int64_t r = piece / segments, first = piece % segments * (K_SEGMENT / GROUP);
        const T* x = static_cast<const T*>(job.x) + r * job.x_stride;
        for (int64_t g = first; g < std::min(groups, first + K_SEGMENT / GROUP); g++) {
            int64_t left = w.in_features - g * GROUP;
            T ordered[GROUP];
            if (w.order != nullptr) gather_group<GROUP>(x, w.order + g * GROUP, ordered);
            quantize_group<GROUP, BELOW_ZERO>(
                w.order != nullptr ? ordered : x + g * GROUP, left < GROUP ? left : GROUP,
                const_cast<int8_t*>(to.bytes) + (r * groups + g) * GROUP,
                const_cast<float*>(to.scales) + r * groups + g, const_cast<int32_t*>(to.sums) + r * groups + g);
        }
    }
}
template <class T>
void quantize(const LinearJob& job, int64_t begin, int64_t end) {
    with_code_group(*job.weight, [&](auto at) {
        quantize_rows<CODE_GROUPS[at].kind, CODE_GROUPS[at].size, T>(job, begin, end);
    });
}
