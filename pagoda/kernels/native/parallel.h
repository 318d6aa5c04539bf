// Threads for the kernels.
//
// parallel(threads, body) calls body(thread, num_threads) once for every `thread` below num_threads <= threads, on as
// many threads as get a core, and returns when all calls are done. One thread may run several shares, so a
// body must not wait for another one.
//
// The pool is our own (pool.cpp): between regions its threads spin for about as long as waking them takes, which covers the
// gap between one op and the next, and then sleep. torch's OpenMP threads spin for milliseconds: fine alone on a
// machine, but next to a second busy process each region then takes a time slice of the system's scheduler, 28 ms instead
// of the 2 microseconds of this pool (two threads on two cores, load 10).
#pragma once

#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "abi.h"

inline void spin_pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

inline int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * int64_t(1000000000) + t.tv_nsec;
}

// Call body(data, thread, num_threads) for `threads` >= 2 shares. Within a region: one share, run by the caller.
void run_on_pool(void (*body)(void*, int, int), void* data, int threads);

template <class Body>
inline void parallel(int threads, Body&& body) {
    if (threads <= 1) {
        body(0, 1);
        return;
    }
    using Plain = typename std::remove_reference<Body>::type;
    run_on_pool([](void* data, int thread, int count) { (*static_cast<Plain*>(data))(thread, count); },
                const_cast<void*>(static_cast<const void*>(&body)), threads);
}

// The range of `count` items for thread `thread` of `num_threads`, divided at multiples of `grain`.
struct Range {
    int64_t begin, end;
};
inline Range share_of(int64_t count, int thread, int num_threads, int64_t grain = 1) {
    int64_t pieces = (count + grain - 1) / grain;
    int64_t begin = pieces * thread / num_threads * grain, end = pieces * (thread + 1) / num_threads * grain;
    return {begin < count ? begin : count, end < count ? end : count};
}

// A parallel region costs microseconds, and more with each thread: a thread is worth it for so many elements.
constexpr int64_t ELEMENTS_PER_THREAD = 8192;
// pieces: that the work can be divided into.
inline int threads_for(int64_t elements, int threads, int64_t pieces = INT64_MAX) {
    int64_t most = std::min(std::min<int64_t>(threads, pieces), elements / ELEMENTS_PER_THREAD);
    return static_cast<int>(std::max<int64_t>(most, 1));
}

// Call body(i) for every i below `count`, of `elements` in total: threads have equal shares.
template <class Body>
inline void for_shares(int64_t count, int64_t elements, int threads, Body&& body) {
    parallel(threads_for(elements, threads, count), [&](int thread, int num_threads) {
        Range mine = share_of(count, thread, num_threads);
        for (int64_t i = mine.begin; i < mine.end; i++) body(i);
    });
}
// The same where some take longer than others: threads claim one after the other.
template <class Body>
inline void for_claims(int64_t count, int threads, Body&& body) {
    std::atomic<int64_t> next{0};
    parallel(static_cast<int>(std::min<int64_t>(threads, count)), [&](int, int) {
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) body(i);
    });
}

// A thread's buffers, freed when it ends.
struct Scratch {
    void* buffer[8] = {};
    size_t capacity[8] = {};
    ~Scratch() {
        for (void* one : buffer) free(one);
    }
};

// A buffer of at least `bytes`, aligned to a cache line, kept by the calling thread between calls.
// `slot` distinguishes buffers that are used at the same time.
inline void* thread_scratch(size_t bytes, int slot = 0) {
    static thread_local Scratch own;
    if (own.capacity[slot] < bytes) {
        free(own.buffer[slot]);
        own.capacity[slot] = (bytes + 4095) / 4096 * 4096;
        own.buffer[slot] = aligned_alloc(64, own.capacity[slot]);
        if (own.buffer[slot] == nullptr) abort();
    }
    return own.buffer[slot];
}
