// The memory layout of weights for the linear kernels (PackedLinear). Their forms are in abi.h, from linear/forms.py.
//
// Output columns are divided into panels of 32, padded with zeros. Within a panel, K is outermost, so a multiplication
// reads the panel as one stream:
//
//   F32, F16   [K][32]                          BF16      [K / 2][32][2], pairs of adjacent elements along K
//   codes      [K / group] of records: scale f16[32] or its exponent u8[32], of some a minimum f16[32] or a zero point
//              u16[32], and the codes [group * bits / 32][32][4 bytes]. Of a quad, four elements along K, each code has
//              a byte. Of 8 / bits quads, the first has the lowest bits of the bytes; of 5 and 6 bits, the low four of
//              all quads come before the high ones.
//
// Of forms with integer scales (Q4_K, Q5_K, Q6_K) a record has what they count f16[32], of some also what minima count,
// the integers [3 or 4][32][4 bytes], and then the codes of each sub-group as above. Of 8 bits, an integer is a byte. Of 6
// bits, the first word has the scales of sub-groups 0 to 3, the second their minima, and the third the low four bits of
// the other scales, above them of the other minima, whose high bits are on top of the first two words.
#pragma once

#include <cstring>
#include <type_traits>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "abi.h"
#include "simd.h"

// Bits of a code that are apart from its low four.
constexpr int high_bits(int bits) { return bits == 5 || bits == 6 ? bits - 4 : 0; }
constexpr bool is_quantized(int32_t kind) { return WEIGHT_FORMS[kind].offset != OFFSET_NONE; }
inline int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

// Bytes of a record's scales, and of all in front of its codes: scales, and minima or zero points.
constexpr int64_t scales_bytes(int32_t kind) { return WEIGHT_FORMS[kind].scale_bits / 8 * PANEL; }
// Bytes of what integer scales, and minima, count.
constexpr int64_t units_bytes(int32_t kind) { return (WEIGHT_FORMS[kind].offset == OFFSET_MINIMUM ? 4 : 2) * PANEL; }
// Bytes of the integers of one column.
constexpr int64_t integers_bytes(int32_t kind, int64_t group) {
    return group / WEIGHT_FORMS[kind].sub_group * WEIGHT_FORMS[kind].scale_bits / 8 * units_bytes(kind) / (2 * PANEL);
}
constexpr int64_t header_bytes(int32_t kind, int64_t group) {
    if (WEIGHT_FORMS[kind].sub_group != 0) return units_bytes(kind) + integers_bytes(kind, group) * PANEL;
    return scales_bytes(kind) + (WEIGHT_FORMS[kind].offset == OFFSET_MIDDLE ? 0 : 2 * PANEL);
}
constexpr int64_t quantized_record_bytes(int32_t kind, int64_t group) {
    return header_bytes(kind, group) + group * WEIGHT_FORMS[kind].bits / 8 * PANEL;
}
inline float half_at(const uint8_t* p) { return load_lanes(reinterpret_cast<const f16*>(p), 1)[0]; }
// The scales of 16 columns. (That of exponent 0 is 0, since it is far below all others.)
inline f32x16 load_scales(int32_t kind, const uint8_t* at) {
    if (WEIGHT_FORMS[kind].scale_bits == 8) return (f32x16)(load_bytes(at) << 23) * 0.5f;
    return load(reinterpret_cast<const f16*>(at));
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
// Pack WIDTH bits, from bit SHIFT on, of each code of a record, of all columns of a panel: first the words of a column,
// in vectors, then the columns side by side.
// codes(c): those of column c, a byte each.   to: the first sub-group's; that of the next is `sub_bytes` further on.
template <int WIDTH, int SHIFT, int64_t GROUP, int64_t SUB_GROUP, class CodesOf>
void pack_plane(uint8_t* to, int64_t sub_bytes, CodesOf&& codes) {
    constexpr int QUADS = 8 / WIDTH;
    constexpr int64_t WORDS = GROUP / (4 * QUADS), OF_SUB_GROUP = SUB_GROUP / (4 * QUADS);
    constexpr uint32_t MASK = 0x01010101u * (0xffu >> (8 - WIDTH));
    uint32_t words[PANEL][WORDS];
    for (int c = 0; c < PANEL; c++) {
        const uint8_t* from = codes(c);
        for (int64_t word = 0; word < WORDS; word++) {
            uint32_t packed = 0;
            for (int quad = 0; quad < QUADS; quad++) {
                uint32_t four;
                memcpy(&four, from + (word * QUADS + quad) * 4, 4);
                packed |= (four >> SHIFT & MASK) << (quad * WIDTH);
            }
            words[c][word] = packed;
        }
    }
    for (int64_t word = 0; word < WORDS; word++) {
        uint8_t* at = to + word / OF_SUB_GROUP * sub_bytes + word % OF_SUB_GROUP * 4 * PANEL;
        for (int c = 0; c < PANEL; c++) memcpy(at + 4 * c, &words[c][word], 4);
    }
}
// Write a record. scales(c): where those of column c are; second(c): what comes after them, minima, zero points or
// integers; codes(c): a byte each.
template <class Scales, class Second, class CodesOf>
void write_record(const PackedLinear& w, uint8_t* to, int64_t columns, Scales&& scales, Second&& second,
                  CodesOf&& codes) {
    auto words = [&](auto size, int64_t begin, int64_t end, auto&& from) {  // of `size` bytes, a column's side by side
        for (int64_t c = 0; c < columns; c++) {
            const uint8_t* of = from(c);
            for (int64_t i = 0; i < (end - begin) / PANEL / size; i++)
                memcpy(to + begin + (i * PANEL + c) * size, of + i * size, size);
        }
    };
    with_code_group(w, [&](auto at) {
        constexpr int32_t KIND = CODE_GROUPS[at].kind;
        constexpr int64_t GROUP = CODE_GROUPS[at].size;
        constexpr WeightForm FORM = WEIGHT_FORMS[KIND];
        constexpr bool HAS_INTEGERS = FORM.sub_group != 0;
        constexpr int64_t SUB_GROUP = HAS_INTEGERS ? FORM.sub_group : GROUP;
        constexpr int64_t FIRST = HAS_INTEGERS ? units_bytes(KIND) : scales_bytes(KIND);
        constexpr int64_t HEADER = header_bytes(KIND, GROUP);
        words(std::integral_constant<int64_t, !HAS_INTEGERS && FORM.scale_bits == 8 ? 1 : 2>(), 0, FIRST, scales);
        words(std::integral_constant<int64_t, HAS_INTEGERS ? 4 : 2>(), FIRST, HEADER, second);
        static constexpr uint8_t NO_CODES[GROUP] = {};  // of columns that pad a panel
        auto codes_of = [&](int c) { return c < columns ? codes(c) : NO_CODES; };
        constexpr int HIGH = high_bits(FORM.bits), LOW = FORM.bits - HIGH;
        constexpr int64_t SUB_BYTES = SUB_GROUP * FORM.bits / 8 * PANEL;
        pack_plane<LOW, 0, GROUP, SUB_GROUP>(to + HEADER, SUB_BYTES, codes_of);
        if constexpr (HIGH != 0)
            pack_plane<HIGH, 4, GROUP, SUB_GROUP>(to + HEADER + SUB_GROUP * LOW / 8 * PANEL, SUB_BYTES, codes_of);
    });
}
// The codes of a group of one column, a byte each, or the levels that they stand for.
inline void unpack_group(int32_t kind, int64_t group, const uint8_t* from, int64_t column, uint8_t* codes) {
    const WeightForm& form = WEIGHT_FORMS[kind];
    int bits = form.bits;
    memset(codes, 0, static_cast<size_t>(group));
    auto plane = [&](int width, int shift) {
        int quads = 8 / width, mask = (1 << width) - 1;
        for (int64_t word = 0; word < group / (4 * quads); word++, from += 4 * PANEL)
            for (int i = 0; i < 4 * quads; i++) {
                uint8_t& code = codes[word * 4 * quads + i];
                code = static_cast<uint8_t>(code | (from[4 * column + i % 4] >> (i / 4 * width) & mask) << shift);
            }
    };
    plane(bits - high_bits(bits), 0);
    if (high_bits(bits) != 0) plane(high_bits(bits), 4);
    if (form.has_levels)
        for (int64_t i = 0; i < group; i++) codes[i] = form.levels[codes[i]];
}
// Bytes of the first `count` elements along K of one panel, with what the last one shares a word or a group with.
inline int64_t panel_bytes(const PackedLinear& w, int64_t count) {
    switch (w.kind) {
        case KIND_F32: return count * PANEL * 4;
        case KIND_BF16: return (count + 1) / 2 * PANEL * 4;
        case KIND_F16: return count * PANEL * 2;
        default: return (count + w.group - 1) / w.group * quantized_record_bytes(w.kind, w.group);
    }
}
inline int64_t panel_bytes(const PackedLinear& w) { return panel_bytes(w, w.in_features); }

// Every output element is summed by segments of K_SEGMENT elements along K: a chain from zero in each, and segments added
// in order. Keep the sum of a segment, added to those before it if there are any.
inline void store_sum(float* sums, f32x16 segment, bool adds) { store(sums, adds ? load(sums) + segment : segment); }

// Copy `bytes`, a multiple of 16, between addresses that are, too. What is packed is not read before all of it is: going
// through the caches, every line would first be read from memory.
inline void store_past_caches(void* to, const void* from, int64_t bytes) {
#if defined(__SSE2__)
    for (int64_t i = 0; i < bytes / 16; i++)
        _mm_stream_si128(static_cast<__m128i*>(to) + i, _mm_load_si128(static_cast<const __m128i*>(from) + i));
#else
    memcpy(to, from, static_cast<size_t>(bytes));
#endif
}
// Other threads see stores past the caches only after this.
inline void end_stores_past_caches() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

// How often a tile of codes prefetches two lines for 32 elements of a panel. Not much more than it has: a prefetch takes the
// place of a load.
constexpr int prefetches_of_32(const WeightForm& form) { return form.sub_group == 0 ? form.bits : form.bits == 4 ? 5 : 8; }

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
