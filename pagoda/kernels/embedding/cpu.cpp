// The embedding gather; its definition is embedding/reference.py.
#include "elementwise.h"

namespace {

template <class T>
void gather(const EmbeddingArgs& a, int threads) {
    int64_t tokens = a.token_ids.rows, hidden = a.table.dim;
    const int32_t* ids = elements_of<int32_t>(a.token_ids);
    f32x16 scale = rounded<T>(splat(a.scale));
    parallel(threads_for(tokens * hidden, threads), [&](int thread, int num_threads) {
        Range mine = share_of(tokens, thread, num_threads);
        for (int64_t t = mine.begin; t < mine.end; t++) {
            const T* from = elements_of<T>(a.table) + ids[t] * hidden;
            T* to = elements_of<T>(a.out) + t * hidden;
            if (a.scale == 1.0f)
                memcpy(static_cast<void*>(to), from, sizeof(T) * hidden);
            else
                for_lanes(hidden, [&](int64_t i, int n) { store_lanes(to + i, load_lanes(from + i, n) * scale, n); });
        }
    });
}

}  // namespace

PAGODA_EXPORT void pagoda_embedding(const EmbeddingArgs* a, int32_t threads) {
    by_dtype(a->table.dtype, [&](auto element) { gather<decltype(element)>(*a, threads); });
}
