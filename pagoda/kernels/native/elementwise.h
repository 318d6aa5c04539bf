// Ops that compute each element of the result from the elements at the same index.
#pragma once

#include <algorithm>

#include "parallel.h"
#include "simd.h"

// out[i .. i + n) = body(i, n) for all of `elements`, divided among threads; n is 16 except at the end of a share.
template <class T, class Body>
void each_element(T* out, int64_t elements, int threads, Body&& body) {
    parallel(threads_for(elements, threads), [&](int thread, int num_threads) {
        Range mine = share_of(elements, thread, num_threads, 64);
        for_lanes(mine.end - mine.begin,
                  [&](int64_t i, int n) { store_lanes(out + mine.begin + i, body(mine.begin + i, n), n); });
    });
}

// The same by rows of `width`: out[row][column .. column + n) = body(row, column, n). Threads divide the elements of a row,
// too: those of one token's are enough for several in a large model.
template <class T, class Body>
void each_of_rows(T* out, int64_t rows, int64_t width, int threads, Body&& body) {
    parallel(threads_for(rows * width, threads), [&](int thread, int num_threads) {
        Range mine = share_of(rows * width, thread, num_threads, 64);
        for (int64_t at = mine.begin, count; at < mine.end; at += count) {
            int64_t row = at / width, column = at % width;
            count = std::min(width - column, mine.end - at);
            for_lanes(count, [&](int64_t i, int n) { store_lanes(out + at + i, body(row, column + i, n), n); });
        }
    });
}

// Pointer to a Tensor's elements.
template <class T>
T* elements_of(const Tensor& t) {
    return static_cast<T*>(t.data);
}
inline int64_t row_elements(const Tensor& t) { return t.heads * t.dim; }
inline int64_t num_elements(const Tensor& t) { return t.rows * row_elements(t); }
inline int64_t element_bytes(const Tensor& t) {
    return t.dtype == I8 ? 1 : t.dtype == I64 ? 8 : t.dtype == F32 || t.dtype == I32 ? 4 : 2;
}
