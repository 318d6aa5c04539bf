// Tiles of a product of quantised x and codes with integer scales: a group of 256 has one or two float16, and x a scale per
// X_GROUP. Within these all sums are integers, and exact; they are added by segments along K, in every tile. The
// definition is `sum_by_groups` in reference.py.
#pragma once

#include "int_tiles.h"

// The sizes of a group.
template <int32_t KIND>
struct KGroup {
    static constexpr const WeightForm& FORM = WEIGHT_FORMS[KIND];
    static constexpr int SIZE = 256, SUB = FORM.sub_group, SUBS = SIZE / SUB, QUADS = SUB / 4;
    static constexpr int PARTS = SIZE / x_group(FORM, SIZE), PART_SUBS = SUBS / PARTS;  // a part has one scale of x
    static constexpr int X_SUMS = sums_of_x_group(FORM, SIZE), HALFWORD_QUADS = quads_in_halfwords(FORM, SUB);
    static constexpr bool IN_HALFWORDS = HALFWORD_QUADS != 0, HAS_MINIMA = FORM.offset == OFFSET_MINIMUM;
    static constexpr int SUM_QUADS = IN_HALFWORDS ? HALFWORD_QUADS : QUADS;  // that add up before they are scaled
    static constexpr int64_t RECORD = quantized_record_bytes(KIND, SIZE), HEADER = header_bytes(KIND, SIZE);
    static constexpr int64_t SUB_BYTES = (RECORD - HEADER) / SUBS;  // of codes
    static constexpr bool IN_EACH_QUAD = prefetches_of_32(FORM) == 8;  // prefetches; else in each second, and once before
    static_assert(!begins_below_zero(FORM, SUB) || HALFWORD_QUADS == QUADS, "only a sub-group's first sums begin below 0");
};

// Integer scales, and minima where there are some, of 16 columns: four neighbouring sub-groups to a word.
template <int32_t KIND>
struct Factors {
    static constexpr int WORDS = WEIGHT_FORMS[KIND].sub_group == 0 ? 1 : 256 / WEIGHT_FORMS[KIND].sub_group / 4;
    u32x16 scales[WORDS], minima[WORDS];
    // at: those of the columns, of the first word that packed.h draws.
    void load(const uint8_t* at) {
        if constexpr (WEIGHT_FORMS[KIND].scale_bits == 8) {
            for (int i = 0; i < WORDS; i++) scales[i] = load_words(at + i * 4 * PANEL);
        } else {
            u32x16 s = load_words(at), m = load_words(at + 4 * PANEL), low = load_words(at + 8 * PANEL);
            scales[0] = s & 0x3f3f3f3fu;
            scales[1] = (low & 0x0f0f0f0fu) | ((s >> 2) & 0x30303030u);
            minima[0] = m & 0x3f3f3f3fu;
            minima[1] = ((low >> 4) & 0x0f0f0f0fu) | ((m >> 2) & 0x30303030u);
        }
    }
};

// The lowest byte of each word: in words, or IN_HALFWORDS twice, with its sign if it has one.
template <bool SIGNED, bool IN_HALFWORDS>
inline u32x16 lowest_bytes(u32x16 words) {
#if defined(PAGODA_AVX2)
    if constexpr (IN_HALFWORDS) {
        auto half = [](__m256i of) __attribute__((always_inline)) {
            // To the high bytes of halfwords, and down again.
            const __m256i pattern = _mm256_set_epi8(12, -1, 12, -1, 8, -1, 8, -1, 4, -1, 4, -1, 0, -1, 0, -1,
                                                    12, -1, 12, -1, 8, -1, 8, -1, 4, -1, 4, -1, 0, -1, 0, -1);
            __m256i twice = _mm256_shuffle_epi8(of, pattern);
            return SIGNED ? _mm256_srai_epi16(twice, 8) : _mm256_srli_epi16(twice, 8);
        };
        using Half = decltype(words.low);
        return {(Half)half((__m256i)words.low), (Half)half((__m256i)words.high)};
    }
#endif
    return SIGNED ? (u32x16)((i32x16)(words << 24) >> 24) : words & 0xffu;
}

// Rows of x in a part of a group.
template <int32_t KIND>
struct XPart {
    const int8_t* bytes;
    const float* scales;
    const int32_t* sums;
    int64_t parts;  // of a row

    XPart(const QuantizedRows& x, int64_t groups, int64_t at)
        : bytes(x.bytes + at * X_GROUP),
          scales(x.scales + at),
          sums(x.sums + at * KGroup<KIND>::X_SUMS),
          parts(groups * KGroup<KIND>::PARTS) {}
    float scale(int row) const { return scales[row * parts]; }
    i32x16 sum(int row, int i) const { return i32x16{} + sums[row * parts * KGroup<KIND>::X_SUMS + i]; }
    u32x16 quad(int row, int i) const {
        uint32_t four;
        memcpy(&four, bytes + row * parts * X_GROUP + 4 * i, 4);
        return u32x16{} + four;
    }
};

// SPAN vectors of 16 columns of a record. unpacked: their codes, a byte each, where the tile has UNPACKED.
template <int32_t KIND, int SPAN>
struct KColumns {
    const uint8_t *units[SPAN], *codes[SPAN], *unpacked;
    Factors<KIND> factors[SPAN];

    // first: which vectors.
    __attribute__((always_inline)) KColumns(const uint8_t* record, const uint8_t* of_group, int first)
        : unpacked(of_group + first * 64) {
        for (int s = 0; s < SPAN; s++) {
            units[s] = record + (first + s) * 32;
            factors[s].load(record + units_bytes(KIND) + (first + s) * 64);
            codes[s] = record + KGroup<KIND>::HEADER + (first + s) * 64;
        }
    }
    template <bool UNPACKED>
    __attribute__((always_inline)) u32x16 quad(int s, int sub, int i) const {
        if constexpr (UNPACKED)
            return load_words(unpacked + (sub * KGroup<KIND>::QUADS + i) * 4 * PANEL + s * 64);
        else
            return codes_of<KIND, KGroup<KIND>::SUB>(codes[s] + sub * KGroup<KIND>::SUB_BYTES, i);
    }
};

// Add the sums of a part to vectors acc[..][first], [first + 1] .. as floats. unit: which of the float16 they count.
template <int32_t KIND, int ROWS, int SPAN>
__attribute__((always_inline)) inline void add_to_acc(f32x16 (&acc)[ROWS][2], int first, const i32x16 (&sums)[ROWS][SPAN],
                                                      const KColumns<KIND, SPAN>& w, int unit, const XPart<KIND>& x) {
#pragma GCC unroll 8
    for (int s = 0; s < SPAN; s++) {
        f32x16 of_w = load(reinterpret_cast<const f16*>(w.units[s] + unit * 2 * PANEL));
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            f32x16& to = acc[r][first + s];
            to = fma(converted<f32x16>(sums[r][s]), of_w * x.scale(r), to);
        }
    }
}

// Add the sums of x times the minima of their sub-groups, of two at a time.
template <int32_t KIND, int ROWS, int SPAN>
__attribute__((always_inline)) inline void add_minima(i32x16 (&sums)[ROWS][SPAN], const KColumns<KIND, SPAN>& w, int part,
                                                      const XPart<KIND>& x) {
#pragma GCC unroll 4
    for (int i = 0; i < KGroup<KIND>::X_SUMS; i++)
#pragma GCC unroll 8
        for (int s = 0; s < SPAN; s++) {
            u32x16 minima = (w.factors[s].minima[part] >> (i * 8)) & 0x00ff00ffu;
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) sums[r][s] = add_halfwords(sums[r][s], minima, (u32x16)x.sum(r, i));
        }
}

// dot + the products of four elements of w and x. sub, quad: of which sub-group of the part.
template <int32_t KIND, bool UNPACKED, int ROWS, int SPAN>
__attribute__((always_inline)) inline void add_quad(i32x16 (&dot)[ROWS][SPAN], const KColumns<KIND, SPAN>& w, int part,
                                                    int sub, int quad, const XPart<KIND>& x, Prefetch* prefetch) {
    using K = KGroup<KIND>;
    if (prefetch != nullptr && (K::IN_EACH_QUAD || quad % 2 == 0)) prefetch->next();
    u32x16 of_w[SPAN];
#pragma GCC unroll 8
    for (int s = 0; s < SPAN; s++) of_w[s] = w.template quad<UNPACKED>(s, part * K::PART_SUBS + sub, quad);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
        u32x16 of_x = x.quad(r, sub * K::QUADS + quad);
#pragma GCC unroll 8
        for (int s = 0; s < SPAN; s++)
            if constexpr (K::IN_HALFWORDS)
                dot[r][s] = (i32x16)add_in_halfwords((u32x16)dot[r][s], of_w[s], of_x);
            else
                dot[r][s] = dot_quads<7>(dot[r][s], of_w[s], of_x);
    }
}

// Add dot times the scale, and begin it again.
template <int32_t KIND, int ROWS, int SPAN>
__attribute__((always_inline)) inline void add_scaled(i32x16 (&sums)[ROWS][SPAN], i32x16 (&dot)[ROWS][SPAN],
                                                      const u32x16 (&scale)[SPAN]) {
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
        for (int s = 0; s < SPAN; s++) {
            if constexpr (KGroup<KIND>::IN_HALFWORDS)
                sums[r][s] = add_halfwords(sums[r][s], (u32x16)dot[r][s], scale[s]);
            else
                sums[r][s] += dot[r][s] * (i32x16)scale[s];
            dot[r][s] = i32x16{};
        }
}

// Add the products of a sub-group of the part, times its scale. Scales are read in order, each once.
template <int32_t KIND, bool UNPACKED, int ROWS, int SPAN>
__attribute__((always_inline)) inline void add_sub_group(i32x16 (&sums)[ROWS][SPAN], KColumns<KIND, SPAN>& w, int part,
                                                         int sub, const XPart<KIND>& x, Prefetch* prefetch) {
    using K = KGroup<KIND>;
    if (prefetch != nullptr && !K::IN_EACH_QUAD) prefetch->next();
    u32x16 scale[SPAN];
    for (int s = 0; s < SPAN; s++) {
        u32x16& words = w.factors[s].scales[(part * K::PART_SUBS + sub) / 4];
        scale[s] = lowest_bytes<K::FORM.scale_bits == 8, K::IN_HALFWORDS>(words);
        words = words >> 8;
    }
    i32x16 dot[ROWS][SPAN];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
        for (int s = 0; s < SPAN; s++) dot[r][s] = K::HAS_MINIMA ? i32x16{} : x.sum(r, sub);
    if constexpr (!K::IN_HALFWORDS && (UNPACKED || high_bits(K::FORM.bits) == 0)) {
        for (int quad = 0; quad < K::QUADS; quad += 2) {  // all at once, GCC would spill: it loads x early
            add_quad<KIND, UNPACKED>(dot, w, part, sub, quad, x, prefetch);
            add_quad<KIND, UNPACKED>(dot, w, part, sub, quad + 1, x, prefetch);
        }
        add_scaled<KIND>(sums, dot, scale);
    } else {
#pragma GCC unroll 8
        for (int quad = 0; quad < K::QUADS; quad++) {  // constant shifts
            add_quad<KIND, UNPACKED>(dot, w, part, sub, quad, x, prefetch);
            if ((quad + 1) % K::SUM_QUADS == 0) add_scaled<KIND>(sums, dot, scale);
        }
    }
}

// A segment of int_tile: groups first_group .. end - 1. adds: to what is in `out`, the segments before.
// unpacked: the codes of the panel from its first group on, a byte each, with UNPACKED.
template <int32_t KIND, int ROWS, bool UNPACKED>
__attribute__((noinline)) Prefetch k_segment(const QuantizedRows& x, int64_t groups, int64_t first_group, int64_t end,
                                             const uint8_t* panel, const uint8_t* unpacked, float* out, bool adds,
                                             Prefetch prefetch) {
    using K = KGroup<KIND>;
    constexpr int VECTORS = 2, SPAN = WITHOUT_VNNI && ROWS > 2 ? 1 : VECTORS;  // more would not stay in the registers
    f32x16 acc[ROWS][VECTORS] = {};
    for (int64_t g = first_group; g < end; g++) {
        for (int first = 0; first < VECTORS; first += SPAN) {
            KColumns<KIND, SPAN> w(panel + g * K::RECORD, unpacked + g * K::SIZE * PANEL, first);
            for (int part = 0; part < K::PARTS; part++) {
                XPart<KIND> of_x(x, groups, g * K::PARTS + part);
                if constexpr (K::HAS_MINIMA) {
                    i32x16 sums[ROWS][SPAN] = {};
                    add_minima(sums, w, part, of_x);
                    add_to_acc(acc, first, sums, w, 1, of_x);
                }
                i32x16 sums[ROWS][SPAN] = {};
                for (int sub = 0; sub < K::PART_SUBS; sub++)
                    add_sub_group<KIND, UNPACKED>(sums, w, part, sub, of_x, first == 0 ? &prefetch : nullptr);
                add_to_acc(acc, first, sums, w, 0, of_x);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) store_sum(out + r * PANEL + v * 16, acc[r][v], adds);
    return prefetch;
}

// The codes of all groups of a panel of KIND, a byte each, [groups * 64][32][4 bytes].
template <int32_t KIND>
void unpack_panel(const uint8_t* panel, int64_t groups, uint8_t* to) {
    using K = KGroup<KIND>;
    for (int64_t g = 0; g < groups; g++, panel += K::RECORD)
        for (int sub = 0; sub < K::SUBS; sub++)
#pragma GCC unroll 8
            for (int quad = 0; quad < K::QUADS; quad++, to += 4 * PANEL)
#pragma GCC unroll 2
                for (int v = 0; v < 2; v++) {
                    const uint8_t* codes = panel + K::HEADER + sub * K::SUB_BYTES + v * 64;
                    store_lanes_of(to + v * 64, codes_of<KIND, K::SUB>(codes, quad));
                }
}

// out [ROWS][PANELS * 32] = the first `count` groups of x (rows `groups` groups apart) times those of PANELS panels
// (panel_stride bytes apart). unpacked: see k_segment.
template <int32_t KIND, int GROUP, int ROWS, int PANELS, bool UNPACKED>
inline void int_tile(const QuantizedRows& x, int64_t groups, int64_t count, const uint8_t* panel, int64_t panel_stride,
                     const uint8_t* unpacked, float* out, Prefetch prefetch) {
    static_assert(K_SEGMENT % GROUP == 0, "a segment is whole groups");
    for (int64_t g = 0, end; g < count; g = end) {
        end = std::min(count, g + K_SEGMENT / GROUP);
        if constexpr (WEIGHT_FORMS[KIND].sub_group == 0) {
            prefetch = int_segment<KIND, GROUP, ROWS, PANELS>(x, groups, g, end, panel, panel_stride, out, g > 0, prefetch);
        } else {
            static_assert(PANELS == 1, "these have no wider tiles");
            prefetch = k_segment<KIND, ROWS, UNPACKED>(x, groups, g, end, panel, unpacked, out, g > 0, prefetch);
        }
    }
}
