// The linear layer: tiles, their distribution over threads, and the epilogue. Its definition is reference.py.
#include "gemm.h"

#include "../activation/gates.h"
#include "float_tiles.h"
#include "k_tiles.h"
#include "operand.h"

namespace {

constexpr int MAX_TILE_ROWS = 6;
constexpr int MAX_TILE_PANELS = 4;
// With at least this many rows, threads claim pieces instead of taking equal shares: a thread that is descheduled briefly
// then costs little. With fewer, a weight is read once, and one long stream per thread is faster.
constexpr int64_t CLAIM_ROWS = 16;
constexpr int64_t CLAIMS_PER_THREAD = 8;
// Rows of x that are multiplied with one panel before the next; they stay in the L2 cache.
constexpr int64_t BLOCK_BYTES = 256 * 1024;
// At most so many panels are multiplied by a segment before the next, because all their sums are kept.
constexpr int64_t MOST_PANELS_OF_SEGMENT = 32;
constexpr int CONVERTED_SCRATCH = 3, SUMS_SCRATCH = 4, CODES_SCRATCH = 5, SHARED_SCRATCH = 6;
// With at least this many rows, the codes of a panel with integer scales are unpacked to bytes once for all tiles.
constexpr int64_t UNPACK_ROWS = WITHOUT_VNNI ? 16 : 32;

// ---- one tile ----

// Rows of x from `row` on, and elements [k, k_end) along K: a segment, or of quantised weights all. adds: to the sums of
// the segments before.
struct TileJob {
    const PackedLinear& w;
    const Operand& x;
    int64_t row, k, k_end;
    bool adds;
    const uint8_t* unpacked = nullptr;  // the codes of the panel, where `int_tiles` has UNPACKED
};

using Tile = void (*)(const TileJob& job, const char* panel, int64_t panel_stride, float* out, Prefetch prefetch);

template <class Step, int ROWS, int PANELS>
void run_float_tile(const TileJob& job, const char* panel, int64_t panel_stride, float* out, Prefetch prefetch) {
    using Weight = typename Step::Weight;
    const auto* x = static_cast<const typename Step::Word*>(job.x.words);
    float_tile<Step, ROWS, PANELS>(x + job.row * job.x.stride + words_of(job.w, job.k), job.x.stride,
                                   reinterpret_cast<const Weight*>(panel),
                                   panel_stride / static_cast<int64_t>(sizeof(Weight)),
                                   word_steps(job.w, job.k_end - job.k), out, job.adds, prefetch);
}
template <int32_t KIND, int GROUP, bool UNPACKED, int ROWS, int PANELS>
void run_int_tile(const TileJob& job, const char* panel, int64_t panel_stride, float* out, Prefetch prefetch) {
    constexpr int SIZE = x_group(WEIGHT_FORMS[KIND], GROUP), SUMS = sums_of_x_group(WEIGHT_FORMS[KIND], GROUP);
    int64_t groups = groups_of(job.w), count = (job.k_end - job.k + GROUP - 1) / GROUP;
    int64_t at = job.row * x_groups_of(job.w) + job.k / SIZE;
    const QuantizedRows& x = job.x.quantized;
    int_tile<KIND, GROUP, ROWS, PANELS, UNPACKED>({x.bytes + at * SIZE, x.scales + at, x.sums + at * SUMS}, groups,
                                                  count, reinterpret_cast<const uint8_t*>(panel), panel_stride,
                                                  job.unpacked, out, prefetch);
}

// Tiles of every height, as wide (1, 2 or 4 panels) as the registers allow.
struct Tiles {
    Tile narrow[6], wide[6], widest[3];  // 1, 2, 4 panels, by rows - 1; null if they need too many registers
    // The widest tile for `rows` rows.
    int panels(int64_t rows) const {
        if (rows <= 3 && widest[rows - 1] != nullptr) return 4;
        return wide[rows - 1] != nullptr ? 2 : 1;
    }
    Tile of(int64_t rows, int panels) const {
        return panels == 4 ? widest[rows - 1] : panels == 2 ? wide[rows - 1] : narrow[rows - 1];
    }
};

template <class Step>
constexpr Tiles float_tiles() {
    if constexpr (MANY_REGISTERS)
        return {{run_float_tile<Step, 1, 1>, run_float_tile<Step, 2, 1>, run_float_tile<Step, 3, 1>,
                 run_float_tile<Step, 4, 1>, run_float_tile<Step, 5, 1>, run_float_tile<Step, 6, 1>},
                {run_float_tile<Step, 1, 2>, run_float_tile<Step, 2, 2>, run_float_tile<Step, 3, 2>,
                 run_float_tile<Step, 4, 2>, run_float_tile<Step, 5, 2>, run_float_tile<Step, 6, 2>},
                {run_float_tile<Step, 1, 4>, run_float_tile<Step, 2, 4>, run_float_tile<Step, 3, 4>}};
    else
        return {{run_float_tile<Step, 1, 1>, run_float_tile<Step, 2, 1>, run_float_tile<Step, 3, 1>,
                 run_float_tile<Step, 4, 1>, run_float_tile<Step, 5, 1>, run_float_tile<Step, 6, 1>},
                {},
                {}};
}
// Of codes that take long to unpack, a core keeps too few reads under way: tiles of one panel prefetch the next.
constexpr bool reads_ahead(int32_t kind) { return WEIGHT_FORMS[kind].bits >= 4 && WEIGHT_FORMS[kind].bits <= 6; }

template <int32_t KIND, int GROUP, bool UNPACKED>
constexpr Tiles int_tiles() {
    Tiles tiles{{run_int_tile<KIND, GROUP, UNPACKED, 1, 1>, run_int_tile<KIND, GROUP, UNPACKED, 2, 1>,
                 run_int_tile<KIND, GROUP, UNPACKED, 3, 1>, run_int_tile<KIND, GROUP, UNPACKED, 4, 1>,
                 run_int_tile<KIND, GROUP, UNPACKED, 5, 1>, run_int_tile<KIND, GROUP, UNPACKED, 6, 1>},
                {},
                {}};
    if constexpr (MANY_REGISTERS && !reads_ahead(KIND)) {
        tiles.wide[0] = run_int_tile<KIND, GROUP, UNPACKED, 1, 2>;
        tiles.wide[1] = run_int_tile<KIND, GROUP, UNPACKED, 2, 2>;
        tiles.wide[2] = run_int_tile<KIND, GROUP, UNPACKED, 3, 2>;
        tiles.widest[0] = run_int_tile<KIND, GROUP, UNPACKED, 1, 4>;
    }
    return tiles;
}

// How a weight is multiplied. unpack: how its panels are unpacked for UNPACK_ROWS rows, which `of_unpacked` multiply
// then; null for never.
struct Kernels {
    Tiles tiles, of_unpacked;
    void (*unpack)(const uint8_t* panel, int64_t groups, uint8_t* to);
};

const Kernels& kernels_of(const PackedLinear& w) {
    static const Kernels f32{float_tiles<StepF32>(), {}, nullptr}, bf16{float_tiles<StepBF16>(), {}, nullptr},
        f16{float_tiles<StepF16>(), {}, nullptr};
    switch (w.kind) {
        case KIND_F32: return f32;
        case KIND_BF16: return bf16;
        case KIND_F16: return f16;
        default: break;
    }
    const Kernels* found = nullptr;
    with_code_group(w, [&](auto at) {
        constexpr int32_t KIND = CODE_GROUPS[at].kind, GROUP = CODE_GROUPS[at].size;
        static const Kernels kernels = [] {
            if constexpr (WEIGHT_FORMS[KIND].sub_group != 0)
                return Kernels{int_tiles<KIND, GROUP, false>(), int_tiles<KIND, GROUP, true>(), unpack_panel<KIND>};
            else
                return Kernels{int_tiles<KIND, GROUP, false>(), {}, nullptr};
        }();
        found = &kernels;
    });
    return *found;
}

// ---- epilogue: from sums to the output ----

// A tile of the output that is summed: rows of sums, `stride` apart, for `columns` columns from `column` on. `up`: with a
// gate, those of their partners.
struct Summed {
    const float *sums, *up;
    int64_t stride, row, rows, column, columns;
};

inline f32x16 with_bias(const float* sums, const float* bias, int64_t column) {
    return bias == nullptr ? load(sums) : load(sums) + load(bias + column);
}
inline f32x16 activated(int32_t gate, f32x16 x) {
    return gate == GATE_SILU ? Silu::of(x) : gate == GATE_GELU ? Gelu::of(x) : GeluTanh::of(x);
}

// value(i, column): of the tile's sums from index i on.
template <class Out, class Value>
void write_out(const LinearJob& job, const Summed& tile, Value&& value) {
    for (int64_t r = 0; r < tile.rows; r++) {
        Out* out = static_cast<Out*>(job.out) + (tile.row + r) * job.out_stride + tile.column;
        for_lanes(tile.columns, [&](int64_t i, int n) {
            store_lanes(out + i, value(r * tile.stride + i, tile.column + i), n);
        });
    }
}
template <class Out>
void finish(const LinearJob& job, const Summed& tile) {
    const float* bias = job.weight->bias;
    int64_t partner = job.weight->out_features / 2;
    auto sum = [&](int64_t at, int64_t column) { return with_bias(tile.sums + at, bias, column); };
    if (job.gate != GATE_NONE)
        write_out<Out>(job, tile, [&](int64_t at, int64_t column) {
            f32x16 up = with_bias(tile.up + at, bias, partner + column);
            return activated(job.gate, rounded<Out>(sum(at, column))) * rounded<Out>(up);
        });
    else if (job.gelu)
        write_out<Out>(job, tile, [&](int64_t at, int64_t column) { return Gelu::of(rounded<Out>(sum(at, column))); });
    else
        write_out<Out>(job, tile, sum);
}

// ---- a rectangle of the output ----

// Rows [row, row_end) of panels [panel, panel_end), with a gate of their partners too. next_panel: the one that this
// thread will probably multiply next, or -1.
void multiply(const LinearJob& job, const Operand& x, int64_t row, int64_t row_end, int64_t panel, int64_t panel_end,
              int64_t next_panel) {
    const PackedLinear& w = *job.weight;
    const Kernels& kernels = kernels_of(w);
    bool gated = job.gate != GATE_NONE, in_segments = elements_at_once(w) < w.in_features;
    bool unpacks = kernels.unpack != nullptr && row_end - row >= UNPACK_ROWS;
    const Tiles& tiles = unpacks ? kernels.of_unpacked : kernels.tiles;
    int64_t bytes = panel_bytes(w), partner = w.out_features / 2 / PANEL * bytes;
    int64_t count = (row_end - row + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS;  // tiles along the rows, of nearly equal height
    int64_t most_rows = (row_end - row + count - 1) / count;
    int most = gated ? 1 : tiles.panels(most_rows);
    // A gate and its partner are two calls of narrow tiles, or one of a wide one.
    int64_t calls = gated && tiles.panels(most_rows) == 1 ? 2 * count : count;
    const char* panels = static_cast<const char*>(w.panels);
    // The sums of a tile; where there are several segments, of all tiles.
    alignas(64) float of_tile[MAX_TILE_ROWS * MAX_TILE_PANELS * PANEL];
    int64_t height = row_end - row, sides = gated ? 2 : 1;
    size_t kept = sizeof(float) * static_cast<size_t>(height * (panel_end - panel) * sides * PANEL);
    size_t codes = unpacks ? static_cast<size_t>(groups_of(w) * w.group * PANEL) : 0;
    auto* unpacked = unpacks ? static_cast<uint8_t*>(thread_scratch(codes * sides, CODES_SCRATCH)) : nullptr;
    float* all_sums = in_segments ? static_cast<float*>(thread_scratch(kept, SUMS_SCRATCH)) : nullptr;
    for (int64_t k = 0, k_end; k < w.in_features; k = k_end) {
        k_end = std::min(w.in_features, k + elements_at_once(w));
        int64_t steps = tile_steps(w, most_rows, k_end - k);
        for (int64_t at = panel, width = most; at < panel_end; at += width) {
            while (width > panel_end - at) width /= 2;
            // Together, the calls prefetch once everything that the next ones read, and each step as much as any other:
            // the weights arrive while the tiles compute.
            bool ends_segment = at + width >= panel_end, ends = ends_segment && k_end == w.in_features;
            int64_t next = ends ? next_panel : ends_segment ? panel : at + width;
            int64_t next_k = ends ? 0 : ends_segment ? k_end : k;
            const char* first = panels + at * bytes + panel_bytes(w, k);
            const char* upcoming = panels + next * bytes + panel_bytes(w, next_k);
            int64_t next_count = std::min(w.in_features - next_k, elements_at_once(w));
            int64_t each = (in_segments ? 1 : width) * panel_bytes(w, next_count) / (calls * steps) + 1;
            int64_t second = gated ? partner : in_segments && width > 1 ? bytes : each > 64 ? 64 : 0;
            // With AVX-512, a single tile already reads other weights at the speed of memory: nothing to gain.
            bool prefetches = next >= 0 && (count > 1 || !MANY_REGISTERS || reads_ahead(w.kind));
            for (int64_t side = 0; unpacks && side < sides; side++)
                kernels.unpack(reinterpret_cast<const uint8_t*>(first + side * partner), groups_of(w),
                               unpacked + side * codes);
            for (int64_t i = 0; i < count; i++) {
                int64_t begin = row + (row_end - row) * i / count;
                int64_t rows = row + (row_end - row) * (i + 1) / count - begin;
                float* sums = of_tile;
                if (in_segments) sums = all_sums + ((at - panel) * height + (begin - row) * width) * sides * PANEL;
                bool apart = gated && tiles.panels(rows) == 1;  // the gate and its partner
                int64_t stride = (apart ? 1 : width * sides) * PANEL;
                float* up = sums + (apart ? rows : 1) * PANEL;
                auto run = [&](const char* from, int64_t apart_by, float* to, int64_t call) {
                    Prefetch prefetch{first, 0, 0};
                    if (prefetches) prefetch = {upcoming + call * steps * each, each, second};
                    Tile tile = tiles.of(rows, static_cast<int>(stride / PANEL));
                    const uint8_t* bytes_of = from == first ? unpacked : unpacked + codes;
                    tile({w, x, begin, k, k_end, k > 0, bytes_of}, from, apart_by, to, prefetch);
                };
                if (!apart) {
                    run(first, gated ? partner : bytes, sums, i);
                } else {
                    run(first, 0, sums, 2 * i);
                    run(first + partner, 0, up, 2 * i + 1);
                }
                if (k_end < w.in_features) continue;
                int64_t columns = std::min(w.out_features - at * PANEL, width * PANEL);
                Summed summed{sums, up, stride, begin, rows, at * PANEL, columns};
                by_dtype(job.out_dtype, [&](auto element) { finish<decltype(element)>(job, summed); });
            }
        }
    }
}

// ---- few rows: each thread has its part of the plan ----

// Where threads leave the sums of panels that they share, [panels][segments][1 or 2 sides][rows][PANEL]: each segment's apart,
// until they are added in order.
struct SharedSums {
    std::atomic<int64_t>* done;  // [panels]: segments
    float* sums;
};

// Compute segments [begin, end) of a panel, with a gate of its partner too; add up all that the panel has if these are the
// last ones.
void multiply_segments(const LinearJob& job, const LinearPlan& plan, int64_t panel, int64_t begin, int64_t end,
                       const SharedSums& shared) {
    const PackedLinear& w = *job.weight;
    const Tiles& tiles = kernels_of(w).tiles;
    Operand x = operand(job);
    int64_t sides = job.gate != GATE_NONE ? 2 : 1, partner = w.out_features / 2 / PANEL;
    int64_t side_size = job.rows * PANEL, size = sides * side_size;
    float* of_panel = shared.sums + panel * plan.segments * size;
    for (int64_t segment = begin; segment < end; segment++) {
        int64_t k = segment * K_SEGMENT, k_end = std::min(w.in_features, k + K_SEGMENT);
        for (int64_t side = 0; side < sides; side++) {
            int64_t at = (panel + side * partner) * panel_bytes(w) + panel_bytes(w, k);
            const char* from = static_cast<const char*>(w.panels) + at;
            float* sums = of_panel + segment * size + side * side_size;
            for (int64_t row = 0, rows; row < job.rows; row += rows) {
                rows = std::min<int64_t>(job.rows - row, MAX_TILE_ROWS);
                tiles.of(rows, 1)({w, x, row, k, k_end, false}, from, 0, sums + row * PANEL, {from, 0, 0});
            }
        }
    }
    if (shared.done[panel].fetch_add(end - begin) + end - begin < plan.segments) return;
    for (int64_t segment = 1; segment < plan.segments; segment++)
        for (int64_t i = 0; i < size; i += 16) store_sum(of_panel + i, load(of_panel + segment * size + i), true);
    Summed summed{of_panel, of_panel + side_size, PANEL, 0, job.rows, panel * PANEL,
                  std::min<int64_t>(w.out_features - panel * PANEL, PANEL)};
    by_dtype(job.out_dtype, [&](auto element) { finish<decltype(element)>(job, summed); });
}

void multiply_part(const LinearJob& job, const LinearPlan& plan, int thread, const SharedSums& shared) {
    Range mine = plan.part(thread);
    for (int64_t at = mine.begin, end; at < mine.end; at = end) {
        int64_t panel = at / plan.segments, begin = at % plan.segments;
        bool is_whole = begin == 0 && at + plan.segments <= mine.end;
        end = is_whole ? mine.end / plan.segments * plan.segments : std::min(mine.end, at - begin + plan.segments);
        if (is_whole)
            linear_multiply_part(job, 0, job.rows, panel, end / plan.segments);
        else
            multiply_segments(job, plan, panel, begin, begin + end - at, shared);
    }
}

void multiply_few_rows(const LinearJob& job, int threads) {
    LinearPlan plan = plan_of(*job.weight, job.gate != GATE_NONE, threads);
    SharedSums shared{};
    if (plan.segments > 1) {
        int64_t counts = round_up(plan.panels * static_cast<int64_t>(sizeof(*shared.done)), 64);
        int64_t sums = plan.panels * plan.segments * (job.gate != GATE_NONE ? 2 : 1) * job.rows * PANEL * 4;
        auto* memory = static_cast<char*>(thread_scratch(static_cast<size_t>(counts + sums), SHARED_SCRATCH));
        memset(memory, 0, static_cast<size_t>(counts));
        shared = {reinterpret_cast<std::atomic<int64_t>*>(memory), reinterpret_cast<float*>(memory + counts)};
    }
    parallel(plan.threads, [&](int thread, int count) {
        for (; thread < plan.threads; thread += count) multiply_part(job, plan, thread, shared);
    });
}

// ---- many rows: threads claim pieces ----

// Panels that `multiply` may be given at once. A single tile reads its panels to their ends: one stream.
int64_t most_panels(const LinearJob& job, int64_t rows) {
    if (elements_at_once(*job.weight) == job.weight->in_features) return INT64_MAX / 2;
    return rows > MAX_TILE_ROWS ? MOST_PANELS_OF_SEGMENT : job.gate != GATE_NONE ? 1 : MAX_TILE_PANELS;
}

// What a thread has claimed of its own pieces, or others have of them.
struct alignas(64) Claims {
    std::atomic<int64_t> next{0};
};

// What a thread claims: one of `blocks` blocks of rows, times `width` panels.
struct Split {
    int64_t blocks, width;
};

// The division that finishes first on `threads` equally fast threads: the busiest one has the fewest rows x panels.
// Among divisions within 2 % of the best, the coarsest, which reads weights and rows least often.
Split split_work(const LinearJob& job, int64_t panels, int threads) {
    int64_t least = (job.rows * row_bytes(*job.weight) + BLOCK_BYTES - 1) / BLOCK_BYTES, most = job.rows / CLAIM_ROWS;
    if (least > most) least = most;
    Split best{};
    int64_t best_cost = INT64_MAX / 50;
    for (int64_t blocks = least; blocks <= most && blocks < least + 4; blocks++) {
        int64_t pieces = (CLAIMS_PER_THREAD * threads + blocks - 1) / blocks;
        int64_t widest = (panels / pieces + 1) / 2 * 2;
        widest = std::min(widest, most_panels(job, job.rows));
        for (int64_t width = widest > 2 ? widest : 2; width > 0; width = width > 2 ? width - 2 : width - 1) {
            int64_t claims = (blocks * ((panels + width - 1) / width) + threads - 1) / threads;
            int64_t cost = claims * ((job.rows + blocks - 1) / blocks) * width;
            if (cost * 50 >= best_cost * 49) continue;
            best = {blocks, width};
            best_cost = cost;
        }
    }
    return best;
}

// Each thread claims the pieces of its own panels first, which it has in its caches and in memory near it, then of others.
void multiply_claims(const LinearJob& job, int thread, int num_threads, Claims* claims) {
    Operand x = operand(job);
    int64_t panels = linear_panels(job);
    auto [blocks, width] = split_work(job, panels, num_threads);
    int64_t pieces = (panels + width - 1) / width;
    for (int i = 0; i < num_threads; i++) {
        int owner = (thread + i) % num_threads;
        Range own = share_of(pieces, owner, num_threads);
        int64_t columns = own.end - own.begin, count = blocks * columns;
        std::atomic<int64_t>& next = claims[owner].next;
        while (next.load(std::memory_order_relaxed) < count) {
            int64_t claim = next.fetch_add(1, std::memory_order_relaxed);
            if (claim >= count) break;
            int64_t block = claim / columns, panel = (own.begin + claim % columns) * width;
            int64_t next_panel = claim + 1 < count ? (own.begin + (claim + 1) % columns) * width : -1;
            multiply(job, x, job.rows * block / blocks, job.rows * (block + 1) / blocks, panel,
                     std::min(panel + width, panels), next_panel);
        }
    }
}

void multiply_many_rows(const LinearJob& job, int threads) {
    const PackedLinear& w = *job.weight;
    threads = threads_for(w.out_features * w.in_features * (job.rows / CLAIM_ROWS), threads);
    auto* claims = static_cast<Claims*>(thread_scratch(sizeof(Claims) * static_cast<size_t>(threads), SHARED_SCRATCH));
    for (int i = 0; i < threads; i++) claims[i].next.store(0, std::memory_order_relaxed);
    parallel(threads, [&](int thread, int num_threads) {
        if (num_threads == 1) return linear_multiply_part(job, 0, job.rows, 0, linear_panels(job));
        multiply_claims(job, thread, num_threads, claims);
    });
}

}  // namespace

size_t linear_scratch_bytes(const LinearJob& job) {
    if (!converts(job)) return 0;
    const PackedLinear& w = *job.weight;
    if (!is_quantized(w.kind)) return static_cast<size_t>(4 * job.rows * words_of(w, w.in_features));
    int64_t sums = sums_of_x_group(WEIGHT_FORMS[w.kind], static_cast<int>(w.group));
    return static_cast<size_t>(round_up(job.rows * groups_of(w) * w.group, 64) + job.rows * x_groups_of(w) * 4 * (1 + sums));
}

void linear_convert(const LinearJob& job, int64_t begin, int64_t end) {
    const PackedLinear& w = *job.weight;
    if (is_quantized(w.kind))
        return by_dtype(job.dtype, [&](auto element) { quantize<decltype(element)>(job, begin, end); });
    int64_t words = words_of(w, w.in_features), segments = num_segments(w);
    for (int64_t at = begin; at < end; at++) {
        int64_t k = at % segments * K_SEGMENT, count = std::min(w.in_features - k, K_SEGMENT);
        int64_t from = at / segments * job.x_stride + k;
        float* to = static_cast<float*>(job.scratch) + at / segments * words + words_of(w, k);
        if (count % 2 != 0) memset(to + words_of(w, count) - 1, 0, 4);  // the last word of an odd number is not all its own
        if (w.kind == KIND_F16)
            widen(static_cast<const f16*>(job.x) + from, to, count);
        else if (WIDENS_BF16)
            widen(static_cast<const bf16*>(job.x) + from, to, count);
        else
            memcpy(to, static_cast<const bf16*>(job.x) + from, static_cast<size_t>(count) * 2);
    }
}

int64_t linear_pieces_of_x(const LinearJob& job) { return job.rows * num_segments(*job.weight); }

int64_t linear_panels(const LinearJob& job) {
    int64_t panels = (job.weight->out_features + PANEL - 1) / PANEL;
    return job.gate != GATE_NONE ? panels / 2 : panels;
}

void linear_multiply_part(const LinearJob& job, int64_t row, int64_t row_end, int64_t panel, int64_t panel_end) {
    Operand x = operand(job);
    int64_t block = std::max(BLOCK_BYTES / row_bytes(*job.weight), CLAIM_ROWS);
    int64_t width = most_panels(job, row_end - row);
    for (; row < row_end; row += block)
        for (int64_t at = panel, end; at < panel_end; at = end) {
            end = std::min(at + width, panel_end);
            multiply(job, x, row, std::min(row + block, row_end), at, end, end < panel_end ? end : -1);
        }
}

void linear_convert_all(LinearJob& job, int scratch, int threads) {
    size_t bytes = linear_scratch_bytes(job);
    if (bytes == 0) return;
    job.scratch = thread_scratch(bytes, scratch);
    int64_t pieces = linear_pieces_of_x(job);
    parallel(threads_for(job.rows * job.weight->in_features, threads, pieces), [&](int thread, int num_threads) {
        Range mine = share_of(pieces, thread, num_threads);
        linear_convert(job, mine.begin, mine.end);
    });
}

void linear_run(LinearJob job, int threads) {
    linear_convert_all(job, CONVERTED_SCRATCH, threads);
    job.rows < CLAIM_ROWS ? multiply_few_rows(job, threads) : multiply_many_rows(job, threads);
}
