// Activations, gated and plain, and the soft cap; their definition is activation/reference.py.
#include "elementwise.h"
#include "functions.h"

// Call body(function, element): of types of the activation function and of the elements.
template <class Body>
static void by_types(int32_t kind, int32_t dtype, Body&& body) {
    by_activation(kind, [&](auto function) { by_dtype(dtype, [&](auto element) { body(function, element); }); });
}

PAGODA_EXPORT void pagoda_activate(const ActivateArgs* a, int32_t threads) {
    bool adjacent = a->x.stride == row_elements(a->x);  // then all rows are one
    by_types(a->kind, a->x.dtype, [&](auto function, auto element) {
        using T = decltype(element);
        const T* x = elements_of<T>(a->x);
        each_of_rows(elements_of<T>(a->out), adjacent ? 1 : a->x.rows, adjacent ? num_elements(a->x) : row_elements(a->x),
                     threads, [&](int64_t row, int64_t i, int n) { return function.of(load_lanes(x + row * a->x.stride + i, n)); });
    });
}

PAGODA_EXPORT void pagoda_gate(const GateArgs* a, int32_t threads) {
    int64_t width = a->out.dim;
    by_types(a->kind, a->out.dtype, [&](auto function, auto element) {
        using T = decltype(element);
        const T *gates = elements_of<T>(a->gate_up), *up = gates + width;
        each_of_rows(elements_of<T>(a->out), a->out.rows, width, threads, [&](int64_t row, int64_t i, int n) {
            int64_t at = 2 * row * width + i;
            return function.of(load_lanes(gates + at, n)) * load_lanes(up + at, n);
        });
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
