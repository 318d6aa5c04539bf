// The residual sum; its definition is rows/reference.py.
#include "parallel.h"
#include "simd.h"

namespace {

template <class T>
void add(const void* x, const void* residual, void* out, int64_t elements, int threads) {
    parallel(threads_for(elements, threads), [&](int thread, int num_threads) {
        Range mine = share_of(elements, thread, num_threads, 64);
        const T *a = static_cast<const T*>(x) + mine.begin, *b = static_cast<const T*>(residual) + mine.begin;
        T* to = static_cast<T*>(out) + mine.begin;
        for_lanes(mine.end - mine.begin,
                  [&](int64_t i, int n) { store_lanes(to + i, load_lanes(a + i, n) + load_lanes(b + i, n), n); });
    });
}

}  // namespace

// out = x + residual, contiguous.
PAGODA_EXPORT void pagoda_add(int dtype, const void* x, const void* residual, void* out, int64_t elements,
                              int threads) {
    auto run = dtype == F32 ? add<float> : dtype == BF16 ? add<bf16> : add<f16>;
    run(x, residual, out, elements, threads);
}
