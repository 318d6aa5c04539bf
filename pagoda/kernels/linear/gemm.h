// A linear layer as a job for any number of threads.
#pragma once

#include <atomic>

#include "packed.h"
#include "plan.h"
#include "parallel.h"
#include "simd.h"

// out = x @ weight.T + bias. `dtype` is x's, `out_dtype` the same or F32.
// activation: of the output, rounded before.
// gated: the weight holds gate then up, each a whole number of panels; out = activation(gate) * up, both rounded before.
struct LinearJob {
    const PackedLinear* weight;
    const void* x;
    int64_t rows, x_stride;
    int32_t dtype, out_dtype;
    void* out;
    int64_t out_stride;
    int32_t activation = ACTIVATION_IDENTITY;
    bool gated = false;
    void* scratch = nullptr;  // linear_scratch_bytes(), or null when that is 0
};

// Bytes needed to convert x before the multiplication (quantised, widened, padded); often 0.
size_t linear_scratch_bytes(const LinearJob& job);
// Convert pieces begin .. end - 1 of x: the segments of its rows, row by row. All must be converted before any thread
// multiplies.
void linear_convert(const LinearJob& job, int64_t begin, int64_t end);
// Convert all rows on `threads` threads, into the calling thread's memory of the number `scratch`.
void linear_convert_all(LinearJob& job, int scratch, int threads);
int64_t linear_pieces_of_x(const LinearJob& job);
// Number of units that the output's columns are divided into: panels, or pairs of panels with a gate.
int64_t linear_panels(const LinearJob& job);
// Compute rows [row, row_end) of panels [panel, panel_end) on the calling thread alone.
void linear_multiply_part(const LinearJob& job, int64_t row, int64_t row_end, int64_t panel, int64_t panel_end);
// Compute everything on `threads` threads.
void linear_run(LinearJob job, int threads);
