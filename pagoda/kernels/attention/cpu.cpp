// Causal paged attention, and bidirectional attention on pages that exist while it runs (transient.h). Their definition is
// attention/reference.py, the layout of a page kv_cache/pages.h.
//
// The result of a query vector depends only on its own row, bit for bit:
//   - the context is divided into segments of 256 positions and chunks of 64, counted from position 0 regardless of where
//     a window or a batch begins;
//   - within a segment: scores of a chunk, running maximum, weights, running sum (online softmax), chunk after chunk;
//   - each segment starts afresh, and segments are combined from left to right.
// A chunk or segment that a query does not see leaves its sums unchanged, so a tile of many queries, each
// with its own last position, gives the same bits as each query alone, and segments may run on different threads.
#include <new>

#include "segments.h"
#include "transient.h"

namespace {

constexpr int TILE_QUERY_VECTORS = 48;          // query vectors (queries x heads of a KV head) per pass over the pages
constexpr size_t MOST_SHARED_BYTES = 64 << 20;  // partial results of segments that are divided among threads

int make_tiles(const Problem& p, Tile* tiles) {
    int per_tile = std::max(1, TILE_QUERY_VECTORS / p.group()), count = 0;
    for (int row = 0; row < p.num_rows; row++) {
        int begin = p.query_start[row], queries = p.query_start[row + 1] - begin;
        for (int i = 0; i < queries; i += per_tile)
            tiles[count++] = {row, begin + i, std::min(per_tile, queries - i), p.seq_lens[row] - queries + i,
                              p.seq_lens[row]};
    }
    // The most expensive first, so that no thread ends with a long one.
    std::sort(tiles, tiles + count, [&](const Tile& a, const Tile& b) { return a.cost(p) > b.cost(p); });
    return count;
}

// Partial results of a tile's segments, for all its KV heads.
template <class Stored>
size_t partial_floats(const Attention<Stored>& work, const Tile& t) {
    return Partial::floats(work.rows(t), work.p.head_dim) * t.num_segments(work.p) * work.p.num_kv_heads;
}

// Threads claim segments. For batches of few tiles, which would leave threads idle. floats: partial results of all tiles.
template <class Stored>
void attend_by_segments(const Attention<Stored>& work, const Tile* tiles, int count, size_t floats, int threads) {
    const Problem& p = work.p;
    int units = 0, heads = count * p.num_kv_heads;
    for (int i = 0; i < count; i++) units += tiles[i].num_segments(p) * p.num_kv_heads;
    float* parts = static_cast<float*>(thread_scratch(floats * sizeof(float), 2));
    auto* unfinished = static_cast<std::atomic<int>*>(thread_scratch(sizeof(std::atomic<int>) * heads, 3));
    for (int i = 0; i < heads; i++)
        new (&unfinished[i]) std::atomic<int>(tiles[i / p.num_kv_heads].num_segments(p));
    std::atomic<int> next{0};
    parallel(std::min(threads, units), [&](int, int) {
        for (int unit; (unit = next.fetch_add(1)) < units;) {
            int i = 0, left = unit;
            float* at = parts;
            for (; left >= tiles[i].num_segments(p) * p.num_kv_heads; i++) {
                left -= tiles[i].num_segments(p) * p.num_kv_heads;
                at += partial_floats(work, tiles[i]);
            }
            int head = left / tiles[i].num_segments(p), segment = left % tiles[i].num_segments(p);
            at += partial_floats(work, tiles[i]) / p.num_kv_heads * head;
            work.run_part(tiles[i], head, segment, at, unfinished[i * p.num_kv_heads + head]);
        }
    });
}

// Threads claim tiles: one head of a tile, or all of its heads.
template <class Stored>
void attend_by_units(const Attention<Stored>& work, const Tile* tiles, int count, int threads) {
    const Problem& p = work.p;
    // A tile of few query vectors is bound by memory: it takes all heads of a block together, as they are stored.
    bool together = count >= 4 * threads;
    Unit* units = static_cast<Unit*>(thread_scratch(sizeof(Unit) * count * p.num_kv_heads, 2));
    int num_units = 0;
    for (int i = 0; i < count; i++) {
        int heads = together && work.rows(tiles[i]) <= FEW_VECTORS ? p.num_kv_heads : 1;
        for (int head = 0; head < p.num_kv_heads; head += heads) units[num_units++] = {&tiles[i], {head, heads}};
    }
    std::atomic<int> next{0};
    parallel(std::min(threads, num_units), [&](int, int) {
        int upcoming = next.fetch_add(1);  // claimed in advance, so that its memory is prefetched during the current one
        while (upcoming < num_units) {
            const Unit& unit = units[upcoming];
            upcoming = next.fetch_add(1);
            work.run_unit(unit, upcoming < num_units ? &units[upcoming] : nullptr);
        }
    });
}

template <class Stored>
void attend(const Problem& p, int num_tokens, int threads) {
    Attention<Stored> work{p};
    Tile* tiles = static_cast<Tile*>(thread_scratch(sizeof(Tile) * num_tokens, 1));
    int count = make_tiles(p, tiles);
    int64_t products = 0;
    size_t floats = 0;
    for (int i = 0; i < count; i++) {
        products += tiles[i].cost(p) * p.num_heads * p.head_dim;
        floats += partial_floats(work, tiles[i]);
    }
    threads = threads_for(products / 4, threads);
    // Both ways give the same bits.
    bool few = count * p.num_kv_heads < 4 * threads;
    if (threads > 1 && few && floats * sizeof(float) <= MOST_SHARED_BYTES)
        attend_by_segments(work, tiles, count, floats, threads);
    else
        attend_by_units(work, tiles, count, threads);
}

// Of an op's arguments: the rows of `table` from `first` on, by head of q. No data: none.
struct Bias {
    const float* rows = nullptr;
    int reach = 0;
    Bias() = default;
    Bias(const Tensor& table, int64_t first)
        : rows(table.data == nullptr ? nullptr : static_cast<const float*>(table.data) + first * table.dim),
          reach(static_cast<int>(table.dim / 2)) {}
    void set(Problem& p) const { p.bias = rows, p.bias_reach = reach; }
};

// Head sizes of a cache are multiples of 16, block sizes multiples of 8. seq_lens counts the tokens in the cache, this step's included.
template <class Args>
Problem paged_problem(const Args& a, int window, float softcap, const void* sinks) {
    const KVPages& cache = a.cache;
    const RowGroup& rows = *a.metadata;
    Problem p{a.q.dtype,
              a.q.data,
              a.out.data,
              static_cast<const char*>(cache.k),
              static_cast<const char*>(cache.v),
              cache.k_scale,
              cache.v_scale,
              rows.query_start,
              rows.seq_lens,
              rows.block_table,
              rows.table_stride,
              a.q.stride,
              cache.k_stride,
              cache.v_stride,
              cache.scale_stride,
              static_cast<int>(rows.num_rows),
              static_cast<int>(a.q.heads),
              static_cast<int>(cache.kv_heads),
              static_cast<int>(cache.value_dim),
              static_cast<int>(cache.block_size),
              window,
              a.scale,
              softcap,
              true,
              sinks};
    p.last_seen = rows.last_seen;
    return p;
}

void attend_paged(const Problem& p, int32_t dtype, int64_t num_tokens, int threads) {
    auto run = dtype == I8     ? attend<int8_t>
               : dtype == F32  ? attend<float>
               : dtype == BF16 ? attend<bf16>
                               : attend<f16>;
    run(p, static_cast<int>(num_tokens), threads);
}

}  // namespace

PAGODA_EXPORT void pagoda_attention(const AttentionArgs* a, int32_t threads) {
    Problem p = paged_problem(*a, a->window, a->softcap, nullptr);
    Bias(a->bias, a->first).set(p);
    attend_paged(p, a->cache.dtype, a->q.rows, threads);
}

PAGODA_EXPORT void pagoda_attention_with_sinks(const AttentionWithSinksArgs* a, int32_t threads) {
    int64_t element_bytes = a->q.dtype == F32 ? 4 : 2;
    const void* sinks = static_cast<const char*>(a->sinks.data) + a->first * element_bytes;
    attend_paged(paged_problem(*a, a->window, 0.0f, sinks), a->cache.dtype, a->q.rows, threads);
}

// Not of an int8 cache: a key's two parts would have two scales.
PAGODA_EXPORT void pagoda_latent_attention(const LatentAttentionArgs* a, int32_t threads) {
    Problem p = paged_problem(*a, 0, 0.0f, nullptr);
    p.rope_dim = static_cast<int>(a->cache.head_dim);
    p.q_rope = a->q_rotated.data;
    p.q_rope_stride = a->q_rotated.stride;
    attend_paged(p, a->cache.dtype, a->q.rows, threads);
}

PAGODA_EXPORT void pagoda_bidirectional_attention(const BidirectionalAttentionArgs* a, int32_t threads) {
    if (a->q.rows == 0) return;
    by_dtype(a->q.dtype, [&](auto element) {
        using T = decltype(element);
        Problem p = with_transient_pages<T>(*a, threads);
        Bias(a->bias, a->first).set(p);
        attend<T>(p, static_cast<int>(a->q.rows), threads);
        cut_heads<T>(p, *a);
    });
}
