// What the compiler made of this machine, for `pagoda doctor` and the tests.
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

// How many threads a parallel region of `threads` really gets.
PAGODA_EXPORT int pagoda_num_threads(int threads) {
    std::atomic<int> seen{0};
    parallel(threads, [&](int, int) { seen.fetch_add(1); });
    return seen.load();
}
