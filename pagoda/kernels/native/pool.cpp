// The kernels' thread pool. It grows to the largest number of threads requested and exists until the process ends.
//
// A thread that is waiting for a core does not delay the region: once the caller has finished its own share,
// it takes over the shares that have not started. A busy machine therefore costs the threads it takes away, and no more.
#include <pthread.h>

#include "parallel.h"

namespace {

constexpr int MAX_WORKERS = 511;
constexpr int64_t AWAKE_NS = 50000;  // how long a thread spins before it sleeps

// A value that one thread sets and another one waits for.
struct alignas(64) Signal {
    std::atomic<int> value{0};
    std::atomic<bool> asleep{false};
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

    void wait_for(int wanted) {
        int64_t until = now_ns() + AWAKE_NS;
        do {
            for (int i = 0; i < 64; i++) {
                if (value.load(std::memory_order_acquire) == wanted) return;
                spin_pause();
            }
        } while (now_ns() < until);
        pthread_mutex_lock(&mutex);
        // This thread announces that it sleeps before it reads the value again; set() writes the value before it checks for
        // sleepers. So at least one of them sees the other.
        asleep.store(true);
        while (value.load() != wanted) pthread_cond_wait(&changed, &mutex);
        asleep.store(false);
        pthread_mutex_unlock(&mutex);
    }
    void set(int to) {
        value.store(to);
        if (!asleep.load()) return;
        pthread_mutex_lock(&mutex);
        pthread_cond_signal(&changed);
        pthread_mutex_unlock(&mutex);
    }
};

enum Share { NONE, OFFERED, TAKEN };  // values of Pool::share
enum { RUNNING, FINISHED };           // values of Pool::state

struct Pool {
    pthread_mutex_t one_region_at_a_time = PTHREAD_MUTEX_INITIALIZER;
    int num_workers = 0;
    pthread_t threads[MAX_WORKERS];
    Signal share[MAX_WORKERS];
    Signal state;
    // The current region.
    void (*body)(void*, int, int) = nullptr;
    void* data = nullptr;
    int num_threads = 0;
    std::atomic<int> unfinished{0};
    std::atomic<int> test_delay{0};  // tests: pauses before the end of the last share is reported, as if its thread were descheduled
};

Pool* pool = nullptr;
thread_local bool inside_region = false;

struct Worker {
    Pool* pool;
    int index;
};

void* work(void* argument) {
    Worker me = *static_cast<Worker*>(argument);
    delete static_cast<Worker*>(argument);
    inside_region = true;
    Signal& share = me.pool->share[me.index];
    for (;;) {
        share.wait_for(OFFERED);
        int offered = OFFERED;
        if (!share.value.compare_exchange_strong(offered, TAKEN)) continue;
        me.pool->body(me.pool->data, me.index + 1, me.pool->num_threads);
        share.value.store(NONE);
        if (me.pool->unfinished.fetch_sub(1) != 1) continue;
        for (int wait = me.pool->test_delay.load(std::memory_order_relaxed); wait > 0; wait--) spin_pause();
        me.pool->state.set(FINISHED);
    }
    return nullptr;
}

// Start as many workers as possible; if the process may not start more threads, it computes with the existing ones.
int grow(Pool& p, int wanted) {
    while (p.num_workers < wanted && p.num_workers < MAX_WORKERS) {
        pthread_t& thread = p.threads[p.num_workers];
        auto* worker = new Worker{&p, p.num_workers};
        if (pthread_create(&thread, nullptr, work, worker) != 0) {
            delete worker;
            break;
        }
        pthread_detach(thread);
        p.num_workers++;
    }
    return p.num_workers < wanted ? p.num_workers : wanted;
}

// A forked child has none of the threads, so it starts a new pool.
void forget_pool() { pool = new Pool; }

__attribute__((constructor)) void make_pool() {
    pool = new Pool;
    pthread_atfork(nullptr, nullptr, forget_pool);
}

}  // namespace

void run_on_pool(void (*body)(void*, int, int), void* data, int threads) {
    if (inside_region) {
        body(data, 0, 1);
        return;
    }
    Pool& p = *pool;
    pthread_mutex_lock(&p.one_region_at_a_time);
    inside_region = true;
    int helpers = grow(p, threads - 1);
    p.body = body;
    p.data = data;
    p.num_threads = helpers + 1;
    p.unfinished.store(helpers);
    p.state.value.store(RUNNING);
    for (int i = 0; i < helpers; i++) p.share[i].set(OFFERED);
    body(data, 0, helpers + 1);
    int taken_back = 0;
    for (int i = 0; i < helpers; i++) {
        int offered = OFFERED;
        if (!p.share[i].value.compare_exchange_strong(offered, NONE)) continue;
        body(data, i + 1, helpers + 1);
        taken_back++;
    }
    // The thread that ends the last share signals it, and the caller waits for that signal even if the count is already
    // zero: a late signal must not end the next region before its shares are done.
    bool ended_here = helpers == 0 || (taken_back > 0 && p.unfinished.fetch_sub(taken_back) == taken_back);
    if (!ended_here) p.state.wait_for(FINISHED);
    inside_region = false;
    pthread_mutex_unlock(&p.one_region_at_a_time);
}

// Pin the worker of share `thread` (not 0, which is the caller) to these CPUs; return false if that is not possible.
PAGODA_EXPORT bool pagoda_pin_thread(int32_t thread, const int32_t* cpus, int32_t count) {
#if defined(__linux__)
    cpu_set_t wanted;
    CPU_ZERO(&wanted);
    for (int i = 0; i < count; i++)
        if (cpus[i] < CPU_SETSIZE) CPU_SET(cpus[i], &wanted);
    Pool& p = *pool;
    pthread_mutex_lock(&p.one_region_at_a_time);
    bool pinned =
        grow(p, thread) >= thread && pthread_setaffinity_np(p.threads[thread - 1], sizeof(wanted), &wanted) == 0;
    pthread_mutex_unlock(&p.one_region_at_a_time);
    return pinned;
#else
    (void)thread, (void)cpus, (void)count;
    return false;
#endif
}

// Mean nanoseconds of an empty region over `repeats` in a row: the cost of threads per op.
PAGODA_EXPORT double pagoda_empty_region_ns(int32_t threads, int32_t repeats) {
    auto nothing = [](int, int) {};
    int64_t begin = now_ns();
    for (int i = 0; i < repeats; i++) parallel(threads, nothing);
    return double(now_ns() - begin) / repeats;
}

// How many of `repeats` regions returned before all of their shares were done; 0 unless the pool is broken. Shares have
// varying lengths, and threads pause at random (`test_delay`), so that every order of events occurs.
PAGODA_EXPORT int64_t pagoda_unfinished_regions(int32_t threads, int64_t repeats, int32_t test_delay) {
    int64_t broken = 0;
    for (int64_t i = 0; i < repeats; i++) {
        std::atomic<int> done{0}, shares{1};
        pool->test_delay.store(i % 3 == 0 ? test_delay : 0, std::memory_order_relaxed);
        parallel(threads, [&](int thread, int count) {
            shares.store(count);
            for (int64_t left = i * 37 % 97 + thread * 50; left > 0; left--) spin_pause();
            done.fetch_add(1);
        });
        if (done.load() != shares.load()) broken++;
    }
    pool->test_delay.store(0);
    return broken;
}
