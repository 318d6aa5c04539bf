// Short causal convolutions; their definition is recurrent/reference.py.
#include <cstring>

#include "../activation/functions.h"
#include "elementwise.h"
#include "state_rows.h"

namespace {

// One row's tokens, and the channels of x, weight, bias and states that a thread computes: `count`, all pointers at the
// first of them. `before`: the state that the row goes on from, null for zeros.
template <class T>
struct Run {
    const T *x, *weight, *bias, *before;
    T* out;
    int64_t x_stride, dim, count, num_taps, num_new;
    bool silu;

    // Input `at` of the row, counted from its first new token; null where it is 0.
    const T* input(int64_t at) const {
        if (at >= 0) return x + at * x_stride;
        return before == nullptr ? nullptr : before + (num_taps - 1 + at) * dim;
    }

    void compute() const {
        for (int64_t t = 0; t < num_new; t++)
            for_lanes(count, [&](int64_t i, int n) {
                f32x16 total = bias == nullptr ? f32x16{} : load_lanes(bias + i, n);
                for (int64_t tap = 0; tap < num_taps; tap++) {
                    const T* from = input(t - num_taps + 1 + tap);
                    if (from == nullptr) continue;
                    total = fma(load_lanes(weight + tap * dim + i, n), load_lanes(from + i, n), total);
                }
                store_lanes(out + t * dim + i, silu ? Silu::of(total) : total, n);
            });
    }

    // Write the state after `done` of the new tokens. In this order of rows it may overwrite `before`.
    void leave(int64_t done, T* state) const {
        size_t bytes = static_cast<size_t>(count) * sizeof(T);
        for (int64_t row = 0; row < num_taps - 1; row++) {
            const T* from = input(done - num_taps + 1 + row);
            if (from == nullptr) memset(static_cast<void*>(state + row * dim), 0, bytes);
            else memmove(static_cast<void*>(state + row * dim), from, bytes);
        }
    }
};

template <class T>
void convolve(const ShortConvArgs& a, const StateRow& row, Range channels) {
    auto state = [&](int32_t block) {
        return block == 0 ? nullptr : static_cast<T*>(a.states.k) + block * a.states.k_stride + channels.begin;
    };
    const T* bias = a.bias.data == nullptr ? nullptr : elements_of<const T>(a.bias) + channels.begin;
    Run<T> run = {elements_of<const T>(a.x) + row.first * a.x.stride + channels.begin,
                  elements_of<const T>(a.weight) + channels.begin,
                  bias,
                  state(row.before()),
                  elements_of<T>(a.out) + row.first * a.out.stride + channels.begin,
                  a.x.stride,
                  a.out.dim,
                  channels.end - channels.begin,
                  a.weight.rows,
                  row.num_new,
                  a.silu != 0};
    run.compute();
    // The last block first: that of the first token may be the one that the row goes on from.
    for (int64_t block = row.last_block(); block >= row.first_block(); block--)
        if (T* to = state(row.blocks[block])) run.leave(row.done_at(block), to);
}

}  // namespace

// Threads divide the channels, so that each computes the rows in their order.
PAGODA_EXPORT void pagoda_short_conv(const ShortConvArgs* a, int32_t threads) {
    by_dtype(a->x.dtype, [&](auto element) {
        parallel(threads_for(a->x.rows * a->out.dim, threads), [&](int thread, int num_threads) {
            Range channels = share_of(a->out.dim, thread, num_threads, 64);
            if (channels.begin == channels.end) return;
            for (int64_t i = 0; i < a->metadata->num_rows; i++) {
                StateRow row(*a->metadata, i);
                if (row.num_new > 0) convolve<decltype(element)>(*a, row, channels);
            }
        });
    });
}
