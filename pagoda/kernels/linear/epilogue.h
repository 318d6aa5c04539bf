// The epilogue of a linear layer: from sums to the output.
#pragma once

#include "../activation/functions.h"
#include "gemm.h"

// A tile of the output that is summed: rows of sums, `stride` apart, for `columns` columns from `column` on. `up`: with a
// gate, those of their partners.
struct Summed {
    const float *sums, *up;
    int64_t stride, row, rows, column, columns;
};

inline f32x16 with_bias(const float* sums, const float* bias, int64_t column) {
    return bias == nullptr ? load(sums) : load(sums) + load(bias + column);
}

// value(i, column): of the tile's sums from index i on.
template <class Out, class Value>
void write_out(const LinearJob& job, const Summed& tile, Value&& value) {
    for (int64_t r = 0; r < tile.rows; r++) {
        Out* out = static_cast<Out*>(job.out) + (tile.row + r) * job.out_stride + tile.column;
        for_lanes(tile.columns, [&](int64_t i, int n) {
            store_lanes(out + i, value(r * tile.stride + i, tile.column + i), n);
        });
    }
}
template <class Out>
void finish(const LinearJob& job, const Summed& tile) {
    const float* bias = job.weight->bias;
    int64_t partner = job.weight->out_features / 2;
    auto sum = [&](int64_t at, int64_t column) { return with_bias(tile.sums + at, bias, column); };
    if (job.activation == ACTIVATION_IDENTITY && !job.gated) return write_out<Out>(job, tile, sum);
    by_activation(job.activation, [&](auto function) {
        if (job.gated)
            write_out<Out>(job, tile, [&](int64_t at, int64_t column) {
                f32x16 up = with_bias(tile.up + at, bias, partner + column);
                return function.of(rounded<Out>(sum(at, column))) * rounded<Out>(up);
            });
        else
            write_out<Out>(job, tile, [&](int64_t at, int64_t column) { return function.of(rounded<Out>(sum(at, column))); });
    });
}
