// RMS normalisation; its definition is norm/reference.py.
#include <cmath>

#include "parallel.h"
#include "simd.h"

namespace {

// One vector. `sum_out` null: nothing to add. The order of the sum of squares depends on `dim` alone.
template <class T>
void norm_vector(const T* x, const T* residual, const T* weight, T* out, T* sum_out, int64_t dim, float eps,
                 float offset) {
    const T* source = x;
    if (residual != nullptr) {
        for_lanes(dim, [&](int64_t i, int n) {
            store_lanes(sum_out + i, load_lanes(x + i, n) + load_lanes(residual + i, n), n);
        });
        source = sum_out;
    }
    f32x16 squares[4] = {};
    int lane = 0;
    for_lanes(dim, [&](int64_t i, int n) {
        f32x16 v = load_lanes(source + i, n);
        squares[lane] = fma(v, v, squares[lane]);
        lane = (lane + 1) & 3;
    });
    float mean = lane_sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / static_cast<float>(dim);
    float inverse = 1.0f / std::sqrt(mean + eps);
    for_lanes(dim, [&](int64_t i, int n) {
        f32x16 factor = load_lanes(weight + i, n) + offset;
        store_lanes(out + i, load_lanes(source + i, n) * inverse * factor, n);
    });
}

template <class T>
void norm(const void* x, const void* residual, const void* weight, void* out, void* sum_out, int64_t outer,
          int64_t inner, int64_t outer_stride, int64_t inner_stride, int64_t dim, float eps, bool unit_offset,
          int threads) {
    int64_t vectors = outer * inner;
    parallel(threads_for(vectors * dim, threads), [&](int thread, int num_threads) {
        Range mine = share_of(vectors, thread, num_threads);
        for (int64_t i = mine.begin; i < mine.end; i++) {
            int64_t at = i / inner * outer_stride + i % inner * inner_stride;
            norm_vector(static_cast<const T*>(x) + at, residual ? static_cast<const T*>(residual) + at : nullptr,
                        static_cast<const T*>(weight), static_cast<T*>(out) + i * dim,
                        residual ? static_cast<T*>(sum_out) + i * dim : nullptr, dim, eps, unit_offset ? 1.0f : 0.0f);
        }
    });
}

}  // namespace

// x (and residual, unless null): `outer` times `inner` vectors of `dim` elements at the given strides (elements).
// out, sum_out: the same vectors one after the other. With a residual, sum_out = x + residual is what is normed.
PAGODA_EXPORT void pagoda_rms_norm(int dtype, const void* x, const void* residual, const void* weight, void* out,
                                   void* sum_out, int64_t outer, int64_t inner, int64_t outer_stride,
                                   int64_t inner_stride, int64_t dim, float eps, int unit_offset, int threads) {
    auto run = dtype == F32 ? norm<float> : dtype == BF16 ? norm<bf16> : norm<f16>;
    run(x, residual, weight, out, sum_out, outer, inner, outer_stride, inner_stride, dim, eps, unit_offset != 0,
        threads);
}
