// Facts about the build and the thread pool, for `pagoda doctor` and the tests.
#include "lanes.h"
#include "parallel.h"

// The instruction set that the kernels were compiled for: a name of variants.py, or on other CPUs "portable".
PAGODA_EXPORT const char* pagoda_isa() {
#if defined(PAGODA_AVX512_BF16)
    return "avx512_bf16";
#elif defined(PAGODA_AVX512) && defined(__AVX512VNNI__) && defined(__AVX512VBMI__)
    return "avx512_vbmi";
#elif defined(PAGODA_AVX512) && defined(__AVX512VNNI__)
    return "avx512_vnni";
#elif defined(PAGODA_AVX512)
    return "avx512";
#elif defined(PAGODA_AVX2) && defined(__AVXVNNI__)
    return "avx2_vnni";
#elif defined(PAGODA_AVX2)
    return "avx2";
#elif defined(__SSE4_2__)
    return "sse4_2";
#else
    return "portable";
#endif
}

// What compiled the kernels.
PAGODA_EXPORT const char* pagoda_compiler() {
#if defined(__clang__)
    return "clang " __clang_version__;
#else
    return "g++ " __VERSION__;
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
