// The embedding gather; its definition is embedding/reference.py. A table may be the packed panels of a weight, floats or
// codes: of one that is tied to the output head, the head's.
#include "../linear/packed.h"
#include "elementwise.h"

namespace {

// Row `row` of a packed weight with `words` words per row, of which the first `bytes` bytes are copied.
template <class Word>
void copy_from_panels(const void* panels, int64_t words, int64_t row, void* to, int64_t bytes) {
    const Word* from = static_cast<const Word*>(panels) + row / PANEL * PANEL * words + row % PANEL;
    auto* out = static_cast<char*>(to);
    int64_t whole = bytes / static_cast<int64_t>(sizeof(Word));
    for (int64_t i = 0; i < whole; i++) memcpy(out + sizeof(Word) * i, from + i * PANEL, sizeof(Word));
    memcpy(out + sizeof(Word) * whole, from + (words - 1) * PANEL, bytes - sizeof(Word) * whole);
}

// What makes values of the codes of a (sub-)group: scale * (code - zero) + minimum.
struct Factors {
    float scale, zero, minimum;
};

// Those of a group in one column of a record.
Factors factors_of(const PackedLinear& w, const uint8_t* record, int64_t column) {
    const WeightForm& form = WEIGHT_FORMS[w.kind];
    int64_t scales = scales_bytes(w.kind);
    const uint8_t* second = record + scales + 2 * column;
    Factors found{load_scales(w.kind, record + column / 16 * scales / 2)[column % 16], static_cast<float>(form.middle), 0};
    if (form.offset == OFFSET_MINIMUM) found.minimum = half_at(second);
    if (form.offset == OFFSET_ZERO_POINT) found.zero = static_cast<float>(second[0] | second[1] << 8);
    return found;
}
// Those of sub-group `sub`, of forms with integer scales.
Factors factors_of(const PackedLinear& w, const uint8_t* record, int64_t column, int64_t sub) {
    const WeightForm& form = WEIGHT_FORMS[w.kind];
    const uint8_t* integers = record + units_bytes(w.kind) + 4 * column;
    auto byte = [&](int64_t word) { return integers[word * 4 * PANEL + sub % 4]; };
    float unit = half_at(record + 2 * column);
    if (form.scale_bits == 8)
        return {unit * static_cast<float>(static_cast<int8_t>(byte(sub / 4))), static_cast<float>(form.middle), 0};
    int scale = byte(0) & 63, minimum = byte(1) & 63;
    if (sub >= 4) {
        scale = (byte(2) & 15) | (byte(0) >> 2 & 48);
        minimum = byte(2) >> 4 | (byte(1) >> 2 & 48);
    }
    return {unit * static_cast<float>(scale), 0, half_at(record + 2 * PANEL + 2 * column) * static_cast<float>(minimum)};
}

// Row `row` of a packed weight of codes.
template <class T>
void dequantize_from_panels(const PackedLinear& w, int64_t row, T* to) {
    constexpr int MOST = 64;
    const WeightForm& form = WEIGHT_FORMS[w.kind];
    int64_t column = row % PANEL, record = quantized_record_bytes(w.kind, w.group);
    int64_t header = header_bytes(w.kind, w.group), size = form.sub_group != 0 ? form.sub_group : w.group;
    const auto* at = static_cast<const uint8_t*>(w.panels) + row / PANEL * panel_bytes(w);
    for (int64_t begin = 0; begin < w.in_features; begin += size) {
        int64_t within = begin % w.group;
        const uint8_t* from = at + begin / w.group * record;
        uint8_t codes[MOST];
        unpack_group(w.kind, size, from + header + within * form.bits / 8 * PANEL, column, codes);
        Factors of = form.sub_group != 0 ? factors_of(w, from, column, within / size) : factors_of(w, from, column);
        int64_t left = w.in_features - begin;
        for_lanes(left < size ? left : size, [&](int64_t i, int n) {
            float values[16];
            for (int lane = 0; lane < 16; lane++) values[lane] = static_cast<float>(codes[i + lane]);
            store_lanes(to + begin + i, fma(load(values) - of.zero, splat(of.scale), splat(of.minimum)), n);
        });
    }
}

template <class T>
void copy_row(const Tensor& table, int64_t row, T* to) {
    int64_t hidden = table.dim, bytes = sizeof(T) * hidden;
    if (table.layout == LAYOUT_ROWS)
        memcpy(static_cast<void*>(to), elements_of<T>(table) + row * hidden, bytes);
    else if (table.layout == LAYOUT_CODES)
        dequantize_from_panels(*static_cast<const PackedLinear*>(table.data), row, to);
    else if (table.dtype == F16)
        copy_from_panels<uint16_t>(table.data, hidden, row, to, bytes);
    else
        copy_from_panels<uint32_t>(table.data, (bytes + 3) / 4, row, to, bytes);
}

// The rows of ids from `first` on; those of other ids are zeros.
template <class T, class Args>
void gather(const Args& a, int64_t first, int threads) {
    int64_t tokens = a.token_ids.rows, hidden = a.table.dim;
    const int32_t* ids = elements_of<int32_t>(a.token_ids);
    f32x16 scale = rounded<T>(splat(a.scale));
    for_shares(tokens, tokens * hidden, threads, [&](int64_t t) {
        T* to = elements_of<T>(a.out) + t * hidden;
        int64_t row = ids[t] - first;
        if (row < 0 || row >= a.table.rows) {
            memset(static_cast<void*>(to), 0, sizeof(T) * hidden);
            return;
        }
        copy_row(a.table, row, to);
        if (a.scale != 1.0f)
            for_lanes(hidden, [&](int64_t i, int n) { store_lanes(to + i, load_lanes(to + i, n) * scale, n); });
    });
}

}  // namespace

PAGODA_EXPORT void pagoda_embedding(const EmbeddingArgs* a, int32_t threads) {
    by_dtype(a->table.dtype, [&](auto element) { gather<decltype(element)>(*a, 0, threads); });
}

PAGODA_EXPORT void pagoda_partial_embedding(const PartialEmbeddingArgs* a, int32_t threads) {
    by_dtype(a->table.dtype, [&](auto element) { gather<decltype(element)>(*a, a->first, threads); });
}
