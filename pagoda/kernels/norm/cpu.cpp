// RMS and layer normalisation; their definition is norm/reference.py.
#include <cmath>

#include "../activation/functions.h"
#include "elementwise.h"

namespace {

// Norm one vector. `sum_out` null: nothing to add. The order of the sum of squares depends on `dim` alone.
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

// Norm every vector of x of the weight's length: the heads of each row, or the row itself. residual, total: null for the
// plain norm.
template <class T>
void norm(const Tensor& x, const Tensor* residual, const Tensor& weight, float eps, bool unit_offset, const Tensor& out,
          const Tensor* total, int threads) {
    int64_t dim = weight.dim, per_row = x.heads * x.dim / dim, vectors = x.rows * per_row;
    parallel(threads_for(vectors * dim, threads, vectors), [&](int thread, int num_threads) {
        Range mine = share_of(vectors, thread, num_threads);
        for (int64_t i = mine.begin; i < mine.end; i++) {
            int64_t at = i / per_row * x.stride + i % per_row * dim;
            norm_vector(elements_of<const T>(x) + at, residual ? elements_of<const T>(*residual) + at : nullptr,
                        elements_of<const T>(weight), elements_of<T>(out) + i * dim,
                        residual ? elements_of<T>(*total) + i * dim : nullptr, dim, eps, unit_offset ? 1.0f : 0.0f);
        }
    });
}

// Norm one vector and multiply it with silu(gate), before or after.
template <class T>
void gated_norm_vector(const T* x, const T* gate, const T* weight, T* out, float* gated, int64_t dim, float eps,
                       bool gate_first) {
    f32x16 squares[4] = {};
    int lane = 0;
    for_lanes(dim, [&](int64_t i, int n) {
        f32x16 v = load_lanes(x + i, n), g = Silu::of(load_lanes(gate + i, n));
        store(gated + i, v * g);
        if (gate_first) v = v * g;
        squares[lane] = fma(v, v, squares[lane]);
        lane = (lane + 1) & 3;
    });
    float mean = lane_sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / static_cast<float>(dim);
    float inverse = 1.0f / std::sqrt(mean + eps);
    for_lanes(dim, [&](int64_t i, int n) {
        store_lanes(out + i, load(gated + i) * inverse * load_lanes(weight + i, n), n);
    });
}

// Norm every group of x of each row; see norm.
template <class T>
void gated_norm(const GatedRmsNormArgs& a, int threads) {
    int64_t dim = a.x.dim, groups = a.x.heads, vectors = a.x.rows * groups;
    bool own_weights = a.weight.dim != dim;
    parallel(threads_for(vectors * dim, threads, vectors), [&](int thread, int num_threads) {
        Range mine = share_of(vectors, thread, num_threads);
        auto* gated = static_cast<float*>(thread_scratch(static_cast<size_t>(dim + 15) * sizeof(float)));
        for (int64_t i = mine.begin; i < mine.end; i++) {
            int64_t row = i / groups, at = i % groups * dim;
            gated_norm_vector(elements_of<const T>(a.x) + row * a.x.stride + at,
                              elements_of<const T>(a.gate) + row * a.gate.stride + at,
                              elements_of<const T>(a.weight) + (own_weights ? at : 0), elements_of<T>(a.out) + i * dim,
                              gated, dim, a.eps, a.gate_first);
        }
    });
}

// Sum of body(i, n) over a vector; its order depends on `dim` alone.
template <class Body>
float sum_lanes(int64_t dim, Body&& body) {
    f32x16 sums[4] = {};
    int lane = 0;
    for_lanes(dim, [&](int64_t i, int n) {
        sums[lane] = sums[lane] + body(i, n);
        lane = (lane + 1) & 3;
    });
    return lane_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// The first n lanes, the others 0.
inline f32x16 only_first(f32x16 v, int n) { return select(lane_numbers() < n, v, f32x16{}); }

template <class T>
void layer_norm_row(const T* x, const T* weight, const T* bias, T* out, int64_t dim, float eps) {
    float mean = sum_lanes(dim, [&](int64_t i, int n) { return load_lanes(x + i, n); }) / static_cast<float>(dim);
    float squares = sum_lanes(dim, [&](int64_t i, int n) {
        f32x16 away = only_first(load_lanes(x + i, n) - mean, n);
        return away * away;
    });
    float inverse = 1.0f / std::sqrt(squares / static_cast<float>(dim) + eps);
    for_lanes(dim, [&](int64_t i, int n) {
        f32x16 normed = (load_lanes(x + i, n) - mean) * inverse;
        store_lanes(out + i, fma(normed, load_lanes(weight + i, n), load_lanes(bias + i, n)), n);
    });
}

// residual, total: null for the plain norm.
template <class T>
void layer_norm(const Tensor& x, const Tensor* residual, const Tensor& weight, const Tensor& bias, float eps,
                const Tensor& out, const Tensor* total, int threads) {
    int64_t dim = x.dim;
    parallel(threads_for(x.rows * dim, threads, x.rows), [&](int thread, int num_threads) {
        Range mine = share_of(x.rows, thread, num_threads);
        for (int64_t row = mine.begin; row < mine.end; row++) {
            const T* source = elements_of<const T>(x) + row * dim;
            if (residual != nullptr) {
                const T* other = elements_of<const T>(*residual) + row * dim;
                T* sum = elements_of<T>(*total) + row * dim;
                for_lanes(dim, [&](int64_t i, int n) {
                    store_lanes(sum + i, load_lanes(source + i, n) + load_lanes(other + i, n), n);
                });
                source = sum;
            }
            layer_norm_row(source, elements_of<const T>(weight), elements_of<const T>(bias),
                           elements_of<T>(out) + row * dim, dim, eps);
        }
    });
}

}  // namespace

PAGODA_EXPORT void pagoda_rms_norm(const RmsNormArgs* a, int32_t threads) {
    by_dtype(a->x.dtype, [&](auto element) {
        norm<decltype(element)>(a->x, nullptr, a->weight, a->eps, a->unit_offset, a->out, nullptr, threads);
    });
}

PAGODA_EXPORT void pagoda_gated_rms_norm(const GatedRmsNormArgs* a, int32_t threads) {
    by_dtype(a->x.dtype, [&](auto element) { gated_norm<decltype(element)>(*a, threads); });
}

// total = x + residual is normed.
PAGODA_EXPORT void pagoda_add_rms_norm(const AddRmsNormArgs* a, int32_t threads) {
    by_dtype(a->x.dtype, [&](auto element) {
        norm<decltype(element)>(a->x, &a->residual, a->weight, a->eps, a->unit_offset, a->out, &a->total, threads);
    });
}

PAGODA_EXPORT void pagoda_layer_norm(const LayerNormArgs* a, int32_t threads) {
    by_dtype(a->x.dtype, [&](auto element) {
        layer_norm<decltype(element)>(a->x, nullptr, a->weight, a->bias, a->eps, a->out, nullptr, threads);
    });
}

// total = x + residual is normed.
PAGODA_EXPORT void pagoda_add_layer_norm(const AddLayerNormArgs* a, int32_t threads) {
    by_dtype(a->x.dtype, [&](auto element) {
        layer_norm<decltype(element)>(a->x, &a->residual, a->weight, a->bias, a->eps, a->out, &a->total, threads);
    });
}
