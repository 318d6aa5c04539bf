// The linear layer: tiles, their distribution over threads, and the epilogue. Its definition is reference.py.
#include "gemm.h"

#include "../activation/gates.h"
#include "float_tiles.h"
#include "int_tiles.h"
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

// ---- one tile ----

using Tile = void (*)(const Operand& x, int64_t row, const PackedLinear& w, const char* panel, int64_t panel_stride,
                      float* out, int64_t out_stride, Prefetch prefetch);

template <class Step, int ROWS, int PANELS>
void run_float_tile(const Operand& x, int64_t row, const PackedLinear& w, const char* panel, int64_t panel_stride,
                    float* out, int64_t out_stride, Prefetch prefetch) {
    using Weight = typename Step::Weight;
    float_tile<Step, ROWS, PANELS>(static_cast<const typename Step::Word*>(x.words) + row * x.stride, x.stride,
                                   reinterpret_cast<const Weight*>(panel),
                                   panel_stride / static_cast<int64_t>(sizeof(Weight)), word_steps(w), out, out_stride,
                                   prefetch);
}
template <int32_t KIND, int GROUP, int ROWS, int PANELS>
void run_int_tile(const Operand& x, int64_t row, const PackedLinear& w, const char* panel, int64_t panel_stride,
                  float* out, int64_t out_stride, Prefetch prefetch) {
    int64_t groups = groups_of(w);
    QuantizedRows rows{x.quantized.bytes + row * groups * GROUP, x.quantized.scales + row * groups,
                       x.quantized.sums + row * groups};
    int_tile<KIND, GROUP, ROWS, PANELS>(rows, groups, reinterpret_cast<const uint8_t*>(panel), panel_stride, out,
                                        out_stride, prefetch);
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
template <int32_t KIND, int GROUP>
constexpr Tiles int_tiles() {
    if constexpr (MANY_REGISTERS)
        return {{run_int_tile<KIND, GROUP, 1, 1>, run_int_tile<KIND, GROUP, 2, 1>, run_int_tile<KIND, GROUP, 3, 1>,
                 run_int_tile<KIND, GROUP, 4, 1>, run_int_tile<KIND, GROUP, 5, 1>, run_int_tile<KIND, GROUP, 6, 1>},
                {run_int_tile<KIND, GROUP, 1, 2>, run_int_tile<KIND, GROUP, 2, 2>, run_int_tile<KIND, GROUP, 3, 2>},
                {run_int_tile<KIND, GROUP, 1, 4>}};
    else
        return {{run_int_tile<KIND, GROUP, 1, 1>, run_int_tile<KIND, GROUP, 2, 1>, run_int_tile<KIND, GROUP, 3, 1>,
                 run_int_tile<KIND, GROUP, 4, 1>, run_int_tile<KIND, GROUP, 5, 1>, run_int_tile<KIND, GROUP, 6, 1>},
                {},
                {}};
}

const Tiles& tiles_of(const PackedLinear& w) {
    static const Tiles f32 = float_tiles<StepF32>(), bf16 = float_tiles<StepBF16>(), f16 = float_tiles<StepF16>();
    switch (w.kind) {
        case KIND_F32: return f32;
        case KIND_BF16: return bf16;
        case KIND_F16: return f16;
        default: break;
    }
    const Tiles* found = nullptr;
    with_code_group(w, [&](auto at) {
        static const Tiles tiles = int_tiles<CODE_GROUPS[at].kind, CODE_GROUPS[at].size>();
        found = &tiles;
    });
    return *found;
}

// ---- epilogue: from sums to the output ----

f32x16 with_bias(const float* sums, const PackedLinear& w, int64_t column) {
    f32x16 v = load(sums);
    return w.bias == nullptr ? v : v + load(w.bias + column);
}

// A tile's sums [rows][sums_stride]. `column`: output column of the first one; `columns` of them exist.
template <class Out>
void finish(const LinearJob& job, const float* sums, int64_t sums_stride, int64_t row, int64_t rows, int64_t column,
            int64_t columns) {
    for (int64_t r = 0; r < rows; r++) {
        Out* out = static_cast<Out*>(job.out) + (row + r) * job.out_stride + column;
        for_lanes(columns, [&](int64_t i, int n) {
            f32x16 result = with_bias(sums + r * sums_stride + i, *job.weight, column + i);
            store_lanes(out + i, job.gelu ? Gelu::of(rounded<Out>(result)) : result, n);
        });
    }
}
inline f32x16 activated(int32_t gate, f32x16 x) {
    return gate == GATE_SILU ? Silu::of(x) : gate == GATE_GELU ? Gelu::of(x) : GeluTanh::of(x);
}
// The same, with the sums of gate in the first panel and those of up in the second.
template <class T>
void finish_gated(const LinearJob& job, const float* sums, int64_t sums_stride, int64_t row, int64_t rows,
                  int64_t column) {
    int64_t up = job.weight->out_features / 2;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < PANEL; i += 16) {
            const float* at = sums + r * sums_stride + i;
            f32x16 gate = rounded<T>(with_bias(at, *job.weight, column + i));
            f32x16 product = rounded<T>(with_bias(at + PANEL, *job.weight, up + column + i));
            store(static_cast<T*>(job.out) + (row + r) * job.out_stride + column + i,
                  activated(job.gate, gate) * product);
        }
}

void finish_tile(const LinearJob& job, const float* sums, int64_t sums_stride, int64_t row, int64_t rows,
                 int64_t column, int64_t columns) {
    if (job.gate != GATE_NONE) {
        by_dtype(job.dtype, [&](auto element) {
            finish_gated<decltype(element)>(job, sums, sums_stride, row, rows, column);
        });
    } else {
        by_dtype(job.out_dtype, [&](auto element) {
            finish<decltype(element)>(job, sums, sums_stride, row, rows, column, columns);
        });
    }
}

// ---- a rectangle of the output ----

// Rows [row, row_end) of panels [panel, panel_end), with a gate of their partners too. next_panel: the one that this
// thread will probably multiply next, or -1.
void multiply(const LinearJob& job, const Operand& x, int64_t row, int64_t row_end, int64_t panel, int64_t panel_end,
              int64_t next_panel) {
    const PackedLinear& w = *job.weight;
    const Tiles& tiles = tiles_of(w);
    const char* panels = static_cast<const char*>(w.panels);
    int64_t bytes = panel_bytes(w), partner = w.out_features / 2 / PANEL * bytes;
    int64_t count = (row_end - row + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS;  // tiles along the rows, of nearly equal height
    int64_t most_rows = (row_end - row + count - 1) / count;
    int most = job.gate != GATE_NONE ? 1 : tiles.panels(most_rows);
    // A gate and its partner are two calls of narrow tiles, or one of a wide one.
    int64_t calls = job.gate != GATE_NONE && tiles.panels(most_rows) == 1 ? 2 * count : count;
    int64_t steps = tile_steps(w) * tile_passes(w, most_rows), all_steps = calls * steps;
    // With AVX-512, a single tile already reads the weights at the speed of memory: nothing to gain.
    bool prefetches = count > 1 || !MANY_REGISTERS;
    alignas(64) float sums[MAX_TILE_ROWS * MAX_TILE_PANELS * PANEL];
    while (panel < panel_end) {
        int width = most;
        while (width > panel_end - panel) width /= 2;
        const char* first = panels + panel * bytes;
        int64_t columns = w.out_features - panel * PANEL;
        if (columns > width * PANEL) columns = width * PANEL;
        int64_t upcoming = panel + width < panel_end ? panel + width : next_panel;
        // Together, the calls prefetch once everything that the next ones read, and each step as much as any other: the
        // weights arrive while the tiles compute.
        int64_t span = job.gate != GATE_NONE ? bytes : width * bytes, each = (span + all_steps - 1) / all_steps;
        auto prefetch_of = [&](int64_t call) -> Prefetch {
            if (!prefetches || upcoming < 0) return {first, 0, 0};
            const char* next = panels + upcoming * bytes + call * steps * each;
            return {next, each, job.gate != GATE_NONE ? partner : each > 64 ? 64 : 0};
        };
        for (int64_t i = 0; i < count; i++) {
            int64_t begin = row + (row_end - row) * i / count, rows = row + (row_end - row) * (i + 1) / count - begin;
            auto run = [&](Tile tile, const char* at, int64_t stride, float* to, int64_t to_stride, int64_t call) {
                tile(x, begin, w, at, stride, to, to_stride, prefetch_of(call));
            };
            if (job.gate == GATE_NONE) {
                run(tiles.of(rows, width), first, bytes, sums, width * PANEL, i);
            } else if (tiles.panels(rows) >= 2) {
                run(tiles.of(rows, 2), first, partner, sums, 2 * PANEL, i);
            } else {
                run(tiles.of(rows, 1), first, 0, sums, 2 * PANEL, 2 * i);
                run(tiles.of(rows, 1), first + partner, 0, sums + PANEL, 2 * PANEL, 2 * i + 1);
            }
            finish_tile(job, sums, (job.gate == GATE_NONE ? width : 2) * PANEL, begin, rows, panel * PANEL, columns);
        }
        panel += width;
    }
}

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

}  // namespace

size_t linear_scratch_bytes(const LinearJob& job) {
    if (!converts(job)) return 0;
    const PackedLinear& w = *job.weight;
    if (!is_quantized(w.kind)) return static_cast<size_t>(job.rows * row_bytes(w));
    int64_t groups = groups_of(w);
    return static_cast<size_t>(round_up(job.rows * groups * w.group, 64) + job.rows * groups * 8);
}

void linear_convert(const LinearJob& job, int64_t begin, int64_t end) {
    const PackedLinear& w = *job.weight;
    if (is_quantized(w.kind)) {
        return by_dtype(job.dtype, [&](auto element) { quantize<decltype(element)>(job, begin, end); });
    }
    for (int64_t r = begin; r < end; r++) {
        char* to = static_cast<char*>(job.scratch) + r * row_bytes(w);
        memset(to + row_bytes(w) - 4, 0, 4);  // an odd number of elements has no last word of its own
        if (w.kind == KIND_BF16 && !WIDENS_BF16)
            memcpy(to, static_cast<const bf16*>(job.x) + r * job.x_stride, static_cast<size_t>(w.in_features) * 2);
        else if (w.kind == KIND_BF16)
            widen(static_cast<const bf16*>(job.x) + r * job.x_stride, reinterpret_cast<float*>(to), w.in_features);
        else
            widen(static_cast<const f16*>(job.x) + r * job.x_stride, reinterpret_cast<float*>(to), w.in_features);
    }
}

int64_t linear_panels(const LinearJob& job) {
    int64_t panels = (job.weight->out_features + PANEL - 1) / PANEL;
    return job.gate != GATE_NONE ? panels / 2 : panels;
}

void linear_multiply_part(const LinearJob& job, int64_t row, int64_t row_end, int64_t panel, int64_t panel_end) {
    Operand x = operand(job);
    int64_t fitting = BLOCK_BYTES / row_bytes(*job.weight), block = fitting > CLAIM_ROWS ? fitting : CLAIM_ROWS;
    for (; row < row_end; row += block)
        multiply(job, x, row, row + block < row_end ? row + block : row_end, panel, panel_end, -1);
}

void linear_multiply(const LinearJob& job, int thread, int num_threads, std::atomic<int64_t>& claims) {
    int64_t panels = linear_panels(job);
    if (job.rows < CLAIM_ROWS || num_threads == 1) {
        Range mine = share_of(panels, thread, num_threads);
        return linear_multiply_part(job, 0, job.rows, mine.begin, mine.end);
    }
    Operand x = operand(job);
    auto [blocks, width] = split_work(job, panels, num_threads);
    int64_t pieces = (panels + width - 1) / width;
    for (;;) {
        int64_t claim = claims.fetch_add(1, std::memory_order_relaxed);
        if (claim >= blocks * pieces) return;
        int64_t block = claim / pieces, panel = claim % pieces * width;
        // If all threads are equally fast, they claim in turn.
        int64_t guess = claim + num_threads, next_panel = guess < blocks * pieces ? guess % pieces * width : -1;
        multiply(job, x, job.rows * block / blocks, job.rows * (block + 1) / blocks, panel,
                 panel + width < panels ? panel + width : panels, next_panel);
    }
}

void linear_convert_all(LinearJob& job, int scratch, int threads) {
    size_t bytes = linear_scratch_bytes(job);
    if (bytes == 0) return;
    job.scratch = thread_scratch(bytes, scratch);
    parallel(threads_for(job.rows * job.weight->in_features, threads), [&](int thread, int num_threads) {
        Range mine = share_of(job.rows, thread, num_threads);
        linear_convert(job, mine.begin, mine.end);
    });
}

void linear_run(LinearJob job, int threads) {
    linear_convert_all(job, 3, threads);
    std::atomic<int64_t> claims{0};
    parallel(threads_for(job.weight->out_features * job.weight->in_features, threads),
             [&](int thread, int num_threads) { linear_multiply(job, thread, num_threads, claims); });
}
