// The embedding gather; its definition is embedding/reference.py.
#include "parallel.h"
#include "simd.h"

namespace {

template <class T>
void gather(const int32_t* token_ids, const void* table, void* out, int64_t tokens, int64_t hidden, float scale,
            int threads) {
    parallel(threads_for(tokens * hidden, threads), [&](int thread, int num_threads) {
        Range mine = share_of(tokens, thread, num_threads);
        for (int64_t t = mine.begin; t < mine.end; t++) {
            const T* from = static_cast<const T*>(table) + token_ids[t] * hidden;
            T* to = static_cast<T*>(out) + t * hidden;
            if (scale == 1.0f)
                memcpy(static_cast<void*>(to), from, sizeof(T) * hidden);
            else
                for_lanes(hidden, [&](int64_t i, int n) { store_lanes(to + i, load_lanes(from + i, n) * scale, n); });
        }
    });
}

}  // namespace

// table [vocab, hidden] and out [tokens, hidden] contiguous. `scale` is rounded to the table's dtype by the caller.
PAGODA_EXPORT void pagoda_embedding(int dtype, const int32_t* token_ids, const void* table, void* out, int64_t tokens,
                                    int64_t hidden, float scale, int threads) {
    auto run = dtype == F32 ? gather<float> : dtype == BF16 ? gather<bf16> : gather<f16>;
    run(token_ids, table, out, tokens, hidden, scale, threads);
}
