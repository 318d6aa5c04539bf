// x in the form that the tiles read: unchanged, widened, padded, or quantised by the groups of the weights.
#pragma once

#include "float_tiles.h"
#include "gemm.h"
#include "int8.h"
#include "k_tiles.h"

struct Operand {
    const void* words;  // float tiles
    int64_t stride;     // in words
    QuantizedRows quantized;
};

inline int64_t groups_of(const PackedLinear& w) { return (w.in_features + w.group - 1) / w.group; }
inline int64_t x_groups_of(const PackedLinear& w) {
    return groups_of(w) * w.group / x_group(WEIGHT_FORMS[w.kind], static_cast<int>(w.group));
}
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
    const WeightForm& form = WEIGHT_FORMS[w.kind];
    if (is_quantized(w.kind)) return groups_of(w) * w.group * prefetches_of_32(form) / 32;
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
        auto* sums = reinterpret_cast<int32_t*>(scales + job.rows * x_groups_of(w));
        return {nullptr, 0, {bytes, scales, sums}};
    }
    if (converts(job)) return {job.scratch, words_of(w, w.in_features), {}};
    return {job.x, w.kind == KIND_BF16 ? job.x_stride / 2 : job.x_stride, {}};
}

// What QuantizedRows has of a sum of bytes, of each lane `total`: it, or a middle less it, or what
// `begins_below_zero` of each half of the quads' bytes.
template <int32_t KIND, int GROUP>
int32_t sum_of_bytes(i32x16 total) {
    constexpr const WeightForm& FORM = WEIGHT_FORMS[KIND];
    if constexpr (!begins_below_zero(FORM, GROUP))
        return lane_sum(total) * (FORM.sub_group != 0 && FORM.offset == OFFSET_MIDDLE ? -FORM.middle : 1);
    static constexpr uint32_t HALVES[16] = {1, 1, 1 << 16, 1 << 16, 1, 1, 1 << 16, 1 << 16,
                                            1, 1, 1 << 16, 1 << 16, 1, 1, 1 << 16, 1 << 16};
    int32_t both = lane_sum(total * (i32x16)load_words(HALVES)), first = static_cast<int16_t>(both);
    int32_t second = (both - first) >> 16;
    return static_cast<int32_t>(static_cast<uint16_t>(-FORM.middle * first) |
                                static_cast<uint32_t>(-FORM.middle * second) << 16);
}
// Quantise one x_group: bytes, their scale, and of their sums what QuantizedRows has. `count` of its elements exist and
// the rest are zero. Where sub-groups have minima, a word has the sums of two, whose minima are two bytes apart.
template <int32_t KIND, int GROUP, class T>
void quantize_group(const T* x, int64_t count, int8_t* bytes, float* scale, int32_t* sums) {
    constexpr const WeightForm& FORM = WEIGHT_FORMS[KIND];
    constexpr int SIZE = x_group(FORM, GROUP), PARTS = SIZE / 16, SUMS = sums_of_x_group(FORM, GROUP);
    constexpr int SUB = FORM.sub_group != 0 ? FORM.sub_group : GROUP;
    f32x16 values[PARTS] = {};
    if (count == SIZE) {
        for (int part = 0; part < PARTS; part++) values[part] = load(x + 16 * part);
    } else {
        for_lanes(count, [&](int64_t i, int n) { values[i / 16] = load_lanes(x + i, n); });
    }
    i32x16 largest = {};
    for (f32x16 v : values) largest = vmax(largest, magnitude_bits(v));
    Int8Scale found = int8_scale(largest);
    *scale = found.scale;
    if (!found.finite()) {
        memset(bytes, 0, SIZE);
        memset(sums, 0, sizeof(int32_t) * SUMS);
        return;
    }
    for (int sub = 0; sub < SIZE / SUB; sub++) {
        i32x16 total = {};
        for (int part = sub * (SUB / 16); part < (sub + 1) * (SUB / 16); part++) {
            i32x16 whole = to_nearest(values[part] * found.inverse);
            total += whole;
            store(bytes + 16 * part, whole);
        }
        int32_t sum = sum_of_bytes<KIND, SUB>(total);
        if constexpr (SUMS == SIZE / SUB) {
            sums[sub] = sum;
        } else {
            auto half = static_cast<int16_t>(sum);
            memcpy(reinterpret_cast<int16_t*>(sums + sub / 4 * 2 + sub % 2) + sub % 4 / 2, &half, 2);
        }
    }
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
    constexpr int SIZE = x_group(WEIGHT_FORMS[KIND], GROUP), SUMS = sums_of_x_group(WEIGHT_FORMS[KIND], GROUP);
    int64_t groups = x_groups_of(w), segments = num_segments(w);
    for (int64_t piece = begin; piece < end; piece++) {
        int64_t r = piece / segments, first = piece % segments * (K_SEGMENT / SIZE);
        const T* x = static_cast<const T*>(job.x) + r * job.x_stride;
        for (int64_t g = first; g < std::min(groups, first + K_SEGMENT / SIZE); g++) {
            int64_t left = std::max<int64_t>(w.in_features - g * SIZE, 0), at = r * groups + g;
            T ordered[SIZE];
            if (w.input_order != nullptr) gather_group<SIZE>(x, w.input_order + g * SIZE, ordered);
            quantize_group<KIND, GROUP>(w.input_order != nullptr ? ordered : x + g * SIZE, left < SIZE ? left : SIZE,
                                        const_cast<int8_t*>(to.bytes) + at * SIZE, const_cast<float*>(to.scales) + at,
                                        const_cast<int32_t*>(to.sums) + at * SUMS);
        }
    }
}
template <class T>
void quantize(const LinearJob& job, int64_t begin, int64_t end) {
    with_code_group(*job.weight, [&](auto at) {
        quantize_rows<CODE_GROUPS[at].kind, CODE_GROUPS[at].size, T>(job, begin, end);
    });
}
