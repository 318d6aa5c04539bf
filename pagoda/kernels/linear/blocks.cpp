// Packs the blocks of tensors straight from the mapped file. Where their bits are, and how their codes are held, is in
// linear/forms.py (BLOCK_TYPES of abi.h); the definition is loading/gguf_blocks.py, of those of GPT-OSS loading/mxfp4.py.
#include <algorithm>
#include <iterator>
#include <utility>

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

// The first COUNT numbers of a type's codes or factors, each a byte: the bits of plane AT, above the LOW ones of planes
// before it, and those of the next plane.
template <int TYPE, bool ARE_FACTORS, int COUNT, int AT = 0, int LOW = 0>
void read_numbers(const uint8_t* __restrict block, uint8_t* __restrict to) {
    constexpr const Plane(&PLANES)[2] = ARE_FACTORS ? BLOCK_TYPES[TYPE].factors : BLOCK_TYPES[TYPE].codes;
    constexpr int BITS = PLANES[AT].bits, RUN = PLANES[AT].run;
    // Of as many numbers as it has bytes.
    using Word = std::conditional_t<RUN == 1, uint8_t, std::conditional_t<RUN % 8 == 0, uint64_t, uint32_t>>;
    constexpr Word MASK = static_cast<Word>(-1) / 255 * ((1 << BITS) - 1);
    const uint8_t* from = block + PLANES[AT].at;
    if constexpr (RUN == 1 && BITS == 1) {  // of 32 numbers
        uint32_t word;
        memcpy(&word, from, 4);
        for (int i = 0; i < COUNT; i++) to[i] = static_cast<uint8_t>(to[i] | (word >> i & 1) << LOW);
        return;
    }
    for (int i = 0; i < COUNT; i += RUN * 8 / BITS, from += RUN)
        for (int k = 0; k < 8 / BITS; k++)
            for (int j = 0; j < RUN; j += sizeof(Word)) {
                Word bits, before = 0;
                memcpy(&bits, from + j, sizeof(Word));
                if (LOW != 0) memcpy(&before, to + i + k * RUN + j, sizeof(Word));
                bits = static_cast<Word>(before | (bits >> (k * BITS) & MASK) << LOW);
                memcpy(to + i + k * RUN + j, &bits, sizeof(Word));
            }
    if constexpr (AT == 0 && PLANES[1].bits != 0) read_numbers<TYPE, ARE_FACTORS, COUNT, 1, BITS>(block, to);
}

// The scales and minima of groups that are products.
template <int TYPE>
void multiply_factors(const uint8_t* block, Codes& to) {
    constexpr BlockType OF = BLOCK_TYPES[TYPE];
    constexpr int GROUPS = OF.values / OF.group;
    constexpr bool HAS_MINIMA = OF.minimum >= 0;
    uint8_t factors[2 * MOST_GROUPS];
    read_numbers<TYPE, true, HAS_MINIMA ? 2 * GROUPS : GROUPS>(block, factors);
    float scale = half_at(block + OF.scale), products[MOST_GROUPS] = {};
    for (int i = 0; i < GROUPS; i++) products[i] = scale * static_cast<float>(factors[i] - OF.factor_middle);
    store_halves(products, to.scales);
    if (!HAS_MINIMA) return;
    float minimum = half_at(block + OF.minimum);
    for (int i = 0; i < GROUPS; i++) products[i] = -(minimum * static_cast<float>(factors[GROUPS + i]));
    store_halves(products, to.offsets);
}

// Take a block apart, the `number`-th of those whose values are taken together.
template <int TYPE>
void decode(const uint8_t* block, Codes& to, int number) {
    constexpr BlockType OF = BLOCK_TYPES[TYPE];
    constexpr WeightForm FORM = WEIGHT_FORMS[OF.kind];
    uint8_t* codes = to.codes + OF.values * number;
    read_numbers<TYPE, false, OF.values>(block, codes);
    for (int i = 0; OF.added != 0 && i < OF.values; i++) codes[i] = static_cast<uint8_t>(codes[i] + OF.added);
    if constexpr (FORM.sub_group != 0) {
        to.scales[0] = word_at(block + OF.scale);
        if (OF.minimum >= 0) to.scales[1] = word_at(block + OF.minimum) ^ 0x8000;  // what minima count is taken off
        memcpy(to.integers, block + OF.integers, integers_bytes(OF.kind, OF.values));
    } else if constexpr (OF.factors[0].bits != 0) {
        multiply_factors<TYPE>(block, to);
    } else if constexpr (OF.scale >= 0) {
        to.scales[number] = FORM.scale_bits == 8 ? block[OF.scale] : word_at(block + OF.scale);
        if (OF.minimum >= 0) to.offsets[number] = word_at(block + OF.minimum);
    }
}
using Decode = void (*)(const uint8_t* block, Codes& to, int number);
template <size_t... TYPE>
Decode decode_of(int32_t type, std::index_sequence<TYPE...>) {
    constexpr Decode ALL[] = {decode<TYPE>...};
    return ALL[type];
}

// A row in the file, from its next block on. Blocks further on are fetched ahead: the rows of a panel are more streams
// than the processor follows by itself.
struct Row {
    const BlockType* type;
    Decode decode;
    const uint8_t *at, *exponents;
    void next(int64_t values, Codes& to) {
        int64_t bytes = values / type->values * type->bytes;
        for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(at + 2 * bytes + line, 0, 0);
        for (int number = 0; values > 0; values -= type->values, at += type->bytes, number++) {
            decode(at, to, number);
            if (exponents != nullptr) to.scales[number] = *exponents++;
        }
    }
};

// Row `row` of the stacked pieces.
Row row_of(const BlockRows* piece, int64_t row) {
    while (row >= piece->rows) row -= piece++->rows;
    if (piece->head_order != nullptr) row = row / piece->unit * piece->unit + piece->head_order[row % piece->unit];
    const uint8_t* exponents = piece->exponents == nullptr ? nullptr : piece->exponents + row * piece->exponents_row;
    return {&BLOCK_TYPES[piece->type], decode_of(piece->type, std::make_index_sequence<std::size(BLOCK_TYPES)>()),
            static_cast<const uint8_t*>(piece->data) + row * piece->row_bytes, exponents};
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
