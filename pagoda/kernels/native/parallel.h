// Threads for the kernels: torch's own OpenMP pool, entered through its plain C interface.
//
// No `#pragma omp` and no -fopenmp: GOMP_parallel is exported by libgomp, and by LLVM's and Intel's runtimes too, so
// any compiler builds this and the library links to whichever runtime torch has already mapped. A second runtime in
// the process would have its threads fight torch's for the cores.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <type_traits>

#define PAGODA_EXPORT extern "C" __attribute__((visibility("default")))

extern "C" {
void GOMP_parallel(void (*body)(void*), void* data, unsigned num_threads, unsigned flags);
int omp_get_thread_num(void);
int omp_get_num_threads(void);
}

// Calls body(thread, num_threads) on each of `threads` threads; returns when all are done.
template <class Body>
inline void parallel(int threads, Body&& body) {
    if (threads <= 1) {
        body(0, 1);
        return;
    }
    using Plain = typename std::remove_reference<Body>::type;
    GOMP_parallel(
        [](void* data) { (*static_cast<Plain*>(data))(omp_get_thread_num(), omp_get_num_threads()); },
        const_cast<void*>(static_cast<const void*>(&body)), static_cast<unsigned>(threads), 0);
}

// Thread `thread` of `num_threads` gets [begin, end) of `count` items, cut at multiples of `grain`.
struct Range {
    int64_t begin, end;
};
inline Range share_of(int64_t count, int thread, int num_threads, int64_t grain = 1) {
    int64_t pieces = (count + grain - 1) / grain;
    int64_t begin = pieces * thread / num_threads * grain, end = pieces * (thread + 1) / num_threads * grain;
    return {begin < count ? begin : count, end < count ? end : count};
}

// Entering and leaving a parallel region costs some microseconds: below this many elements one thread is faster.
constexpr int64_t PARALLEL_MIN_ELEMENTS = 32768;
inline int threads_for(int64_t elements, int threads) { return elements < PARALLEL_MIN_ELEMENTS ? 1 : threads; }

// A buffer of at least `bytes`, aligned to a cache line, kept by the calling thread between calls.
// `slot` tells apart buffers that live at the same time.
inline void* thread_scratch(size_t bytes, int slot = 0) {
    static thread_local void* buffer[4] = {};
    static thread_local size_t capacity[4] = {};
    if (capacity[slot] < bytes) {
        free(buffer[slot]);
        capacity[slot] = (bytes + 4095) / 4096 * 4096;
        buffer[slot] = aligned_alloc(64, capacity[slot]);
        if (buffer[slot] == nullptr) abort();
    }
    return buffer[slot];
}
