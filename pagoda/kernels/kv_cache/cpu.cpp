// Writes the paged KV cache, applying the rotary embedding on the way, and copies blocks.
// The definition is kv_cache/reference.py; the layout of a page is in pages.h.
#include "../rotary/rotate.h"
#include "int8.h"
#include "pages.h"

namespace {

struct Write {
    const Tensor &k, &v;
    const KVPages& cache;
    const int64_t* slot_mapping;
    const Angles* angles;  // to rotate K, or null
};

constexpr int64_t MAX_HEAD_DIM = 512;  // native/arguments.py refuses larger ones

// Returns the scale.
template <class T>
float quantize(const T* x, int8_t* out, int64_t count) {
    i32x16 largest = {};
    for_lanes(count, [&](int64_t i, int n) { largest = vmax(largest, magnitude_bits(load_lanes(x + i, n))); });
    Int8Scale scale = int8_scale(largest);
    if (!scale.finite()) {
        memset(out, 0, static_cast<size_t>(count));
        return scale.scale;
    }
    for_lanes(count, [&](int64_t i, int n) {
        int8_t codes[16];
        store(codes, to_nearest(load_lanes(x + i, n) * scale.inverse));
        memcpy(out + i, codes, static_cast<size_t>(n));
    });
    return scale.scale;
}

template <class T, class Stored>
void write_token(const Write& w, int64_t t, const float* cos, const float* sin) {
    const KVPages& cache = w.cache;
    int64_t block = w.slot_mapping[t] / cache.block_size, slot = w.slot_mapping[t] % cache.block_size;
    int64_t head_dim = cache.head_dim, value_dim = cache.value_dim;
    for (int64_t h = 0; h < cache.kv_heads; h++) {
        const T* k = elements_of<const T>(w.k) + t * w.k.stride + h * head_dim;
        const T* v = elements_of<const T>(w.v) + t * w.v.stride + h * value_dim;
        Stored* k_page = static_cast<Stored*>(cache.k) + block * cache.k_stride + h * cache.block_size * head_dim;
        Stored* v_page = static_cast<Stored*>(cache.v) + block * cache.v_stride + h * cache.block_size * value_dim;
        // Round to the compute dtype first, so that an int8 cache holds the same K with and without the fused op.
        T rotated[MAX_HEAD_DIM];
        if (cos != nullptr) {
            rotate_vector(k, cos, sin, rotated, head_dim / 2);
            k = rotated;
        }
        if constexpr (sizeof(Stored) == 1) {
            int8_t narrow[MAX_HEAD_DIM];
            int64_t scale_at = block * cache.scale_stride + h * cache.block_size + slot;
            cache.k_scale[scale_at] = quantize(k, narrow, head_dim);
            scatter_k<Stored>(narrow, k_page, slot, cache.block_size, head_dim);
            cache.v_scale[scale_at] = quantize(v, narrow, value_dim);
            scatter_v<Stored>(narrow, v_page, slot, value_dim);
        } else {
            scatter_k<Stored>(k, k_page, slot, cache.block_size, head_dim);
            scatter_v<Stored>(v, v_page, slot, value_dim);
        }
    }
}

// To pages of the compute dtype, or of int8 with scales.
void write_tokens(const Write& w, int threads) {
    by_dtype(w.k.dtype, [&](auto element) {
        using T = decltype(element);
        auto write = w.cache.dtype == I8 ? write_token<T, int8_t> : write_token<T, T>;
        for_shares(w.k.rows, 2 * num_elements(w.k), threads, [&](int64_t t) {
            if (w.angles == nullptr) write(w, t, nullptr, nullptr);
            else w.angles->with_row(t, [&](const float* cos, const float* sin) { write(w, t, cos, sin); });
        });
    });
}

}  // namespace

PAGODA_EXPORT void pagoda_write_kv(const WriteKvArgs* a, int32_t threads) {
    write_tokens({a->k, a->v, a->cache, a->metadata->slot_mapping, nullptr}, threads);
}

PAGODA_EXPORT void pagoda_rotary_write_kv(const RotaryWriteKvArgs* a, int32_t threads) {
    Angles angles(a->positions, a->cos, a->sin);
    write_tokens({a->k, a->v, a->cache, a->metadata->slot_mapping, &angles}, threads);
    rotate_rows(a->q, angles, a->rotated_q, threads);
}
