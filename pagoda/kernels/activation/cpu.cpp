// Activations, gated and plain, and the soft cap; their definition is activation/reference.py.
#include <algorithm>

#include "elementwise.h"
#include "functions.h"

namespace {

template <class Function, class T>
void gated(const Tensor& gate_up, const Tensor& out, int threads) {
    int64_t width = out.dim, elements = num_elements(out);
    parallel(threads_for(elements * 2, threads), [&](int thread, int num_threads) {
        // Divide within tokens too: in a large model, the 2 * width elements of one token are enough for several threads.
        Range mine = share_of(elements, thread, num_threads, 64);
        for (int64_t at = mine.begin; at < mine.end;) {
            int64_t token = at / width, column = at % width;
            int64_t count = width - column < mine.end - at ? width - column : mine.end - at;
            gate_lanes<Function>(elements_of<T>(gate_up) + token * 2 * width + column, width, elements_of<T>(out) + at,
                                 count);
            at += count;
        }
    });
}

// Rows of x may be apart.
template <class Function, class T>
void plain(const Tensor& x, const Tensor& out, int threads) {
    int64_t elements = num_elements(x), of_row = x.heads * x.dim, width = x.stride == of_row ? elements : of_row;
    parallel(threads_for(elements, threads), [&](int thread, int num_threads) {
        Range mine = share_of(elements, thread, num_threads, 64);
        for (int64_t at = mine.begin; at < mine.end;) {
            int64_t row = at / width, column = at % width, count = std::min(width - column, mine.end - at);
            const T* from = elements_of<T>(x) + row * x.stride + column;
            T* to = elements_of<T>(out) + at;
            for_lanes(count, [&](int64_t i, int n) { store_lanes(to + i, Function::of(load_lanes(from + i, n)), n); });
            at += count;
        }
    });
}

// body(function, element): of types of the activation function and of the elements.
template <class Body>
void by_types(int32_t kind, int32_t dtype, Body&& body) {
    by_activation(kind, [&](auto function) { by_dtype(dtype, [&](auto element) { body(function, element); }); });
}

}  // namespace

PAGODA_EXPORT void pagoda_activate(const ActivateArgs* a, int32_t threads) {
    by_types(a->kind, a->x.dtype, [&](auto function, auto element) {
        plain<decltype(function), decltype(element)>(a->x, a->out, threads);
    });
}

PAGODA_EXPORT void pagoda_gate(const GateArgs* a, int32_t threads) {
    by_types(a->kind, a->out.dtype, [&](auto function, auto element) {
        gated<decltype(function), decltype(element)>(a->gate_up, a->out, threads);
    });
}

PAGODA_EXPORT void pagoda_xielu(const XieluArgs* a, int32_t threads) {
    by_dtype(a->x.dtype, [&](auto element) {
        using T = decltype(element);
        const T* from = elements_of<T>(a->x);
        each_element(elements_of<T>(a->out), num_elements(a->x), threads, [&](int64_t i, int n) {
            f32x16 x = load_lanes(from + i, n);
            f32x16 z = select(x < a->limit, x, splat(a->limit));
            // exp(z) - 1 - z: near 0 its series, as the difference would cancel.
            f32x16 series = fma(z, splat(1.0f / 5040.0f), splat(1.0f / 720.0f));
            series = fma(z, series, splat(1.0f / 120.0f));
            series = fma(z, series, splat(1.0f / 24.0f));
            series = fma(z, series, splat(1.0f / 6.0f));
            series = fma(z, series, splat(0.5f)) * (z * z);
            f32x16 bend = select(z > -0.5f, series, exp(z) - 1.0f - z) + (z - x);
            return select(x > 0.0f, a->above * (x * x), a->below * bend) + a->linear * x;
        });
    });
}

PAGODA_EXPORT void pagoda_softcap(const SoftcapArgs* a, int32_t threads) {
    by_dtype(a->x.dtype, [&](auto element) {
        using T = decltype(element);
        const T* x = elements_of<T>(a->x);
        each_element(elements_of<T>(a->out), num_elements(a->x), threads,
                     [&](int64_t i, int n) { return a->cap * tanh(load_lanes(x + i, n) / a->cap); });
    });
}
