// The linear layer: its distribution over threads, and the conversion of x. Its definition is reference.py.
#include "gemm.h"

#include "product.h"

namespace {

// With at least this many rows, threads claim pieces instead of taking equal shares: a thread that is descheduled briefly
// then costs little. With fewer, a weight is read once, and one long stream per thread is faster.
constexpr int64_t CLAIM_ROWS = 16;
constexpr int64_t CLAIMS_PER_THREAD = 8;
// Rows of x that are multiplied with one panel before the next; they stay in the L2 cache.
constexpr int64_t BLOCK_BYTES = 256 * 1024;
// At most so many panels are multiplied by a segment before the next, because all their sums are kept.
constexpr int64_t MOST_PANELS_OF_SEGMENT = 32;
constexpr int CONVERTED_SCRATCH = 3, SHARED_SCRATCH = 6;

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
    int64_t sides = job.gated ? 2 : 1, partner = w.out_features / 2 / PANEL;
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
    LinearPlan plan = plan_of(*job.weight, job.gated, threads);
    SharedSums shared{};
    if (plan.segments > 1) {
        int64_t counts = round_up(plan.panels * static_cast<int64_t>(sizeof(*shared.done)), 64);
        int64_t sums = plan.panels * plan.segments * (job.gated ? 2 : 1) * job.rows * PANEL * 4;
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
    return rows > MAX_TILE_ROWS ? MOST_PANELS_OF_SEGMENT : job.gated ? 1 : MAX_TILE_PANELS;
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
            Rectangle piece{job.rows * block / blocks, job.rows * (block + 1) / blocks, panel, std::min(panel + width, panels)};
            Product(job, piece, next_panel).run();
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
    return job.gated ? panels / 2 : panels;
}

void linear_multiply_part(const LinearJob& job, int64_t row, int64_t row_end, int64_t panel, int64_t panel_end) {
    int64_t block = std::max(BLOCK_BYTES / row_bytes(*job.weight), CLAIM_ROWS);
    int64_t width = most_panels(job, row_end - row);
    for (; row < row_end; row += block)
        for (int64_t at = panel, end; at < panel_end; at = end) {
            end = std::min(at + width, panel_end);
            Product(job, {row, std::min(row + block, row_end), at, end}, end < panel_end ? end : -1).run();
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
