// The rotary embedding; its definition is rotary/reference.py.
#include "rotate.h"

#include "parallel.h"

namespace {

template <class T>
void rotate(const void* x, void* out, const int32_t* positions, const float* cos, const float* sin, int64_t tokens,
            int64_t heads, int64_t head_dim, int64_t token_stride, int threads) {
    int64_t half = head_dim / 2;
    parallel(threads_for(tokens * heads * head_dim, threads), [&](int thread, int num_threads) {
        Range mine = share_of(tokens, thread, num_threads);
        for (int64_t t = mine.begin; t < mine.end; t++) {
            const float *row_cos = cos + positions[t] * half, *row_sin = sin + positions[t] * half;
            for (int64_t h = 0; h < heads; h++)
                rotate_vector(static_cast<const T*>(x) + t * token_stride + h * head_dim, row_cos, row_sin,
                              static_cast<T*>(out) + (t * heads + h) * head_dim, half);
        }
    });
}

}  // namespace

// x [tokens, heads, head_dim], tokens `token_stride` elements apart, -> out, contiguous. cos, sin [max_position, head_dim / 2].
PAGODA_EXPORT void pagoda_rotary(int dtype, const void* x, void* out, const int32_t* positions, const float* cos,
                                 const float* sin, int64_t tokens, int64_t heads, int64_t head_dim,
                                 int64_t token_stride, int threads) {
    auto run = dtype == F32 ? rotate<float> : dtype == BF16 ? rotate<bf16> : rotate<f16>;
    run(x, out, positions, cos, sin, tokens, heads, head_dim, token_stride, threads);
}
