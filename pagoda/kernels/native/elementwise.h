// Ops that compute each element of the result from the elements at the same index.
#pragma once

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

// Pointer to a Tensor's elements.
template <class T>
T* elements_of(const Tensor& t) {
    return static_cast<T*>(t.data);
}
inline int64_t num_elements(const Tensor& t) { return t.rows * t.heads * t.dim; }
