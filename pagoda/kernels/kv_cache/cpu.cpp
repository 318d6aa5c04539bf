// Writing the paged KV cache, with the rotary embedding on the way, and copying blocks.
// The definition is kv_cache/reference.py; how pages are laid out inside is pages.h.
#include <cfloat>
#include <cmath>

#include "../rotary/rotate.h"
#include "pages.h"
#include "parallel.h"

namespace {

struct Write {
    const void *k, *v;
    void *k_pages, *v_pages;
    float *k_scale, *v_scale;
    const int64_t* slot_mapping;
    int64_t tokens, kv_heads, head_dim, k_stride, v_stride, block_size;
    // Rotation of K, or null.
    const int32_t* positions;
    const float *cos, *sin;
};

constexpr int64_t MAX_HEAD_DIM = 512;  // as in native_ops.py, which refuses larger ones

template <class Stored>
void scatter_k(const Stored* row, Stored* page, int64_t slot, const Write& w) {
    constexpr int P = PageLayout<Stored>::PAIR;
    Stored* to = page + slot * P;
    for (int64_t d = 0; d < w.head_dim; d += P, to += w.block_size * P)
        memcpy(static_cast<void*>(to), row + d, sizeof(Stored) * P);
}
template <class Stored>
void scatter_v(const Stored* row, Stored* page, int64_t slot, const Write& w) {
    constexpr int P = PageLayout<Stored>::PAIR;
    Stored* to = page + v_offset<Stored>(0, slot, w.head_dim);
    for (int64_t d = 0; d < w.head_dim; d++) to[d * P] = row[d];
}

// A vector to int8, symmetric, the largest magnitude at 127; returns the scale. Where an element is not finite the scale
// is a NaN, and so is whatever attends to it.
template <class T>
float quantize(const T* x, int8_t* out, int64_t count) {
    i32x16 largest = {};
    for_lanes(count, [&](int64_t i, int n) { largest = vmax(largest, magnitude_bits(load_lanes(x + i, n))); });
    float limit = largest_magnitude(largest);
    if (!(limit <= FLT_MAX)) {
        memset(out, 0, static_cast<size_t>(count));
        return NAN;
    }
    float inverse = limit > 127.0f / FLT_MAX ? 127.0f / limit : 0.0f;  // of numbers too small to divide by: zeros
    for_lanes(count, [&](int64_t i, int n) {
        int8_t codes[16];
        store(codes, to_nearest(load_lanes(x + i, n) * inverse));
        memcpy(out + i, codes, static_cast<size_t>(n));
    });
    return limit / 127.0f;
}

template <class T, class Stored>
void write_token(const Write& w, int64_t t) {
    int64_t block = w.slot_mapping[t] / w.block_size, slot = w.slot_mapping[t] % w.block_size;
    int64_t page_elements = w.block_size * w.head_dim;
    for (int64_t h = 0; h < w.kv_heads; h++) {
        int64_t page = block * w.kv_heads + h;
        const T* k = static_cast<const T*>(w.k) + t * w.k_stride + h * w.head_dim;
        const T* v = static_cast<const T*>(w.v) + t * w.v_stride + h * w.head_dim;
        Stored* k_page = static_cast<Stored*>(w.k_pages) + page * page_elements;
        Stored* v_page = static_cast<Stored*>(w.v_pages) + page * page_elements;
        // Rotated to the compute dtype first, so that an int8 cache holds the same K with and without the fused op.
        T rotated[MAX_HEAD_DIM];
        if (w.positions != nullptr) {
            int64_t half = w.head_dim / 2, at = w.positions[t] * half;
            rotate_vector(k, w.cos + at, w.sin + at, rotated, half);
            k = rotated;
        }
        if constexpr (sizeof(Stored) == 1) {
            int8_t narrow[MAX_HEAD_DIM];
            int64_t scale_at = page * w.block_size + slot;
            w.k_scale[scale_at] = quantize(k, narrow, w.head_dim);
            scatter_k<Stored>(narrow, k_page, slot, w);
            w.v_scale[scale_at] = quantize(v, narrow, w.head_dim);
            scatter_v<Stored>(narrow, v_page, slot, w);
        } else {
            scatter_k<Stored>(k, k_page, slot, w);
            scatter_v<Stored>(v, v_page, slot, w);
        }
    }
}

template <class T, class Stored>
void write_tokens(const Write& w, int threads) {
    parallel(threads_for(2 * w.tokens * w.kv_heads * w.head_dim, threads), [&](int thread, int num_threads) {
        Range mine = share_of(w.tokens, thread, num_threads);
        for (int64_t t = mine.begin; t < mine.end; t++) write_token<T, Stored>(w, t);
    });
}

}  // namespace

// k, v [tokens, kv_heads, head_dim] (token strides in elements) to their slots.
// stored: dtype of the pages, `dtype` or I8 (then with scales). positions, cos, sin: rotate K first, unless null.
PAGODA_EXPORT void pagoda_write_kv(int dtype, int stored, const void* k, const void* v, void* k_pages, void* v_pages,
                                   float* k_scale, float* v_scale, const int64_t* slot_mapping, int64_t tokens,
                                   int64_t kv_heads, int64_t head_dim, int64_t k_stride, int64_t v_stride,
                                   int64_t block_size, const int32_t* positions, const float* cos, const float* sin,
                                   int threads) {
    Write w{k,        v,        k_pages,  v_pages,    k_scale,   v_scale, slot_mapping, tokens,
            kv_heads, head_dim, k_stride, v_stride,   block_size, positions, cos,       sin};
    if (stored == I8) {
        auto run = dtype == F32    ? write_tokens<float, int8_t>
                   : dtype == BF16 ? write_tokens<bf16, int8_t>
                                   : write_tokens<f16, int8_t>;
        run(w, threads);
    } else {
        auto run = dtype == F32 ? write_tokens<float, float> : dtype == BF16 ? write_tokens<bf16, bf16> : write_tokens<f16, f16>;
        run(w, threads);
    }
}

// pairs int64 [count][2] of (source, destination) blocks of `block_bytes`, copied one after the other.
PAGODA_EXPORT void pagoda_copy_blocks(void* pages, const int64_t* pairs, int64_t count, int64_t block_bytes,
                                      int threads) {
    // Threads share the bytes of every block, not the pairs: a chain (1 -> 2, 2 -> 3) keeps its order in each slice.
    parallel(threads_for(count * block_bytes / 4, threads), [&](int thread, int num_threads) {
        Range mine = share_of(block_bytes, thread, num_threads, 64);
        char* bytes = static_cast<char*>(pages) + mine.begin;
        for (int64_t i = 0; i < count; i++)
            if (pairs[2 * i] != pairs[2 * i + 1])
                memcpy(bytes + pairs[2 * i + 1] * block_bytes, bytes + pairs[2 * i] * block_bytes,
                       static_cast<size_t>(mine.end - mine.begin));
    });
}
