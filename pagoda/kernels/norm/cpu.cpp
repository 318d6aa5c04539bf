// RMS and layer normalisation; their definition is norm/reference.py.
#include <cmath>

#include "../activation/functions.h"
#include "elementwise.h"

namespace {

// Add up a vector: sum = add(sum, i, n) for its lanes. The order of the sum depends on `dim` alone.
template <class Add>
float sum_lanes(int64_t dim, Add&& add) {
    f32x16 sums[4] = {};
    int lane = 0;
    for_lanes(dim, [&](int64_t i, int n) {
        sums[lane] = add(sums[lane], i, n);
        lane = (lane + 1) & 3;
    });
    return lane_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}
float inverse_root(float squares, int64_t dim, float eps) {
    return 1.0f / std::sqrt(squares / static_cast<float>(dim) + eps);
}

// Call norm(x, out) for every vector of `dim` elements: the heads of each row, or the row itself. With a residual, of the
// vectors of total = x + residual.
template <class T, class Norm>
void each_vector(const Tensor& x, const Tensor* residual, const Tensor* total, int64_t dim, const Tensor& out, int threads,
                 Norm&& norm) {
    int64_t per_row = row_elements(x) / dim, vectors = x.rows * per_row;
    for_shares(vectors, vectors * dim, threads, [&](int64_t vector) {
        int64_t at = vector / per_row * x.stride + vector % per_row * dim;
        const T* from = elements_of<const T>(x) + at;
        if (residual != nullptr) {
            const T* other = elements_of<const T>(*residual) + at;
            T* sum = elements_of<T>(*total) + vector * dim;
            for_lanes(dim, [&](int64_t i, int n) {
                store_lanes(sum + i, load_lanes(from + i, n) + load_lanes(other + i, n), n);
            });
            from = sum;
        }
        norm(from, elements_of<T>(out) + vector * dim);
    });
}

// residual, total: null for the plain norm.
template <class Args>
void rms_norm(const Args& a, const Tensor* residual, const Tensor* total, int threads) {
    by_dtype(a.x.dtype, [&](auto element) {
        using T = decltype(element);
        const T* weight = elements_of<const T>(a.weight);
        int64_t dim = a.weight.dim;
        float offset = a.unit_offset ? 1.0f : 0.0f;
        each_vector<T>(a.x, residual, total, dim, a.out, threads, [&](const T* x, T* out) {
            float squares = sum_lanes(dim, [&](f32x16 sum, int64_t i, int n) {
                f32x16 v = load_lanes(x + i, n);
                return fma(v, v, sum);
            });
            float inverse = inverse_root(squares, dim, a.eps);
            for_lanes(dim, [&](int64_t i, int n) {
                f32x16 factor = load_lanes(weight + i, n) + offset;
                store_lanes(out + i, load_lanes(x + i, n) * inverse * factor, n);
            });
        });
    });
}

// Norm one vector and multiply it with silu(gate), before or after.
template <class T>
void gated_norm_vector(const T* x, const T* gate, const T* weight, T* out, float* gated, int64_t dim, float eps,
                       bool gate_first) {
    float squares = sum_lanes(dim, [&](f32x16 sum, int64_t i, int n) {
        f32x16 v = load_lanes(x + i, n), g = Silu::of(load_lanes(gate + i, n));
        store(gated + i, v * g);
        if (gate_first) v = v * g;
        return fma(v, v, sum);
    });
    float inverse = inverse_root(squares, dim, eps);
    for_lanes(dim, [&](int64_t i, int n) {
        store_lanes(out + i, load(gated + i) * inverse * load_lanes(weight + i, n), n);
    });
}

// The first n lanes, the others 0.
inline f32x16 only_first(f32x16 v, int n) { return select(lane_numbers() < n, v, f32x16{}); }

// residual, total: null for the plain norm.
template <class Args>
void layer_norm(const Args& a, const Tensor* residual, const Tensor* total, int threads) {
    by_dtype(a.x.dtype, [&](auto element) {
        using T = decltype(element);
        const T *weight = elements_of<const T>(a.weight), *bias = elements_of<const T>(a.bias);
        int64_t dim = a.x.dim;
        each_vector<T>(a.x, residual, total, dim, a.out, threads, [&](const T* x, T* out) {
            float sum = sum_lanes(dim, [&](f32x16 sum, int64_t i, int n) { return sum + load_lanes(x + i, n); });
            float mean = sum / static_cast<float>(dim);
            float squares = sum_lanes(dim, [&](f32x16 sum, int64_t i, int n) {
                f32x16 away = only_first(load_lanes(x + i, n) - mean, n);
                return sum + away * away;
            });
            float inverse = inverse_root(squares, dim, a.eps);
            for_lanes(dim, [&](int64_t i, int n) {
                f32x16 normed = (load_lanes(x + i, n) - mean) * inverse;
                store_lanes(out + i, fma(normed, load_lanes(weight + i, n), load_lanes(bias + i, n)), n);
            });
        });
    });
}

}  // namespace

PAGODA_EXPORT void pagoda_rms_norm(const RmsNormArgs* a, int32_t threads) { rms_norm(*a, nullptr, nullptr, threads); }
PAGODA_EXPORT void pagoda_add_rms_norm(const AddRmsNormArgs* a, int32_t threads) {
    rms_norm(*a, &a->residual, &a->total, threads);
}
PAGODA_EXPORT void pagoda_layer_norm(const LayerNormArgs* a, int32_t threads) { layer_norm(*a, nullptr, nullptr, threads); }
PAGODA_EXPORT void pagoda_add_layer_norm(const AddLayerNormArgs* a, int32_t threads) {
    layer_norm(*a, &a->residual, &a->total, threads);
}

// Every group of x of each row.
PAGODA_EXPORT void pagoda_gated_rms_norm(const GatedRmsNormArgs* a, int32_t threads) {
    int64_t dim = a->x.dim, groups = a->x.heads, vectors = a->x.rows * groups;
    bool own_weights = a->weight.dim != dim;
    by_dtype(a->x.dtype, [&](auto element) {
        using T = decltype(element);
        for_shares(vectors, vectors * dim, threads, [&](int64_t i) {
            auto* gated = static_cast<float*>(thread_scratch(static_cast<size_t>(dim + 15) * sizeof(float)));
            int64_t row = i / groups, at = i % groups * dim;
            gated_norm_vector(elements_of<const T>(a->x) + row * a->x.stride + at,
                              elements_of<const T>(a->gate) + row * a->gate.stride + at,
                              elements_of<const T>(a->weight) + (own_weights ? at : 0), elements_of<T>(a->out) + i * dim,
                              gated, dim, a->eps, a->gate_first);
        });
    });
}
