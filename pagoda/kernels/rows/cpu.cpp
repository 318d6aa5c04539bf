// The residual sum, factors, and the selection and replacement of rows; their definition is rows/reference.py.
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
        const T* x = elements_of<T>(a->x);
        each_of_rows(elements_of<T>(a->out), a->x.rows, row_elements(a->x), threads, [&](int64_t row, int64_t i, int n) {
            return load_lanes(x + row * a->x.stride + i, n) * a->factor;
        });
    });
}

PAGODA_EXPORT void pagoda_multiply(const MultiplyArgs* a, int32_t threads) {
    by_dtype(a->x.dtype, [&](auto element) {
        using T = decltype(element);
        const T *x = elements_of<T>(a->x), *y = elements_of<T>(a->y);
        each_of_rows(elements_of<T>(a->out), a->x.rows, row_elements(a->x), threads, [&](int64_t row, int64_t i, int n) {
            return load_lanes(x + row * a->x.stride + i, n) * load_lanes(y + row * a->y.stride + i, n);
        });
    });
}

PAGODA_EXPORT void pagoda_scale_rows(const ScaleRowsArgs* a, int32_t threads) {
    by_dtype(a->factors.dtype, [&](auto of_factors) {
        const auto* factors = elements_of<const decltype(of_factors)>(a->factors);
        by_dtype(a->x.dtype, [&](auto element) {
            using T = decltype(element);
            for_shares(a->x.rows, num_elements(a->x), threads, [&](int64_t row) {
                const T* from = elements_of<const T>(a->x) + row * a->x.stride;
                T* to = elements_of<T>(a->out) + row * row_elements(a->x);
                f32x16 factor = splat(load_lanes(factors + row, 1)[0]);
                for_lanes(row_elements(a->x),
                          [&](int64_t i, int n) { store_lanes(to + i, load_lanes(from + i, n) * factor, n); });
            });
        });
    });
}

PAGODA_EXPORT void pagoda_select_rows(const SelectRowsArgs* a, int32_t) {
    int64_t bytes = row_elements(a->x) * element_bytes(a->x);
    const int64_t* index = elements_of<int64_t>(a->index);
    const char* from = elements_of<char>(a->x);
    char* to = elements_of<char>(a->out);
    for (int64_t i = 0; i < num_elements(a->index); i++)
        memcpy(to + i * bytes, from + index[i] * a->x.stride * element_bytes(a->x), static_cast<size_t>(bytes));
}

PAGODA_EXPORT void pagoda_mean_rows(const MeanRowsArgs* a, int32_t threads) {
    by_dtype(a->x.dtype, [&](auto element) {
        using T = decltype(element);
        const int64_t *index = elements_of<int64_t>(a->index), count = a->index.dim, dim = a->x.dim;
        for_shares(a->index.rows, num_elements(a->index) * dim, threads, [&](int64_t row) {
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
    int64_t bytes = row_elements(a->x) * element_bytes(a->x);
    const int64_t* index = elements_of<int64_t>(a->index);
    const char* from = elements_of<char>(a->rows);
    char* to = elements_of<char>(a->x);
    for (int64_t i = 0; i < a->index.rows; i++)
        memcpy(to + index[i] * bytes, from + i * a->rows.stride * element_bytes(a->rows), static_cast<size_t>(bytes));
}

PAGODA_EXPORT void pagoda_join(const JoinArgs* a, int32_t) {
    int64_t size = element_bytes(a->x), x_bytes = row_elements(a->x) * size, y_bytes = row_elements(a->y) * size;
    for (int64_t i = 0; i < a->x.rows; i++) {
        char* to = elements_of<char>(a->out) + i * (x_bytes + y_bytes);
        memcpy(to, elements_of<char>(a->x) + i * a->x.stride * size, static_cast<size_t>(x_bytes));
        memcpy(to + x_bytes, elements_of<char>(a->y) + i * a->y.stride * size, static_cast<size_t>(y_bytes));
    }
}
