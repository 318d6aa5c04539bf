// Packs the codes of AWQ, GPTQ and compressed-tensors straight from the mapped file. What they mean is in
// loading/packed_codes.py.
#include "packed.h"
#include "plan.h"

namespace {

// Panels that are packed side by side: where words are neighbours along the outputs, cache lines have those of several.
constexpr int64_t TOGETHER = 4;
constexpr int64_t LEAST_GROUP = 32;

// A matrix by the columns of a panel: their first words, and where their codes are in a word.
struct Words {
    const uint8_t* at[PANEL];
    int64_t in_bytes[PANEL];
    int32_t shift[PANEL];
    uint32_t flip[PANEL];  // what makes codes of signed bytes
    bool are_signed;
    const uint8_t* of(int64_t column, int64_t i) const { return at[column] + i * in_bytes[column]; }
    void set(int64_t column, const CodeMatrix& matrix, int64_t row, int bits) {
        int64_t within = row % matrix.out_codes;
        if (matrix.is_interleaved) within = within / 2 + within % 2 * 4;
        at[column] = static_cast<const uint8_t*>(matrix.data) + row / matrix.out_codes * matrix.out_bytes;
        in_bytes[column] = matrix.in_bytes;
        shift[column] = static_cast<int32_t>(within) * bits;
        are_signed = matrix.is_signed;
        flip[column] = are_signed ? 0x80808080u : 0;
    }
};

// Where the codes of a panel's columns are, and what makes values of them.
struct Panel {
    int64_t columns;
    bool shares_words;  // the columns of each eight have one
    Words codes, scales, zeros;
    const int32_t* groups[PANEL];
    int32_t zero[PANEL];

    // The word at `i` along the inputs, shifted to the codes of each column. bytes: of it that exist.
    void load(int64_t i, int64_t bytes, uint32_t (&words)[PANEL]) const {
        if (shares_words)
            for (int64_t c = 0; c < PANEL; c += 8) {
                uint32_t word;
                memcpy(&word, codes.of(c, i), 4);
                for (int64_t k = c; k < c + 8; k++) words[k] = word;
            }
        else if (bytes >= 4)
            for (int64_t c = 0; c < columns; c++) memcpy(words + c, codes.of(c, i), 4);
        else
            for (int64_t c = 0; c < columns; c++) memcpy(words + c, codes.of(c, i), static_cast<size_t>(bytes));
        for (int64_t c = 0; c < PANEL; c++) words[c] = (words[c] ^ codes.flip[c]) >> codes.shift[c];
    }
};

Panel panel_of(const PackedLinear& w, const CodeRows* piece, int64_t p) {
    Panel panel = {};
    int bits = WEIGHT_FORMS[w.kind].bits;
    int64_t row = p * PANEL;
    panel.columns = w.out_features - row < PANEL ? w.out_features - row : PANEL;
    for (int64_t c = 0; c < panel.columns; c++, row++) {
        for (; row >= piece->rows; piece++) row -= piece->rows;
        int64_t from = row;
        if (piece->head_order != nullptr) from = row / piece->unit * piece->unit + piece->head_order[row % piece->unit];
        from += piece->first;
        panel.codes.set(c, piece->codes, from, bits);
        panel.scales.set(c, piece->scales, from, bits);
        if (piece->zeros.data != nullptr) panel.zeros.set(c, piece->zeros, from, bits);
        panel.groups[c] = piece->groups;
        panel.zero[c] = piece->zero;
    }
    panel.shares_words = panel.columns == PANEL;
    for (int64_t c = 0; c < PANEL; c++) panel.shares_words &= panel.codes.at[c] == panel.codes.at[c / 8 * 8];
    return panel;
}

template <int BITS>
void pack_record(const PackedLinear& w, const Panel& panel, int64_t begin, int in_shift, uint8_t* to) {
    constexpr uint32_t MASK = (1u << BITS) - 1;
    auto* shared = reinterpret_cast<uint16_t*>(to);
    bool has_zeros = WEIGHT_FORMS[w.kind].offset == OFFSET_ZERO_POINT;
    for (int64_t c = 0; c < panel.columns; c++) {
        int64_t group = panel.groups[c][begin / LEAST_GROUP];
        memcpy(shared + c, panel.scales.of(c, group), 2);
        if (!has_zeros) continue;
        uint32_t zero = *panel.zeros.of(c, group) ^ 128u;
        if (!panel.zeros.are_signed) {
            memcpy(&zero, panel.zeros.of(c, group), 4);
            zero = zero >> panel.zeros.shift[c] & MASK;
        }
        shared[PANEL + c] = static_cast<uint16_t>(static_cast<int32_t>(zero) + panel.zero[c]);
    }
    to += header_bytes(w.kind, w.group);
    uint32_t words[PANEL] = {};
    int64_t loaded = -1;
    for (int64_t i = begin; i < begin + w.group; i += 32 / BITS, to += 4 * PANEL) {
        uint32_t packed[PANEL] = {};
        for (int64_t k = 0; k < 32 / BITS && i + k < w.in_features; k++) {
            int64_t element = w.input_order != nullptr ? w.input_order[i + k] : i + k;
            if (element < 0) continue;
            if (element >> in_shift != loaded) {
                loaded = element >> in_shift;
                panel.load(loaded, panel.codes.are_signed ? w.in_features - (loaded << in_shift) : 4, words);
            }
            int64_t from = (element - (loaded << in_shift)) * BITS, place = k % 4 * 8 + k / 4 * BITS;
            for (int64_t c = 0; c < PANEL; c++) packed[c] |= (words[c] >> from & MASK) << place;
        }
        memcpy(to, packed, sizeof(packed));
    }
}

template <int BITS>
void pack(const PackedLinear& w, const CodeRows* pieces, int threads) {
    int64_t groups = (w.in_features + w.group - 1) / w.group, panels = (w.out_features + PANEL - 1) / PANEL;
    int64_t record = quantized_record_bytes(w.kind, w.group);
    int in_shift = __builtin_ctz(static_cast<unsigned>(pieces->codes.in_codes));
    auto* to = static_cast<uint8_t*>(const_cast<void*>(w.panels));
    on_owners(w, threads, 0, panels, [&](int64_t p, int64_t end) {
        Panel together[TOGETHER];
        for (; p < end; p += TOGETHER) {
            int64_t count = end - p < TOGETHER ? end - p : TOGETHER;
            for (int64_t k = 0; k < count; k++) together[k] = panel_of(w, pieces, p + k);
            for (int64_t g = 0; g < groups; g++)
                for (int64_t k = 0; k < count; k++)
                    pack_record<BITS>(w, together[k], g * w.group, in_shift, to + ((p + k) * groups + g) * record);
        }
    });
}

}  // namespace

PAGODA_EXPORT void pagoda_pack_code_rows(const PackedLinear* weight, const CodeRows* pieces, int32_t threads) {
    if (WEIGHT_FORMS[weight->kind].bits == 4)
        pack<4>(*weight, pieces, threads);
    else
        pack<8>(*weight, pieces, threads);
}
