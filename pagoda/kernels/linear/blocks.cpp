// Packs the blocks of tensors straight from the mapped file. What those of a GGUF type mean is in
// loading/gguf_blocks.py, those of GPT-OSS in loading/mxfp4.py; how their codes are held in linear/forms.py.
#include "packed.h"
#include "plan.h"
#include "simd.h"

namespace {

constexpr int MOST_VALUES = 256, MOST_GROUPS = 16;

// Values that are next to each other in a row: codes, and by group what makes values of them.
struct Codes {
    uint8_t codes[MOST_VALUES];
    uint16_t scales[MOST_GROUPS], offsets[MOST_GROUPS];  // float16, or scales as exponents
    uint8_t integers[16];  // of forms that have them, of which `scales` begins with what they count
};

inline uint16_t word_at(const uint8_t* p) {
    uint16_t word;
    memcpy(&word, p, 2);
    return word;
}
inline void store_halves(const float (&from)[MOST_GROUPS], uint16_t* to) {
    store(reinterpret_cast<f16*>(to), load(from));
}

// Low halves of `count` bytes, then their high ones.
inline void nibbles(const uint8_t* from, int count, uint8_t* to) {
    for (int i = 0; i < count; i++) {
        to[i] = from[i] & 15;
        to[count + i] = from[i] >> 4;
    }
}
inline void add_fifth_bits(const uint8_t* bits, uint8_t* codes) {
    uint32_t word;
    memcpy(&word, bits, 4);
    for (int i = 0; i < 32; i++) codes[i] = static_cast<uint8_t>(codes[i] | (word >> i & 1) << 4);
}

// ---- blocks of 32 values in one group: at `group` of `to` ----

// A scale, of some a minimum, of those of 5 bits the fifth ones, and the low four.
template <bool HAS_MINIMUM, bool HAS_FIFTH>
void q4_or_q5(const uint8_t* block, Codes& to, int group) {
    to.scales[group] = word_at(block);
    if (HAS_MINIMUM) to.offsets[group] = word_at(block + 2);
    const uint8_t* bits = block + (HAS_MINIMUM ? 4 : 2);
    nibbles(bits + (HAS_FIFTH ? 4 : 0), 16, to.codes + 32 * group);
    if (HAS_FIFTH) add_fifth_bits(bits, to.codes + 32 * group);
}
constexpr auto q4_0 = q4_or_q5<false, false>, q4_1 = q4_or_q5<true, false>;
constexpr auto q5_0 = q4_or_q5<false, true>, q5_1 = q4_or_q5<true, true>;
void q8_0(const uint8_t* block, Codes& to, int group) {
    to.scales[group] = word_at(block);
    for (int i = 0; i < 32; i++) to.codes[32 * group + i] = block[2 + i] ^ 128;
}
void mxfp4(const uint8_t* block, Codes& to, int group) {
    to.scales[group] = block[0];
    nibbles(block + 1, 16, to.codes + 32 * group);
}
// Neighbours in one byte, exponents elsewhere.
void mxfp4_pairs(const uint8_t* block, Codes& to, int group) {
    uint8_t* codes = to.codes + 32 * group;
    for (int i = 0; i < 16; i++) {
        codes[2 * i] = block[i] & 15;
        codes[2 * i + 1] = block[i] >> 4;
    }
}

// ---- blocks of 256 values ----

void k_factors(const uint8_t* block, Codes& to) {
    to.scales[0] = word_at(block);
    to.scales[1] = word_at(block + 2) ^ 0x8000;  // what minima count is taken off
    memcpy(to.integers, block + 4, 12);
}
void q4_k(const uint8_t* block, Codes& to, int) {
    k_factors(block, to);
    for (int i = 0; i < 4; i++) nibbles(block + 16 + 32 * i, 32, to.codes + 64 * i);
}
void q5_k(const uint8_t* block, Codes& to, int) {
    k_factors(block, to);
    for (int i = 0; i < 4; i++) nibbles(block + 48 + 32 * i, 32, to.codes + 64 * i);
    for (int group = 0; group < 8; group++)
        for (int i = 0; i < 32; i++) {
            uint8_t& code = to.codes[32 * group + i];
            code = static_cast<uint8_t>(code | (block[16 + i] >> group & 1) << 4);
        }
}
void q6_k(const uint8_t* block, Codes& to, int) {
    to.scales[0] = word_at(block + 208);
    memcpy(to.integers, block + 192, 16);
    for (int half = 0; half < 2; half++)
        for (int i = 0; i < 32; i++) {
            uint8_t first = block[64 * half + i], second = block[64 * half + 32 + i], high = block[128 + 32 * half + i];
            uint8_t* codes = to.codes + 128 * half + i;
            codes[0] = static_cast<uint8_t>((first & 15) | (high & 3) << 4);
            codes[32] = static_cast<uint8_t>((second & 15) | (high >> 2 & 3) << 4);
            codes[64] = static_cast<uint8_t>((first >> 4) | (high >> 4 & 3) << 4);
            codes[96] = static_cast<uint8_t>((second >> 4) | (high >> 6) << 4);
        }
}
void q2_k(const uint8_t* block, Codes& to, int) {
    float scale = half_at(block + 80), least = half_at(block + 82), scales[MOST_GROUPS], minima[MOST_GROUPS];
    for (int i = 0; i < 16; i++) {
        scales[i] = scale * static_cast<float>(block[i] & 15);
        minima[i] = -(least * static_cast<float>(block[i] >> 4));
    }
    store_halves(scales, to.scales);
    store_halves(minima, to.offsets);
    for (int i = 0; i < 256; i++) to.codes[i] = block[16 + i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3;
}
void q3_k(const uint8_t* block, Codes& to, int) {
    float scale = half_at(block + 108), scales[MOST_GROUPS];
    const uint8_t *low = block + 96, *high = block + 104;
    for (int i = 0; i < 16; i++) {
        int bits = (low[i % 8] >> (i / 8 * 4) & 15) | (high[i % 4] >> (i / 4 * 2) & 3) << 4;
        scales[i] = scale * static_cast<float>(bits - 32);
    }
    store_halves(scales, to.scales);
    for (int i = 0; i < 256; i++) {
        int code = block[32 + i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3;
        to.codes[i] = static_cast<uint8_t>(code + 4 + 4 * (block[i % 32] >> (i / 32) & 1));
    }
}
void iq4_xs(const uint8_t* block, Codes& to, int) {
    float scale = half_at(block), scales[MOST_GROUPS] = {};
    uint16_t high = word_at(block + 2);
    for (int group = 0; group < 8; group++) {
        int bits = (block[4 + group / 2] >> (group % 2 * 4) & 15) | (high >> (2 * group) & 3) << 4;
        scales[group] = scale * static_cast<float>(bits - 32);
        nibbles(block + 8 + 16 * group, 16, to.codes + 32 * group);
    }
    store_halves(scales, to.scales);
}

struct BlockType {
    int32_t number;  // in GGUF files
    int64_t bytes, values;
    void (*decode)(const uint8_t* block, Codes& to, int group);
};
constexpr BlockType TYPES[] = {{2, 18, 32, q4_0},     {3, 20, 32, q4_1},     {6, 22, 32, q5_0},    {7, 24, 32, q5_1},
                               {8, 34, 32, q8_0},     {10, 84, 256, q2_k},   {11, 110, 256, q3_k}, {12, 144, 256, q4_k},
                               {13, 176, 256, q5_k},  {14, 210, 256, q6_k},  {20, 18, 32, q4_0},   {23, 136, 256, iq4_xs},
                               {39, 17, 32, mxfp4}};
constexpr BlockType PAIRS = {39, 16, 32, mxfp4_pairs};

// A row in the file, from its next block on. Blocks further on are fetched ahead: the rows of a panel are more streams
// than the processor follows by itself.
struct Row {
    const BlockType* type;
    const uint8_t *at, *exponents;
    void next(int64_t values, Codes& to) {
        int64_t bytes = values / type->values * type->bytes;
        for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(at + 2 * bytes + line, 0, 0);
        for (int group = 0; values > 0; values -= type->values, at += type->bytes, group++) {
            type->decode(at, to, group);
            if (exponents != nullptr) to.scales[group] = *exponents++;
        }
    }
};

const BlockType* type_of(int32_t number) {
    for (const BlockType& type : TYPES)
        if (type.number == number) return &type;
    abort();
}

// Row `row` of the stacked pieces.
Row row_of(const BlockRows* piece, int64_t row) {
    while (row >= piece->rows) row -= piece++->rows;
    if (piece->head_order != nullptr) row = row / piece->unit * piece->unit + piece->head_order[row % piece->unit];
    const auto* at = static_cast<const uint8_t*>(piece->data) + row * piece->row_bytes;
    if (piece->exponents == nullptr) return {type_of(piece->type), at, nullptr};
    return {&PAIRS, at, piece->exponents + row * piece->exponents_row};
}

}  // namespace

PAGODA_EXPORT void pagoda_pack_blocks(const PackedLinear* weight, const BlockRows* pieces, int32_t threads) {
    const PackedLinear w = *weight;
    int64_t groups = (w.in_features + w.group - 1) / w.group, panels = (w.out_features + PANEL - 1) / PANEL;
    int64_t record = quantized_record_bytes(w.kind, w.group);
    bool has_integers = WEIGHT_FORMS[w.kind].sub_group != 0;
    int64_t step = w.in_features % MOST_VALUES == 0 ? MOST_VALUES : 32;
    auto* to = static_cast<uint8_t*>(const_cast<void*>(w.panels));
    on_owners(w, threads, 0, panels, [&](int64_t p, int64_t end) {
        for (; p < end; p++) {
            int columns = static_cast<int>(w.out_features - p * PANEL < PANEL ? w.out_features - p * PANEL : PANEL);
            Row rows[PANEL];
            for (int c = 0; c < columns; c++) rows[c] = row_of(pieces, p * PANEL + c);
            Codes codes[PANEL] = {};
            uint8_t* at = to + p * groups * record;
            for (int64_t begin = 0; begin < w.in_features; begin += step) {
                for (int c = 0; c < columns; c++) rows[c].next(step, codes[c]);
                for (int64_t g = 0; g < step / w.group; g++, at += record) {
                    auto scales = [&](int64_t c) { return reinterpret_cast<const uint8_t*>(codes[c].scales + g); };
                    auto second = [&](int64_t c) {
                        return has_integers ? codes[c].integers : reinterpret_cast<const uint8_t*>(codes[c].offsets + g);
                    };
                    write_record(w, at, columns, scales, second,
                                 [&](int64_t c) { return codes[c].codes + g * w.group; });
                }
            }
        }
    });
}
