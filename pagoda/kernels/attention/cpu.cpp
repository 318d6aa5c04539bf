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

// Divides the queries of a batch into tiles, and finds the rows that begin with the same blocks. Where they are in the batch
// does not matter.
struct Tiling {
    Problem& p;
    int* order;  // rows, so that those that begin alike are neighbours
    int32_t* tokens;
    Tile *prefixes, *tiles;
    int num_prefixes = 0, num_tiles = 0, num_tokens = 0;

    int queries_of(int row) const { return p.query_start[row + 1] - p.query_start[row]; }
    const int32_t* table_of(int row) const { return p.block_table + row * p.table_stride; }

    // The leading segments that a row may share: each query sees them whole, and a later one.
    int whole_segments(int row) const {
        int queries = queries_of(row), at = p.seq_lens[row] - queries;
        bool shares = queries > 0 && p.causal && p.window == 0 && p.bias == nullptr;
        return shares ? p.last_visible(p.query_start[row], at, p.seq_lens[row]) / SEGMENT : 0;
    }
    int blocks_of(int segments) const { return (segments * SEGMENT + p.block_size - 1) / p.block_size; }

    bool comes_before(int a, int b) const {
        int of_a = blocks_of(whole_segments(a)), of_b = blocks_of(whole_segments(b));
        int sign = memcmp(table_of(a), table_of(b), sizeof(int32_t) * std::min(of_a, of_b));
        return sign != 0 ? sign < 0 : of_a < of_b;
    }

    // Leading segments, `most` or fewer, that the two rows have in the same blocks.
    int common_segments(int a, int b, int most) const {
        int blocks = blocks_of(most);
        int same = static_cast<int>(std::mismatch(table_of(a), table_of(a) + blocks, table_of(b)).first - table_of(a));
        return same == blocks ? most : same * p.block_size / SEGMENT;
    }

    // How many rows from order[i] on are computed together over a prefix, and its segments. A further row may shorten
    // it, but must not add to what is read.
    int rows_together(int i, int per_tile, int& segments) const {
        int rows = 1, queries = queries_of(order[i]);
        segments = whole_segments(order[i]);
        for (; i + rows < p.num_rows; rows++) {
            int row = order[i + rows];
            int fewer = common_segments(order[i], row, std::min(segments, whole_segments(row)));
            queries += queries_of(row);
            if (queries > per_tile || fewer == 0 || fewer * rows < segments * (rows - 1)) break;
            segments = fewer;
        }
        if (rows == 1) segments = 0;
        return rows;
    }

    void add_row(int row, int per_tile, int segments) {
        int begin = p.query_start[row], queries = queries_of(row), length = p.seq_lens[row];
        for (int i = 0; i < queries; i += per_tile) {
            int count = std::min(per_tile, queries - i), at = length - queries + i, last = i + count - 1;
            int end = p.last_visible(begin + last, length - queries + last, length) + 1;
            int from = segments > 0 ? segments * SEGMENT : p.first_visible(at);
            tiles[num_tiles++] = {row, num_tokens, count, at, length, from, end, segments > 0 ? p.num_kept : -1};
            for (int j = 0; j < count; j++) tokens[num_tokens++] = begin + i + j;
            if (segments > 0) p.num_kept += count;
        }
    }

    void run() {
        int per_tile = std::max(1, TILE_QUERY_VECTORS / p.group()), segments;
        for (int row = 0; row < p.num_rows; row++) order[row] = row;
        std::sort(order, order + p.num_rows, [&](int a, int b) { return comes_before(a, b); });
        for (int i = 0, rows; i < p.num_rows; i += rows) {
            rows = rows_together(i, per_tile, segments);
            Tile prefix{order[i], num_tokens, 0, segments * SEGMENT - 1, 0, 0, segments * SEGMENT, p.num_kept};
            for (int j = 0; j < rows; j++) add_row(order[i + j], per_tile, segments);
            prefix.num_queries = num_tokens - prefix.first;
            if (segments > 0) prefixes[num_prefixes++] = prefix;
        }
        p.tokens = tokens;
    }
};

// Partial results of a tile's segments, for all its KV heads.
template <class Stored>
size_t partial_floats(const Attention<Stored>& work, const Tile& t) {
    return Partial::floats(work.rows(t), work.p.head_dim) * t.num_segments() * work.p.num_kv_heads;
}

// Threads claim segments. For batches of few tiles, which would leave threads idle. floats: partial results of all tiles.
template <class Stored>
void attend_by_segments(const Attention<Stored>& work, const Tile* tiles, int count, size_t floats, int threads) {
    const Problem& p = work.p;
    int units = 0, heads = count * p.num_kv_heads;
    for (int i = 0; i < count; i++) units += tiles[i].num_segments() * p.num_kv_heads;
    float* parts = static_cast<float*>(thread_scratch(floats * sizeof(float), 2));
    auto* unfinished = static_cast<std::atomic<int>*>(thread_scratch(sizeof(std::atomic<int>) * heads, 3));
    for (int i = 0; i < heads; i++)
        new (&unfinished[i]) std::atomic<int>(tiles[i / p.num_kv_heads].num_segments());
    for_claims(units, threads, [&](int64_t unit) {
        int i = 0, left = static_cast<int>(unit);
        float* at = parts;
        for (; left >= tiles[i].num_segments() * p.num_kv_heads; i++) {
            left -= tiles[i].num_segments() * p.num_kv_heads;
            at += partial_floats(work, tiles[i]);
        }
        int head = left / tiles[i].num_segments(), segment = left % tiles[i].num_segments();
        at += partial_floats(work, tiles[i]) / p.num_kv_heads * head;
        work.run_part(tiles[i], head, segment, at, unfinished[i * p.num_kv_heads + head]);
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
void attend_tiles(const Attention<Stored>& work, Tile* tiles, int count, int threads) {
    const Problem& p = work.p;
    // The most expensive first, so that no thread ends with a long one.
    std::sort(tiles, tiles + count, [](const Tile& a, const Tile& b) { return a.cost() > b.cost(); });
    int64_t products = 0;
    size_t floats = 0;
    for (int i = 0; i < count; i++) {
        products += tiles[i].cost() * p.num_heads * p.head_dim;
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

Tiling divide(Problem& p, int num_tokens) {
    Tile* tiles = static_cast<Tile*>(thread_scratch(sizeof(Tile) * 2 * num_tokens, 1));
    int* order = static_cast<int*>(thread_scratch(sizeof(int) * (p.num_rows + num_tokens), 6));
    Tiling tiling{p, order, order + p.num_rows, tiles, tiles + num_tokens};
    tiling.run();
    return tiling;
}

template <class Stored>
void attend(Problem p, int num_tokens, int threads) {
    Tiling tiling = divide(p, num_tokens);
    size_t kept = Partial::floats(size_t(p.num_kept) * p.group(), p.head_dim) * p.num_kv_heads;
    p.kept = static_cast<float*>(thread_scratch(sizeof(float) * kept, 7));
    Attention<Stored> work{p};
    if (tiling.num_prefixes > 0) attend_tiles(work, tiling.prefixes, tiling.num_prefixes, threads);
    attend_tiles(work, tiling.tiles, tiling.num_tiles, threads);
}

// Of an op's arguments: the rows of `table` from `first` on, by head of q. No data: none.
void set_bias(Problem& p, const Tensor& table, int64_t first) {
    if (table.data == nullptr) return;
    p.bias = static_cast<const float*>(table.data) + first * table.dim;
    p.bias_reach = static_cast<int>(table.dim / 2);
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
    Problem p = paged_problem(a->q, a->out, a->cache, *a->metadata, a->scale, a->window, a->softcap);
    set_bias(p, a->bias, a->first);
    if (a->sinks.data != nullptr) p.sinks = static_cast<const char*>(a->sinks.data) + a->first * element_bytes(a->q);
    attend_paged(p, a->cache.dtype, a->q.rows, threads);
}

// Not of an int8 cache: a key's two parts would have two scales.
PAGODA_EXPORT void pagoda_latent_attention(const LatentAttentionArgs* a, int32_t threads) {
    Problem p = paged_problem(a->q, a->out, a->cache, *a->metadata, a->scale);
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
        set_bias(p, a->bias, a->first);
        attend<T>(p, static_cast<int>(a->q.rows), threads);
        cut_heads<T>(p, *a);
    });
}

// The positions whose K and V a batch reads, for each KV head. group: q heads of a KV head.
PAGODA_EXPORT int64_t pagoda_attention_positions(const RowGroup* rows, int32_t group) {
    Problem p{};
    p.query_start = rows->query_start, p.seq_lens = rows->seq_lens, p.last_seen = rows->last_seen;
    p.block_table = rows->block_table, p.table_stride = rows->table_stride;
    p.num_rows = static_cast<int>(rows->num_rows), p.block_size = static_cast<int>(rows->block_size);
    p.num_heads = group, p.num_kv_heads = 1;
    Tiling tiling = divide(p, rows->query_start[rows->num_rows]);
    int64_t positions = 0;
    for (int i = 0; i < tiling.num_prefixes; i++) positions += tiling.prefixes[i].end;
    for (int i = 0; i < tiling.num_tiles; i++) positions += tiling.tiles[i].end - tiling.tiles[i].begin;
    return positions;
}
