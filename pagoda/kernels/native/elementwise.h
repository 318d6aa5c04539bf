// Ops that compute each element of their result from elements at the same place.
#pragma once

#include "parallel.h"
#include "simd.h"

// out[i .. i + n) = body(i, n) for all of `elements`, shared among threads; n is 16 but for the end of a share.
template <class T, class Body>
void each_element(T* out, int64_t elements, int threads, Body&& body) {
    parallel(threads_for(elements, threads), [&](int thread, int num_threads) {
        Range mine = share_of(elements, thread, num_threads, 64);
        for_lanes(mine.end - mine.begin,
                  [&](int64_t i, int n) { store_lanes(out + mine.begin + i, body(mine.begin + i, n), n); });
    });
}

// Where a Tensor's elements are, as T.
template <class T>
T* elements_of(const Tensor& t) {
    return static_cast<T*>(t.data);
}
inline int64_t num_elements(const Tensor& t) { return t.rows * t.heads * t.dim; }
