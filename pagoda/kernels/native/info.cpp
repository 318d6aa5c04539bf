// Facts about the build and the thread pool, for `pagoda doctor` and the tests.
#include "parallel.h"

// The widest instruction set the kernels were compiled for.
PAGODA_EXPORT const char* pagoda_isa() {
#if defined(__AVX512BF16__)
    return "avx512_bf16";
#elif defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
    return "avx512";
#elif defined(__AVX2__) && defined(__FMA__)
    return "avx2";
#else
    return "portable";
#endif
}

// Run a parallel region of `threads` shares; return a bit for each share that ran exactly once.
PAGODA_EXPORT uint64_t pagoda_shares_done(int32_t threads) {
    std::atomic<uint64_t> once{0}, twice{0};
    parallel(threads, [&](int thread, int) {
        uint64_t bit = uint64_t(1) << thread;
        twice.fetch_or(once.fetch_or(bit) & bit);
    });
    return once.load() & ~twice.load();
}
