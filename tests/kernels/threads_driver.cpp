// What threads share, for ThreadSanitizer: the pool itself with several callers, the ops in which threads claim work from
// each other or finish each other's, and ranks, which are threads here, in one segment, or a segment for each stage and
// sockets in between. Exits with 0 where all results are right.
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <vector>

#include "../collectives/segment.h"
#include "parallel.h"
#include "simd.h"

namespace {

int failures = 0;

void expect(bool holds, const char* what) {
    if (holds) return;
    fprintf(stderr, "failed: %s\n", what);
    failures++;
}

Tensor rows(void* data, int64_t count, int64_t heads, int64_t dim, int32_t dtype = F32) {
    return {data, count, heads * dim, heads, dim, dtype, 0};
}

std::vector<float> drawn(int64_t count, uint32_t seed) {
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) {
        seed = seed * 1664525u + 1013904223u;
        value = static_cast<float>(seed >> 8) / (1 << 24) - 0.5f;
    }
    return values;
}

void* call_pool(void*) {
    for (int i = 0; i < 300; i++)
        if (pagoda_shares_done(3) != 7) return reinterpret_cast<void*>(1);
    return nullptr;
}

void pool() {
    for (int threads = 1; threads <= 7; threads++)
        for (int i = 0; i < 200; i++) expect(pagoda_shares_done(threads) == (uint64_t(1) << threads) - 1, "shares");
    for (int threads : {17, 18, 33, 63})  // a tree of shares, in turn with regions that most threads are not in
        for (int i = 0; i < 20; i++) {
            expect(pagoda_shares_done(threads) == (uint64_t(1) << threads) - 1, "shares in a tree");
            expect(pagoda_shares_done(1 + i % 5) == (uint64_t(1) << (1 + i % 5)) - 1, "shares of few threads");
        }
    for (int delay : {0, 100}) {
        expect(pagoda_unfinished_regions(3, 3000, delay) == 0, "a region ended before its shares");
        expect(pagoda_unfinished_regions(64, 100, delay) == 0, "a region of 64 threads ended before its shares");
    }
    pthread_t callers[3];
    for (pthread_t& caller : callers) pthread_create(&caller, nullptr, call_pool, nullptr);
    for (pthread_t& caller : callers) {
        void* failed = nullptr;
        pthread_join(caller, &failed);
        expect(failed == nullptr, "shares of several callers");
    }
    usleep(2000);  // the workers sleep, and are woken
    expect(pagoda_shares_done(4) == 15, "shares of threads that slept");
}

PackedLinear packed(std::vector<float>& panels, int64_t out_features, int64_t in_features, uint32_t seed) {
    std::vector<float> weight = drawn(out_features * in_features, seed);
    panels.resize(static_cast<size_t>((out_features + PANEL - 1) / PANEL * PANEL * in_features));
    PackedLinear packed{panels.data(), nullptr, out_features, in_features, KIND_F32, 0, nullptr, nullptr, 0, 0};
    pagoda_pack_words(&packed, weight.data(), 0, out_features, 3);
    return packed;
}

void packing() {
    constexpr int64_t OUT = 300, IN = 512, ROW_BYTES = IN / 32 * 18;
    std::vector<uint8_t> blocks(OUT * ROW_BYTES), codes(OUT * IN), scales(OUT * IN / 32 * 2);
    uint8_t last = 1;
    for (std::vector<uint8_t>* bytes : {&blocks, &codes, &scales})
        for (uint8_t& byte : *bytes) byte = last = static_cast<uint8_t>(last * 5 + 3);
    for (uint8_t& code : codes) code &= 15;
    PackedLinear weight{nullptr, nullptr, OUT, IN, KIND_Q4, 32, nullptr, nullptr, 1, 0};
    BlockRows piece{blocks.data(), ROW_BYTES, OUT, nullptr, BLOCK_Q4_0, 0, nullptr, 0};
    // Rows of words of 8 codes along the inputs, as compressed-tensors has them.
    std::vector<int32_t> groups(IN / 32);
    for (size_t group = 0; group < groups.size(); group++) groups[group] = static_cast<int32_t>(group);
    CodeMatrix words{codes.data(), IN / 2, 4, 1, 8, 0, 0}, scale{scales.data(), IN / 32 * 2, 2, 1, 1, 0, 0};
    CodeRows rows{words, scale, {}, groups.data(), nullptr, OUT, 0, 0, 0};
    enum Source { BLOCKS, ROWS, CODES };
    auto panels_of = [&](Source source, int32_t threads) {
        std::vector<uint8_t> panels(static_cast<size_t>(pagoda_linear_bytes(&weight)));
        weight.panels = panels.data();
        if (source == BLOCKS)
            pagoda_pack_blocks(&weight, &piece, threads);
        else if (source == ROWS)
            pagoda_pack_code_rows(&weight, &rows, threads);
        else
            pagoda_pack_codes(&weight, codes.data(), scales.data(), nullptr, threads);
        return panels;
    };
    for (Source source : {BLOCKS, ROWS, CODES})
        expect(panels_of(source, 3) == panels_of(source, 1), "packing on three threads");
}

// Rows that threads claim pieces of, and a few rows of a weight whose panels they divide along K.
void linear() {
    for (auto [rows_of_x, out, in] : {std::array<int64_t, 3>{200, 300, 96}, {5, 100, 2 * K_SEGMENT + 100}}) {
        std::vector<float> panels, x = drawn(rows_of_x * in, 1), one(static_cast<size_t>(rows_of_x * out)), many(one.size());
        PackedLinear weight = packed(panels, out, in, 2);
        LinearArgs args{rows(x.data(), rows_of_x, 1, in), &weight, rows(one.data(), rows_of_x, 1, out)};
        pagoda_linear(&args, 1);
        args.out.data = many.data();
        for (int32_t threads : {4, 64})
            for (int i = 0; i < 20; i++) {
                std::fill(many.begin(), many.end(), 0.0f);
                pagoda_linear(&args, threads);
                expect(one == many, "linear on several threads");
            }
    }
}

void moe() {
    constexpr int64_t EXPERTS = 6, TOP_K = 2, TOKENS = 300, HIDDEN = 64, INNER = 64;
    std::vector<std::vector<float>> panels(2 * EXPERTS);
    std::vector<PackedLinear> up, down;
    std::vector<const PackedLinear*> up_at, down_at;
    for (uint32_t e = 0; e < EXPERTS; e++) {
        up.push_back(packed(panels[e], 2 * INNER, HIDDEN, 10 + e));
        down.push_back(packed(panels[EXPERTS + e], HIDDEN, INNER, 20 + e));
    }
    for (int64_t e = 0; e < EXPERTS; e++) up_at.push_back(&up[e]), down_at.push_back(&down[e]);
    ExpertStack gate_up{up_at.data(), EXPERTS}, downs{down_at.data(), EXPERTS};
    std::vector<float> x = drawn(TOKENS * HIDDEN, 3), router = drawn(TOKENS * EXPERTS, 4), one(x.size()), many(x.size());
    std::vector<int64_t> experts(TOKENS * TOP_K);
    std::vector<float> weights(TOKENS * TOP_K);
    RouteArgs route{};
    route.router_logits = rows(router.data(), TOKENS, 1, EXPERTS);
    route.top_k = TOP_K;
    route.renormalize = 1;
    route.factor = 1.0f;
    route.experts = rows(experts.data(), TOKENS, 1, TOP_K, I64);
    route.weights = rows(weights.data(), TOKENS, 1, TOP_K);
    MoeArgs args{};
    args.x = rows(x.data(), TOKENS, 1, HIDDEN);
    args.experts = route.experts;
    args.weights = route.weights;
    args.gate_up = &gate_up;
    args.down = &downs;
    args.activation = ACTIVATION_SILU;
    args.out = rows(one.data(), TOKENS, 1, HIDDEN);
    pagoda_route(&route, 1);
    pagoda_moe(&args, 1);
    args.out.data = many.data();
    for (int i = 0; i < 5; i++) pagoda_route(&route, 4), pagoda_moe(&args, 4);
    expect(one == many, "moe on four threads");
}

// Two rows: a decode over a long context, whose segments threads share out and fold, and a prefill.
void attention() {
    constexpr int64_t BLOCK = 16, BLOCKS = 80, DIM = 32, LENGTH = 1100, TOKENS = 41;
    std::vector<float> k = drawn(BLOCKS * 2 * BLOCK * DIM, 5), v = drawn(BLOCKS * 2 * BLOCK * DIM, 6);
    std::vector<float> q = drawn(TOKENS * 4 * DIM, 7), one(q.size()), many(q.size());
    std::vector<int32_t> table(2 * 70);
    for (int32_t i = 0; i < 70; i++) table[i] = i + 1, table[70 + i] = i % 5 + 72;
    int32_t starts[] = {0, 1, TOKENS}, lengths[] = {LENGTH, 40};
    RowGroup group{starts, lengths, table.data(), nullptr, nullptr, 70, 70, BLOCK, 2, 0};
    constexpr int64_t STRIDE = 2 * BLOCK * DIM;
    KVPages pages{k.data(), v.data(), nullptr, nullptr, STRIDE, STRIDE, 0, BLOCKS, 2, BLOCK, DIM, DIM, F32, 0};
    AttentionArgs args{};
    args.q = rows(q.data(), TOKENS, 4, DIM), args.out = rows(one.data(), TOKENS, 1, 4 * DIM);
    args.cache = pages, args.metadata = &group, args.scale = 0.2f;
    pagoda_attention(&args, 1);
    args.out.data = many.data();
    for (int i = 0; i < 20; i++) pagoda_attention(&args, 4);
    expect(one == many, "attention on four threads");
    args.q.rows = 1, group.num_rows = 1;  // the decode alone: its segments are all there is
    for (int i = 0; i < 50; i++) pagoda_attention(&args, 4);
    expect(one == many, "attention by segments on four threads");
}

constexpr int64_t WIDTH = 5000, CALLS = 200;  // rows large enough that each of three ranks sums a share

std::atomic<int32_t> ranks_done{0};

struct Rank {
    RankState state;
    pthread_t thread;
    int64_t wrong;
};

void* compute_with_others(void* argument) {
    Rank& me = *static_cast<Rank*>(argument);
    int64_t size = me.state.size, rank = me.state.number % size, stage = me.state.number / size;
    std::vector<float> x(2 * WIDTH), sum(2 * WIDTH), all(2 * WIDTH * 3), message(WIDTH);
    for (int64_t call = 0; call < CALLS; call++) {
        for (float& value : x) value = static_cast<float>(rank + call);
        AllReduceArgs reduce{rows(x.data(), 2, 1, WIDTH), &me.state, rows(sum.data(), 2, 1, WIDTH)};
        pagoda_all_reduce(&reduce, 1);
        me.wrong += sum[call] != static_cast<float>(size * call + size * (size - 1) / 2);
        AllGatherArgs gather{rows(x.data(), 2, 1, WIDTH), int32_t(WIDTH * size), &me.state, rows(all.data(), 2, 1, WIDTH * size)};
        pagoda_all_gather(&gather, 1);
        for (int64_t of = 0; of < size; of++) me.wrong += all[WIDTH * of + call] != static_cast<float>(of + call);
        if (stage == 1) pagoda_receive(&me.state, message.data(), WIDTH * 4);
        if (stage == 1) me.wrong += message[call] != static_cast<float>(rank + call);
        if (stage == 0) pagoda_send(&me.state, x.data(), WIDTH * 4);
    }
    ranks_done++;
    while (stage == 0 && me.state.failed == RANKS_NOTHING) pagoda_send(&me.state, x.data(), WIDTH * 4);  // until nothing fits
    return nullptr;
}

void* new_segment(int32_t num_ranks) {
    RankSegment sizes{num_ranks, 16384, 4096, 8, 0};
    auto bytes = static_cast<size_t>(pagoda_rank_segment_bytes(&sizes));
    void* segment = aligned_alloc(4096, bytes);
    memset(segment, 0, bytes);
    memcpy(segment, &sizes, sizeof(sizes));
    return segment;
}

// Two stages. The first one sends until a rank fails, or the second one's socket is closed.
void ranks(int32_t size, bool have_sockets) {
    void* segments[2] = {new_segment(2 * size), have_sockets ? new_segment(2 * size) : nullptr};
    if (!have_sockets) segments[1] = segments[0];
    std::vector<int> sockets(static_cast<size_t>(2 * size), 0);
    for (int32_t rank = 0; rank < size && have_sockets; rank++) {
        int ends[2];
        expect(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0, "socketpair");
        sockets[static_cast<size_t>(rank)] = ends[0], sockets[static_cast<size_t>(size + rank)] = ends[1];
    }
    std::vector<Rank> all(static_cast<size_t>(2 * size));
    for (int32_t number = 0; number < 2 * size; number++) {
        Rank& rank = all[static_cast<size_t>(number)];
        rank = {};
        rank.state.segment = segments[number / size], rank.state.number = number, rank.state.size = size;
        rank.state.first = number / size * size, rank.state.deadline_ns = int64_t(60) * 1000000000;
        (number < size ? rank.state.next : rank.state.previous) = sockets[static_cast<size_t>(number)];
        pagoda_join_ranks(&rank.state);
        pthread_create(&rank.thread, nullptr, compute_with_others, &rank);
    }
    while (ranks_done.load() < 2 * size) usleep(1000);
    ranks_done.store(0);
    usleep(10000);  // the first stage waits, as there is no more room
    if (!have_sockets) collectives::segment_of(all[0].state).failed() = 1;
    for (int32_t rank = 0; rank < size && have_sockets; rank++) close(sockets[static_cast<size_t>(size + rank)]);
    for (Rank& rank : all) {
        pthread_join(rank.thread, nullptr);
        expect(rank.wrong == 0, have_sockets ? "stages with sockets" : "ranks in one segment");
    }
    for (int32_t rank = 0; rank < size && have_sockets; rank++) close(sockets[static_cast<size_t>(rank)]);
    free(segments[0]);
    if (have_sockets) free(segments[1]);
}

}  // namespace

int main() {
    pool();
    packing();
    linear();
    moe();
    attention();
    for (int32_t size = 1; size <= 3; size++) ranks(size, false), ranks(size, true);
    if (failures == 0) puts("threads: all results are right");
    return failures;
}

