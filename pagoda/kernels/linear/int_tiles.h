// Tiles of a product of quantised x and quantised weights: integers within a group, floats across groups.
//
// Sums within a group are exact; groups are added by segments along K, in every tile (packed.h).
#pragma once

#include <algorithm>

#include "packed.h"
#include "simd.h"

// Rows of x, quantised: bytes [rows][groups * group], and of each x_group a scale and the sum of its bytes. Of forms of
// which `begins_below_zero`, two halfwords in place of the sum, with which each lane's sums in halfwords begin. Of forms
// with integer scales, `sums_of_x_group` each: see quantize_group (operand.h).
struct QuantizedRows {
    const int8_t* bytes;
    const float* scales;
    const int32_t* sums;
};

#if defined(PAGODA_AVX2) && !defined(__AVXVNNI__)
constexpr bool WITHOUT_VNNI = true;  // AVX2: sums in halfwords, where they fit
#else
constexpr bool WITHOUT_VNNI = false;
#endif
// The largest byte of w that the products below take: a code, or a level made positive.
constexpr int largest_byte(const WeightForm& form) { return form.has_levels ? 2 * form.middle : (1 << form.bits) - 1; }
// Whether sums of `quads` products in halfwords are below 2^15, if each byte of w is less by `less`.
constexpr bool fit_halfwords(const WeightForm& form, int quads, int less) {
    return std::max(less, largest_byte(form) - less) * 2 * 127 * quads <= 32767;  // bytes of x are at most 127
}
// Whether a group's products fit in halfwords only less those of the middle, with which the sums begin. On the way they
// may wrap around.
constexpr bool begins_below_zero(const WeightForm& form, int group) {
    return WITHOUT_VNNI && form.offset == OFFSET_MIDDLE && !fit_halfwords(form, group / 4, 0) &&
           fit_halfwords(form, group / 4, form.middle);
}
// The quads of a group whose products add up in halfwords first; 0 for none.
constexpr int quads_in_halfwords(const WeightForm& form, int group) {
    if (!WITHOUT_VNNI || largest_byte(form) > 127) return 0;
    for (int quads = group / 4; quads >= 4; quads /= 2)
        if (fit_halfwords(form, quads, begins_below_zero(form, group) ? form.middle : 0)) return quads;
    return 0;
}

// How many elements of x share a scale: those of a group, or with integer scales, of which a group has many, fewer.
constexpr int x_group(const WeightForm& form, int group) { return form.sub_group != 0 ? X_GROUP : group; }
// Words of `sums` per x_group: one, or with integer scales one per sub-group, or where there are minima per two.
constexpr int sums_of_x_group(const WeightForm& form, int group) {
    if (form.sub_group == 0) return 1;
    return x_group(form, group) / form.sub_group / (form.offset == OFFSET_MINIMUM ? 2 : 1);
}

// acc + the dot products of four unsigned bytes of w, of BITS bits each, with four signed bytes of x, in each of 16 lanes.
// WITHOUT_VNNI, of four bytes of w less 128, and BITS is 8.
// Exact: where the sum of two products may not fit in a halfword, vpmaddubsw would saturate.
template <int BITS>
inline i32x16 dot_quads(i32x16 acc, u32x16 w, u32x16 x) {
#if defined(PAGODA_AVX512) && defined(__AVX512VNNI__)
    // Not the intrinsic: GCC 12 spills its accumulators, which halves the speed.
    asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x));
    return acc;
#elif defined(PAGODA_AVX512)
    __m512i pairs;
    if constexpr (BITS < 8) {
        pairs = _mm512_madd_epi16(_mm512_maddubs_epi16((__m512i)w, (__m512i)x), _mm512_set1_epi16(1));
    } else {
        __m512i even = _mm512_srai_epi16(_mm512_slli_epi16((__m512i)x, 8), 8), odd = _mm512_srai_epi16((__m512i)x, 8);
        pairs = _mm512_add_epi32(_mm512_madd_epi16((__m512i)(w & 0x00ff00ffu), even),
                                 _mm512_madd_epi16(_mm512_srli_epi16((__m512i)w, 8), odd));
    }
    return acc + (i32x16)pairs;
#elif defined(PAGODA_AVX2)
    using Signed = decltype(acc.low);
    auto half = [](Signed sum, __m256i a, __m256i b) __attribute__((always_inline)) {
#if defined(__AVXVNNI__)
        asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
        return sum;
#else
        static_assert(BITS == 8, "fewer bits add up in halfwords");
        __m256i less = _mm256_xor_si256(a, _mm256_set1_epi8(-128));  // as a magnitude and its sign
        __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(less), _mm256_sign_epi8(b, less));
        return sum + (Signed)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#endif
    };
    return {half(acc.low, (__m256i)w.low, (__m256i)x.low), half(acc.high, (__m256i)w.high, (__m256i)x.high)};
#else
    for (int byte = 0; byte < 4; byte++) {
        i32x16 a = (i32x16)((w >> (8 * byte)) & 0xffu);
        i32x16 b = (i32x16)(x << (24 - 8 * byte)) >> 24;
        acc += a * b;
    }
    return acc;
#endif
}

// sums + the sums of two products of bytes of w, of at most 7 bits, and of x, in each of 32 halfwords.
inline u32x16 add_in_halfwords(u32x16 sums, [[maybe_unused]] u32x16 w, [[maybe_unused]] u32x16 x) {
#if defined(PAGODA_AVX2)
    using Half = decltype(sums.low);
    auto half = [](Half sum, Half a, Half b) __attribute__((always_inline)) {
        // Not the intrinsic: GCC 12 would add the products first, and keep the sums in memory.
        asm("vpaddw %1, %0, %0" : "+x"(sum) : "x"(_mm256_maddubs_epi16((__m256i)a, (__m256i)b)));
        return sum;
    };
    return {half(sums.low, w.low, x.low), half(sums.high, w.high, x.high)};
#else
    return sums;
#endif
}
// acc + the products of the two signed halfwords of each lane of a and b.
inline i32x16 add_halfwords(i32x16 acc, u32x16 a, u32x16 b) {
#if defined(PAGODA_AVX512) && defined(__AVX512VNNI__)
    asm("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
    return acc;
#elif defined(PAGODA_AVX512)
    return acc + (i32x16)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(PAGODA_AVX2)
    using Half = decltype(acc.low);
    return {acc.low + (Half)_mm256_madd_epi16((__m256i)a.low, (__m256i)b.low),
            acc.high + (Half)_mm256_madd_epi16((__m256i)a.high, (__m256i)b.high)};
#else
    auto halves = [](u32x16 of, int shift) { return (i32x16)(of << shift) >> 16; };
    return acc + halves(a, 0) * halves(b, 0) + halves(a, 16) * halves(b, 16);
#endif
}

// table[byte] for each byte, all below 16.
inline u32x16 look_up(const uint8_t (&table)[16], u32x16 bytes) {
#if defined(PAGODA_AVX512)
    __m512i tables = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table));
    return (u32x16)_mm512_shuffle_epi8(tables, (__m512i)bytes);
#elif defined(PAGODA_AVX2)
    __m256i tables = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
    using Half = decltype(bytes.low);
    return {(Half)_mm256_shuffle_epi8(tables, (__m256i)bytes.low),
            (Half)_mm256_shuffle_epi8(tables, (__m256i)bytes.high)};
#else
    uint8_t found[64];
    store_lanes_of(found, bytes);
    for (uint8_t& byte : found) byte = table[byte];
    return load_words(found);
#endif
}

// A quad of the codes of 16 columns, a byte each. data: those of the first word of their group.
template <int32_t KIND, int GROUP>
__attribute__((always_inline)) inline u32x16 codes_of(const uint8_t* data, int quad) {
    constexpr const WeightForm& FORM = WEIGHT_FORMS[KIND];
    constexpr int HIGH = high_bits(FORM.bits), LOW = FORM.bits - HIGH, QUADS = 8 / LOW;
    u32x16 w = load_words(data + quad / QUADS * 4 * PANEL);
    if constexpr (QUADS > 1) w = (w >> (quad % QUADS * LOW)) & (0x01010101u * ((1u << LOW) - 1));
    if constexpr (FORM.has_levels) w = look_up(FORM.levels, w);
    if constexpr (HIGH != 0) {
        static_assert(GROUP * HIGH == 32, "the high bits of a group are in one word");
        u32x16 high = load_words(data + GROUP / (4 * QUADS) * 4 * PANEL);
        int up = 4 - HIGH * quad;  // one shift, and one instruction for `and` and `or`
        w |= (up >= 0 ? high << up : high >> -up) & (0x10101010u * ((1u << HIGH) - 1));
    }
    return w;
}

// A segment of int_tile: groups first .. end - 1. adds: to what is in `out`, the segments before.
template <int32_t KIND, int GROUP, int ROWS, int PANELS>
__attribute__((noinline)) Prefetch int_segment(const QuantizedRows& x, int64_t groups, int64_t first_group, int64_t end,
                                               const uint8_t* panel, int64_t panel_stride, float* out,
                                               bool adds, Prefetch prefetch) {
    constexpr int VECTORS = 2 * PANELS;
    constexpr int64_t HEADER = header_bytes(KIND, GROUP), SCALES = scales_bytes(KIND);
    constexpr int64_t RECORD = quantized_record_bytes(KIND, GROUP);
    constexpr const WeightForm& FORM = WEIGHT_FORMS[KIND];
    constexpr int BITS = FORM.bits, HIGH = high_bits(BITS), LOW = BITS - HIGH;
    constexpr int QUADS = 8 / LOW, WORDS = GROUP / (4 * QUADS);  // quads that share their bytes; of the low bits
    constexpr Offset OFFSET = FORM.offset;
    constexpr bool BELOW_ZERO = begins_below_zero(FORM, GROUP);
    constexpr int HALFWORD_QUADS = quads_in_halfwords(FORM, GROUP);
    constexpr bool IN_HALFWORDS = HALFWORD_QUADS != 0, SMALL = largest_byte(FORM) <= 127;
    constexpr bool IN_HALVES = HIGH != 0 && WORDS == 4 && HALFWORD_QUADS == GROUP / 8;
    static_assert(!IN_HALFWORDS || IN_HALVES || HALFWORD_QUADS == GROUP / 4, "they add up in time");
    constexpr int MIDDLE = FORM.middle - (WITHOUT_VNNI && !SMALL ? 128 : 0);  // what is still to take off
    constexpr int SPAN = WITHOUT_VNNI && (SMALL || ROWS > 2) ? 1 : VECTORS;  // those of 16 columns stay in the registers
    f32x16 acc[ROWS][VECTORS] = {};
    for (int64_t g = first_group; g < end; g++) {
        const uint8_t* record = panel + g * RECORD;
        const uint8_t* data = record + HEADER;
        const int8_t* bytes = x.bytes + g * GROUP;
        if constexpr (HIGH != 0) prefetch.next();
        auto codes = [&](int quad, int v) __attribute__((always_inline)) {
            return codes_of<KIND, GROUP>(data + (v / 2) * panel_stride + (v % 2) * 64, quad);
        };
#pragma GCC unroll 8
        for (int first = 0; first < VECTORS; first += SPAN) {
            i32x16 dot[ROWS][SPAN];
#pragma GCC unroll 8
            for (int s = 0; s < SPAN; s++) {
                int v = first + s;
                i32x16 zero_points = {};
                if constexpr (OFFSET == OFFSET_ZERO_POINT)
                    zero_points = (i32x16)load_halfwords(record + (v / 2) * panel_stride + SCALES + (v % 2) * 32);
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; r++) {
                    int32_t sum = x.sums[r * groups + g];
                    dot[r][s] = i32x16{} - (BELOW_ZERO ? 0 : MIDDLE) * sum;
                    if constexpr (OFFSET == OFFSET_ZERO_POINT) dot[r][s] -= zero_points * sum;
                }
            }
            u32x16 halfwords[ROWS][SPAN] = {};
            if constexpr (BELOW_ZERO)
                for (int r = 0; r < ROWS; r++) halfwords[r][0] = u32x16{} + static_cast<uint32_t>(x.sums[r * groups + g]);
            auto add_word = [&](int word) __attribute__((always_inline)) {
                if (first == 0) prefetch.next();
#pragma GCC unroll 4
                for (int part = 0; part < QUADS; part++) {
                    u32x16 w[SPAN];
#pragma GCC unroll 8
                    for (int s = 0; s < SPAN; s++) w[s] = codes(word * QUADS + part, first + s);
#pragma GCC unroll 8
                    for (int r = 0; r < ROWS; r++) {
                        uint32_t quad;
                        memcpy(&quad, bytes + r * groups * GROUP + (word * QUADS + part) * 4, 4);
                        u32x16 spread = u32x16{} + quad;
#pragma GCC unroll 8
                        for (int s = 0; s < SPAN; s++)
                            if constexpr (IN_HALFWORDS)
                                halfwords[r][s] = add_in_halfwords(halfwords[r][s], w[s], spread);
                            else
                                dot[r][s] = dot_quads<SMALL ? 7 : 8>(dot[r][s], w[s], spread);
                    }
                }
            };
            const u32x16 ONES = u32x16{} + 0x00010001u;
            auto add_up_halfwords = [&]() __attribute__((always_inline)) {
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
                    for (int s = 0; s < SPAN; s++) dot[r][s] = add_halfwords(dot[r][s], halfwords[r][s], ONES);
            };
            if constexpr (HIGH != 0) {  // constant shifts
                add_word(0);
                add_word(1);
                if constexpr (WORDS == 4) {
                    if constexpr (IN_HALVES) {
                        add_up_halfwords();
                        for (auto& row : halfwords)
                            for (u32x16& sums : row) sums = u32x16{};
                    }
                    add_word(2);
                    add_word(3);
                }
            } else {
                for (int word = 0; word < WORDS; word++) add_word(word);
            }
            if constexpr (IN_HALFWORDS) add_up_halfwords();
#pragma GCC unroll 8
            for (int s = 0; s < SPAN; s++) {
                int v = first + s;
                const uint8_t* header = record + (v / 2) * panel_stride;
                f32x16 scale = load_scales(KIND, header + (v % 2) * SCALES / 2);
                f32x16 minimum = {};
                if constexpr (OFFSET == OFFSET_MINIMUM)
                    minimum = load(reinterpret_cast<const f16*>(header + SCALES + (v % 2) * 32));
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; r++) {
                    float x_scale = x.scales[r * groups + g];
                    acc[r][v] = fma(converted<f32x16>(dot[r][s]), scale * x_scale, acc[r][v]);
                    if constexpr (OFFSET == OFFSET_MINIMUM) {
                        float x_sum = x_scale * static_cast<float>(x.sums[r * groups + g]);
                        acc[r][v] = fma(minimum, splat(x_sum), acc[r][v]);
                    }
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) store_sum(out + r * PANELS * PANEL + v * 16, acc[r][v], adds);
    return prefetch;
}
