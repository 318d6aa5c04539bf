// The kernels' thread pool. It grows to the largest number of threads requested and exists until the process ends.
//
// One word begins a region for all threads, and a tree ends it: a share ends when its children have ended, share 0, the
// caller's, last. A thread that is waiting for a core does not delay the region: once a thread has finished its own share,
// it takes over its children that have not begun, with all that is below them. A busy machine therefore costs the threads
// it takes away, and no more.
#include <pthread.h>
#if defined(__linux__)
#include <sched.h>
#endif
#include <unistd.h>

#include <algorithm>

#include "parallel.h"

namespace {

constexpr int MAX_THREADS = 512;
constexpr int CHILDREN = 16;  // of a share, in the tree: up to 17 threads it is flat, 64 have three below each of 16
// How long a thread spins before it sleeps, per thread of its region that has a core: about as long as waking them takes.
// So the threads of a large region stay awake between the steps of a server, and those of a small one do not.
constexpr int64_t AWAKE_NS = 50000, MOST_AWAKE_NS = 2000000;

// Where one thread waits: it spins, then sleeps until it is woken.
struct alignas(64) Waiting {
    std::atomic<bool> asleep{false};
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

    template <class Ready>
    void wait(int64_t awake_ns, Ready&& ready) {
        if (ready()) return;
        int64_t until = now_ns() + awake_ns;
        do {
            for (int i = 0; i < 64; i++) {
                spin_pause();
                if (ready()) return;
            }
        } while (now_ns() < until);
        pthread_mutex_lock(&mutex);
        // This thread announces that it sleeps before it looks again; what it waits for is written before wake() checks
        // for sleepers. So at least one of them sees the other.
        asleep.store(true);
        while (!ready()) pthread_cond_wait(&changed, &mutex);
        asleep.store(false);
        pthread_mutex_unlock(&mutex);
    }
    bool wake() {
        if (!asleep.load()) return false;
        pthread_mutex_lock(&mutex);
        pthread_cond_signal(&changed);
        pthread_mutex_unlock(&mutex);
        return true;
    }
};

// A share of every region. begun: the last region in which it was; ended: in which its own thread has computed it, and all
// below it were done.
struct alignas(64) Share {
    std::atomic<uint64_t> begun{0}, ended{0};
    Waiting region;    // its own thread, for the next region
    Waiting children;  // the thread that computes it, for its children

    // Return whether the calling thread is the first to begin it.
    bool begin(uint64_t number) {
        uint64_t last = begun.load();
        return last < number && begun.compare_exchange_strong(last, number);
    }
};

// The number of a region and of its threads, in one word: a thread that comes late never joins a later region by mistake.
struct Region {
    uint64_t word;
    static Region of(uint64_t number, int threads) { return {number * (2 * MAX_THREADS) + static_cast<uint64_t>(threads)}; }
    uint64_t number() const { return word / (2 * MAX_THREADS); }
    int threads() const { return static_cast<int>(word % (2 * MAX_THREADS)); }
};

struct Pool {
    pthread_mutex_t one_region_at_a_time = PTHREAD_MUTEX_INITIALIZER;
    int num_workers = 0;
    int num_cpus = 1;
    pthread_t threads[MAX_THREADS];
    Share shares[MAX_THREADS];
    // The current region. body and data: valid for a thread that has begun one of its shares.
    alignas(64) std::atomic<uint64_t> region{0};
    void (*body)(void*, int, int) = nullptr;
    void* data = nullptr;
    // What pagoda_pool_counts() returns.
    alignas(64) std::atomic<int64_t> num_regions{0}, num_shares{0}, num_wakes{0}, num_taken_over{0};
    std::atomic<int> test_delay{0};  // tests: pauses before the end of a share is reported, as if its thread were descheduled

    int64_t awake_ns(int of_threads) const {
        return std::min(MOST_AWAKE_NS, AWAKE_NS * std::max(1, std::min(of_threads, num_cpus) - 1));
    }
};

Pool* pool = nullptr;
thread_local bool inside_region = false;

// Compute a share and wait for all below it, which are then done, too.
void compute(Pool& p, Region region, int share) {
    int first = share * CHILDREN + 1, end = std::min(first + CHILDREN, region.threads());
    for (int child = first; child < end; child++)
        if (p.shares[child].region.wake()) p.num_wakes.fetch_add(1, std::memory_order_relaxed);
    p.body(p.data, share, region.threads());
    bool is_mine[CHILDREN];
    for (int child = first; child < end; child++) {
        is_mine[child - first] = p.shares[child].begin(region.number());
        if (!is_mine[child - first]) continue;
        p.num_taken_over.fetch_add(1, std::memory_order_relaxed);
        compute(p, region, child);
    }
    for (int child = first; child < end; child++) {
        auto has_ended = [&] { return p.shares[child].ended.load() == region.number(); };
        if (!is_mine[child - first]) p.shares[share].children.wait(p.awake_ns(region.threads()), has_ended);
    }
}

struct Worker {
    Pool* pool;
    int share;
};

void* work(void* argument) {
    auto [pool, share] = *static_cast<Worker*>(argument);
    delete static_cast<Worker*>(argument);
    inside_region = true;
    Share& own = pool->shares[share];
    Region region{0};
    for (;;) {
        uint64_t last = region.word;
        // A thread that is not in the current region stays awake, but nobody wakes it.
        auto has_next = [&] {
            region.word = pool->region.load();
            return region.word != last && (!own.region.asleep.load(std::memory_order_relaxed) || share < region.threads());
        };
        own.region.wait(pool->awake_ns(std::max(region.threads(), share + 1)), has_next);
        if (share >= region.threads() || !own.begin(region.number())) continue;
        compute(*pool, region, share);
        for (int wait = pool->test_delay.load(std::memory_order_relaxed); wait > 0; wait--) spin_pause();
        own.ended.store(region.number());
        pool->shares[(share - 1) / CHILDREN].children.wake();
    }
    return nullptr;
}

// Start as many workers as possible; if the process may not start more threads, it computes with the existing ones.
int grow(Pool& p, int wanted) {
    while (p.num_workers < wanted && p.num_workers < MAX_THREADS - 1) {
        pthread_t& thread = p.threads[p.num_workers];
        auto* worker = new Worker{&p, p.num_workers + 1};
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
void make_pool() {
    pool = new Pool;
    pool->num_cpus = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
#if defined(__linux__)
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof(allowed), &allowed) == 0) pool->num_cpus = CPU_COUNT(&allowed);
#endif
}

__attribute__((constructor)) void make_first_pool() {
    make_pool();
    pthread_atfork(nullptr, nullptr, make_pool);
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
    threads = grow(p, threads - 1) + 1;
    p.body = body;
    p.data = data;
    p.num_regions.store(p.num_regions.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    p.num_shares.store(p.num_shares.load(std::memory_order_relaxed) + threads, std::memory_order_relaxed);
    Region region = Region::of(Region{p.region.load()}.number() + 1, threads);
    p.region.store(region.word);
    compute(p, region, 0);
    inside_region = false;
    pthread_mutex_unlock(&p.one_region_at_a_time);
}

// Since the library was loaded: regions, their shares, threads that were woken for one, and shares that another thread
// took over.
PAGODA_EXPORT void pagoda_pool_counts(int64_t* counts) {
    Pool& p = *pool;
    for (std::atomic<int64_t>* count : {&p.num_regions, &p.num_shares, &p.num_wakes, &p.num_taken_over})
        *counts++ = count->load(std::memory_order_relaxed);
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
