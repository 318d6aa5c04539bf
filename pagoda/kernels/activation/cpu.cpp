// Gated activations and the soft cap; their definition is activation/reference.py.
#include "gates.h"
#include "parallel.h"

namespace {

template <class Activation, class T>
void gated(const void* gate_up, void* out, int64_t tokens, int64_t width, int threads) {
    parallel(threads_for(tokens * width * 2, threads), [&](int thread, int num_threads) {
        // Cut within tokens too: a single token has 2 * width elements, enough for several threads in a large model.
        Range mine = share_of(tokens * width, thread, num_threads, 64);
        for (int64_t at = mine.begin; at < mine.end;) {
            int64_t token = at / width, column = at % width;
            int64_t count = width - column < mine.end - at ? width - column : mine.end - at;
            const T* gate = static_cast<const T*>(gate_up) + token * 2 * width + column;
            T* to = static_cast<T*>(out) + at;
            for_lanes(count, [&](int64_t i, int n) {
                store_lanes(to + i, Activation::of(load_lanes(gate + i, n)) * load_lanes(gate + width + i, n), n);
            });
            at += count;
        }
    });
}

template <class T>
void cap(const void* x, void* out, int64_t elements, float limit, int threads) {
    parallel(threads_for(elements, threads), [&](int thread, int num_threads) {
        Range mine = share_of(elements, thread, num_threads, 16);
        const T* from = static_cast<const T*>(x) + mine.begin;
        T* to = static_cast<T*>(out) + mine.begin;
        for_lanes(mine.end - mine.begin,
                  [&](int64_t i, int n) { store_lanes(to + i, limit * tanh(load_lanes(from + i, n) / limit), n); });
    });
}

template <class Activation>
void gated_by_dtype(int dtype, const void* gate_up, void* out, int64_t tokens, int64_t width, int threads) {
    auto run = dtype == F32 ? gated<Activation, float> : dtype == BF16 ? gated<Activation, bf16> : gated<Activation, f16>;
    run(gate_up, out, tokens, width, threads);
}

}  // namespace

// gate_up [tokens, 2 width] -> out [tokens, width], both contiguous.
PAGODA_EXPORT void pagoda_silu_mul(int dtype, const void* gate_up, void* out, int64_t tokens, int64_t width,
                                   int threads) {
    gated_by_dtype<Silu>(dtype, gate_up, out, tokens, width, threads);
}
PAGODA_EXPORT void pagoda_gelu_tanh_mul(int dtype, const void* gate_up, void* out, int64_t tokens, int64_t width,
                                        int threads) {
    gated_by_dtype<GeluTanh>(dtype, gate_up, out, tokens, width, threads);
}
// out = limit * tanh(x / limit), contiguous; out may be x.
PAGODA_EXPORT void pagoda_softcap(int dtype, const void* x, void* out, int64_t elements, float limit, int threads) {
    auto run = dtype == F32 ? cap<float> : dtype == BF16 ? cap<bf16> : cap<f16>;
    run(x, out, elements, limit, threads);
}
