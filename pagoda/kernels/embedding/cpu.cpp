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

// Row `row` of a packed weight of codes.
template <class T>
void dequantize_from_panels(const PackedLinear& w, int64_t row, T* to) {
    constexpr int MOST = 64;
    int64_t column = row % PANEL, record = quantized_record_bytes(w.kind, w.group), header = header_bytes(w.kind);
    const auto* at = static_cast<const uint8_t*>(w.panels) + row / PANEL * panel_bytes(w);
    int64_t scales = scales_bytes(w.kind);
    const WeightForm& form = WEIGHT_FORMS[w.kind];
    for (int64_t begin = 0; begin < w.in_features; begin += w.group, at += record) {
        uint8_t codes[MOST];
        unpack_group(w.kind, w.group, at + header, column, codes);
        f32x16 scale = splat(load_scales(w.kind, at + column / 16 * scales / 2)[column % 16]);
        const uint8_t* second = at + scales + 2 * column;
        f32x16 minimum = {}, zero = splat(static_cast<float>(form.middle));
        if (form.offset == OFFSET_MINIMUM) {
            minimum = splat(load_lanes(reinterpret_cast<const f16*>(second), 1)[0]);
        } else if (form.offset == OFFSET_ZERO_POINT) {
            zero = splat(static_cast<float>(second[0] | second[1] << 8));
        }
        int64_t left = w.in_features - begin;
        for_lanes(left < w.group ? left : w.group, [&](int64_t i, int n) {
            float values[16];
            for (int lane = 0; lane < 16; lane++) values[lane] = static_cast<float>(codes[i + lane]);
            store_lanes(to + begin + i, fma(load(values) - zero, scale, minimum), n);
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
    parallel(threads_for(tokens * hidden, threads, tokens), [&](int thread, int num_threads) {
        Range mine = share_of(tokens, thread, num_threads);
        for (int64_t t = mine.begin; t < mine.end; t++) {
            T* to = elements_of<T>(a.out) + t * hidden;
            int64_t row = ids[t] - first;
            if (row < 0 || row >= a.table.rows) {
                memset(static_cast<void*>(to), 0, sizeof(T) * hidden);
                continue;
            }
            copy_row(a.table, row, to);
            if (a.scale != 1.0f)
                for_lanes(hidden, [&](int64_t i, int n) { store_lanes(to + i, load_lanes(to + i, n) * scale, n); });
        }
    });
}

}  // namespace

PAGODA_EXPORT void pagoda_embedding(const EmbeddingArgs* a, int32_t threads) {
    by_dtype(a->table.dtype, [&](auto element) { gather<decltype(element)>(*a, 0, threads); });
}

PAGODA_EXPORT void pagoda_partial_embedding(const PartialEmbeddingArgs* a, int32_t threads) {
    by_dtype(a->table.dtype, [&](auto element) { gather<decltype(element)>(*a, a->first, threads); });
}
