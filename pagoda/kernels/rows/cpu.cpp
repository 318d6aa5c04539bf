// The residual sum, factors, and the selection and replacement of rows; their definition is rows/reference.py.
#include <algorithm>

#include "elementwise.h"

PAGODA_EXPORT void pagoda_add(const AddArgs* a, int32_t threads) {
    by_dtype(a->x.dtype, [&](auto element) {
        using T = decltype(element);
        const T *x = elements_of<T>(a->x), *residual = elements_of<T>(a->residual);
        each_element(elements_of<T>(a->out), num_elements(a->x), threads,
                     [&](int64_t i, int n) { return load_lanes(x + i, n) + load_lanes(residual + i, n); });
    });
}

PAGODA_EXPORT void pagoda_scale(const ScaleArgs* a, int32_t threads) {
    by_dtype(a->x.dtype, [&](auto element) {
        using T = decltype(element);
        int64_t width = a->x.heads * a->x.dim, elements = num_elements(a->x);
        parallel(threads_for(elements, threads), [&](int thread, int num_threads) {
            Range mine = share_of(elements, thread, num_threads, 64);  // a row may be large: logits
            for (int64_t at = mine.begin, count; at < mine.end; at += count) {
                count = std::min(mine.end - at, width - at % width);
                const T* from = elements_of<const T>(a->x) + at / width * a->x.stride + at % width;
                T* to = elements_of<T>(a->out) + at;
                for_lanes(count, [&](int64_t i, int n) { store_lanes(to + i, load_lanes(from + i, n) * a->factor, n); });
            }
        });
    });
}

PAGODA_EXPORT void pagoda_multiply(const MultiplyArgs* a, int32_t threads) {
    int64_t width = a->x.heads * a->x.dim;
    by_dtype(a->x.dtype, [&](auto element) {
        using T = decltype(element);
        parallel(threads_for(num_elements(a->x), threads, a->x.rows), [&](int thread, int num_threads) {
            Range mine = share_of(a->x.rows, thread, num_threads);
            for (int64_t row = mine.begin; row < mine.end; row++) {
                const T* x = elements_of<const T>(a->x) + row * a->x.stride;
                const T* y = elements_of<const T>(a->y) + row * a->y.stride;
                T* to = elements_of<T>(a->out) + row * width;
                for_lanes(width, [&](int64_t i, int n) {
                    store_lanes(to + i, load_lanes(x + i, n) * load_lanes(y + i, n), n);
                });
            }
        });
    });
}

PAGODA_EXPORT void pagoda_scale_rows(const ScaleRowsArgs* a, int32_t threads) {
    int64_t width = a->x.heads * a->x.dim;
    by_dtype(a->factors.dtype, [&](auto of_factors) {
        const auto* factors = elements_of<const decltype(of_factors)>(a->factors);
        by_dtype(a->x.dtype, [&](auto element) {
            using T = decltype(element);
            parallel(threads_for(num_elements(a->x), threads, a->x.rows), [&](int thread, int num_threads) {
                Range mine = share_of(a->x.rows, thread, num_threads);
                for (int64_t row = mine.begin; row < mine.end; row++) {
                    const T* from = elements_of<const T>(a->x) + row * a->x.stride;
                    T* to = elements_of<T>(a->out) + row * width;
                    f32x16 factor = splat(load_lanes(factors + row, 1)[0]);
                    for_lanes(width, [&](int64_t i, int n) { store_lanes(to + i, load_lanes(from + i, n) * factor, n); });
                }
            });
        });
    });
}

PAGODA_EXPORT void pagoda_select_rows(const SelectRowsArgs* a, int32_t) {
    int64_t element_bytes = a->x.dtype == F32 ? 4 : 2, bytes = a->x.heads * a->x.dim * element_bytes;
    const int64_t* index = elements_of<int64_t>(a->index);
    const char* from = elements_of<char>(a->x);
    char* to = elements_of<char>(a->out);
    for (int64_t i = 0; i < num_elements(a->index); i++)
        memcpy(to + i * bytes, from + index[i] * a->x.stride * element_bytes, static_cast<size_t>(bytes));
}

PAGODA_EXPORT void pagoda_mean_rows(const MeanRowsArgs* a, int32_t threads) {
    by_dtype(a->x.dtype, [&](auto element) {
        using T = decltype(element);
        const int64_t *index = elements_of<int64_t>(a->index), count = a->index.dim, dim = a->x.dim;
        parallel(threads_for(num_elements(a->index) * dim, threads, a->index.rows), [&](int thread, int num_threads) {
            Range mine = share_of(a->index.rows, thread, num_threads);
            for (int64_t row = mine.begin; row < mine.end; row++)
                for_lanes(dim, [&](int64_t i, int n) {
                    f32x16 sum = splat(0.0f);
                    for (int64_t r = 0; r < count; r++)
                        sum = sum + load_lanes(elements_of<T>(a->x) + index[row * count + r] * dim + i, n);
                    store_lanes(elements_of<T>(a->out) + row * dim + i, sum / splat(static_cast<float>(count)), n);
                });
        });
    });
}

PAGODA_EXPORT void pagoda_put_rows(const PutRowsArgs* a, int32_t) {
    int64_t element_bytes = a->x.dtype == F32 ? 4 : 2, bytes = a->x.heads * a->x.dim * element_bytes;
    const int64_t* index = elements_of<int64_t>(a->index);
    const char* from = elements_of<char>(a->rows);
    char* to = elements_of<char>(a->x);
    for (int64_t i = 0; i < a->index.rows; i++)
        memcpy(to + index[i] * bytes, from + i * bytes, static_cast<size_t>(bytes));
}
