// Causal paged attention; its definition is attention/reference.py, the layout of a page kv_cache/pages.h.
//
// What one query vector computes is a function of its own row alone, bit for bit:
//   - the context is cut into segments of 256 positions and chunks of 64, counted from position 0, wherever a window or
//     a batch begins;
//   - within a segment: scores of a chunk, running maximum, weights, running sum (online softmax), chunk after chunk;
//   - segments start afresh and are folded left to right.
// A chunk or segment of which a query sees nothing leaves its sums exactly as they were, so tiles of many queries, each
// with its own last position, agree with a query computed alone; and segments may be computed by different threads.
#include <algorithm>
#include <type_traits>

#include "../kv_cache/pages.h"
#include "parallel.h"
#include "tiles.h"

namespace {

constexpr int SEGMENT = 256;
constexpr int TILE_QUERY_VECTORS = 48;  // query vectors (queries x heads of one KV head) that share a pass over the context
constexpr float NOTHING_SEEN = -1e30f;  // running maximum before any position: finite, so that differences are numbers
constexpr float HIDDEN = -3e38f;        // score of a position out of sight: its weight comes out as exactly 0

struct Problem {
    const void* q;
    void* out;
    const char *k_pages, *v_pages;
    const float *k_scale, *v_scale;
    const int32_t *query_start, *seq_lens, *block_table;
    int64_t table_stride, q_stride;
    int num_rows, num_heads, num_kv_heads, head_dim, block_size, window;
    float scale, softcap;
    int group() const { return num_heads / num_kv_heads; }
};

// Consecutive queries of one row. `first_at`: position of the first one.
struct Tile {
    int row, first_token, num_queries, first_at;
    int first_visible(const Problem& p) const { return p.window > 0 ? std::max(0, first_at - p.window + 1) : 0; }
    int end() const { return first_at + num_queries; }  // one past the last position any query sees
    int first_segment(const Problem& p) const { return first_visible(p) / SEGMENT; }
    int num_segments(const Problem& p) const { return (end() - 1) / SEGMENT - first_segment(p) + 1; }
    int64_t cost(const Problem& p) const { return int64_t(end() - first_visible(p)) * (num_queries + 1); }
};

// Running softmax of `rows` query vectors.
struct Partial {
    float *top, *total, *acc;  // [rows], [rows], [rows][head_dim]
    static size_t floats(int rows, int head_dim) { return size_t(rows) * (head_dim + 2); }
    static Partial at(float* memory, int rows) { return {memory, memory + rows, memory + 2 * rows}; }
};

// folded <- folded then next, where `next` covers the later positions.
void fold(Partial folded, Partial next, int rows, int head_dim) {
    for (int r = 0; r < rows; r++) {
        float top = std::max(folded.top[r], next.top[r]);
        float keep = exp2(splat(folded.top[r] - top))[0], take = exp2(splat(next.top[r] - top))[0];
        folded.top[r] = top;
        folded.total[r] = folded.total[r] * keep + next.total[r] * take;
        for (int d = 0; d < head_dim; d += 16) {
            float* acc = folded.acc + r * head_dim + d;
            store(acc, fma(load(next.acc + r * head_dim + d), splat(take), load(acc) * keep));
        }
    }
}

// ---- bringing pages and queries into the form the tiles multiply ----

// T: compute dtype of q and out. Stored: dtype of the pages. Kind: how they are multiplied.
template <class T, class Stored>
struct Forms {
    using Kind = typename std::conditional<std::is_same<Stored, bf16>::value || std::is_same<Stored, int8_t>::value, Paired, Single>::type;
    using Lane = typename Kind::Lane;
    static constexpr bool IN_PLACE = std::is_same<Stored, bf16>::value || std::is_same<Stored, float>::value;
    static constexpr bool SCALED = std::is_same<Stored, int8_t>::value;
    static constexpr int WIDTH = Kind::WIDTH;

    static const Stored* page(const char* pages, const Problem& p, int64_t block, int64_t kv_head) {
        return reinterpret_cast<const Stored*>(pages) + (block * p.num_kv_heads + kv_head) * p.block_size * p.head_dim;
    }

    // `count` lanes of stored values as operands. A block of 8 slots is half a vector.
    static void widen(const Stored* from, Lane* to, int count) {
        if constexpr (IN_PLACE) {
            memcpy(static_cast<void*>(to), from, sizeof(Lane) * count);
            return;
        }
        for (int i = 0; i < count; i += 16) {
            int n = std::min(16, count - i);
            if constexpr (SCALED) {
                u16x16 raw = {};
                memcpy(&raw, from + 2 * i, 2 * n);
                u32x16 pair = __builtin_convertvector(raw, u32x16);
                f32x16 low = __builtin_convertvector((i32x16)(pair << 24) >> 24, f32x16);
                f32x16 high = __builtin_convertvector((i32x16)(pair << 16) >> 24, f32x16);
                // Integers up to 127 are exact in bf16: the upper half of the float.
                u32x16 lanes = ((u32x16)low >> 16) | ((u32x16)high & 0xffff0000u);
                memcpy(to + i, &lanes, 4 * n);
            } else {
                store_lanes(reinterpret_cast<float*>(to) + i, load_lanes(from + i, n), n);
            }
        }
    }

    // One query vector as `head_dim / WIDTH` lanes.
    static void query(const T* from, Lane* to, int head_dim) {
        for (int d = 0; d < head_dim; d += 16) {
            if constexpr (WIDTH == 2)
                store(reinterpret_cast<bf16*>(to) + d, load(from + d));
            else
                store(reinterpret_cast<float*>(to) + d, load(from + d));
        }
    }
};

// What one thread works in. Sizes in floats or lanes; all are 32 bit.
template <class Lane>
struct Workspace {
    Lane *queries, *weights, *keys, *values;
    float *scores, *keep, *sums, *key_scale, *value_scale;
    float* segment;

    static Workspace take(const Problem& p, int rows) {
        size_t d = p.head_dim, r = rows;
        size_t sizes[] = {r * d, r * CHUNK, d * CHUNK, d * CHUNK, r * CHUNK, r, r * 16, CHUNK, CHUNK, Partial::floats(rows, p.head_dim) * 2};
        size_t total = 0;
        for (size_t& size : sizes) total += size = (size + 15) / 16 * 16;
        char* at = static_cast<char*>(thread_scratch(total * 4, 0));
        char* places[10];
        for (int i = 0; i < 10; i++) places[i] = at, at += sizes[i] * 4;
        auto lanes = [&](int i) { return reinterpret_cast<Lane*>(places[i]); };
        auto floats = [&](int i) { return reinterpret_cast<float*>(places[i]); };
        return {lanes(0), lanes(1), lanes(2), lanes(3), floats(4), floats(5), floats(6), floats(7), floats(8), floats(9)};
    }
};

template <class T, class Stored>
struct Attention {
    using F = Forms<T, Stored>;
    using Kind = typename F::Kind;
    using Lane = typename F::Lane;
    static constexpr int WIDTH = F::WIDTH;
    const Problem& p;

    // Positions chunk_at .. chunk_at + 63 of the row, of which [visible, end) will be looked at by some query.
    // Blocks outside that range are not touched: their table entries may be stale.
    void bring(const int32_t* table, int64_t kv_head, int chunk_at, int visible, int end, const Workspace<Lane>& w,
               KeyChunk<Kind>& keys, ValueChunk<Kind>& values) const {
        int bs = p.block_size, hd = p.head_dim;
        int low = std::max(chunk_at, visible), high = std::min(chunk_at + CHUNK, end);
        int64_t fallback = table[low / bs];
        bool wide = bs % 16 == 0;
        keys.stride = F::IN_PLACE && wide ? bs : CHUNK;
        int step = wide ? 16 : 8;
        for (int i = 0; i < CHUNK; i += step) {
            int at = chunk_at + i, slot = at % bs;
            bool seen = at + step > low && at < high;
            int64_t block = seen ? table[at / bs] : fallback;
            const Stored* k = F::page(p.k_pages, p, block, kv_head) + int64_t(slot) * WIDTH;
            if constexpr (F::IN_PLACE) {
                if (wide) {
                    keys.keys[i / 16] = reinterpret_cast<const Lane*>(k);
                    continue;
                }
            }
            for (int d = 0; d < hd / WIDTH; d++) F::widen(k + int64_t(d) * bs * WIDTH, w.keys + d * CHUNK + i, step);
        }
        if (!(F::IN_PLACE && wide))
            for (int g = 0; g < LANE_GROUPS; g++) keys.keys[g] = w.keys + 16 * g;

        values.begin = (low - chunk_at) / WIDTH;
        values.end = (high - chunk_at + WIDTH - 1) / WIDTH;
        values.half_at_end = WIDTH == 2 && (high - chunk_at) % 2 == 1;
        for (int j = values.begin; j < values.end; j++) {
            int at = chunk_at + j * WIDTH;
            const Stored* v = F::page(p.v_pages, p, table[at / bs], kv_head) + int64_t(at % bs) * hd;
            if constexpr (F::IN_PLACE) {
                values.rows[j] = reinterpret_cast<const Lane*>(v);
            } else {
                F::widen(v, w.values + j * hd, hd);
                values.rows[j] = w.values + j * hd;
            }
        }
        if constexpr (F::SCALED) {
            for (int i = 0; i < CHUNK; i++) {
                int at = chunk_at + i;
                bool seen = at >= low && at < high;
                int64_t place = seen ? (table[at / bs] * int64_t(p.num_kv_heads) + kv_head) * bs + at % bs : 0;
                w.key_scale[i] = seen ? p.k_scale[place] : 0.0f;
                w.value_scale[i] = seen ? p.v_scale[place] : 0.0f;
            }
        }
    }

    // Scores of one query vector at position `at` become weights; top, sums and keep follow.
    void soften(float* scores, Lane* weights, int chunk_at, int at, const Workspace<Lane>& w, float& top, float* sums,
                float& keep) const {
        f32x16 s[LANE_GROUPS];
        f32x16 highest = splat(HIDDEN);
        int from = p.window > 0 ? at - p.window + 1 - chunk_at : 0, to = at - chunk_at;
        bool partly = from > 0 || to < CHUNK - 1;
        for (int g = 0; g < LANE_GROUPS; g++) {
            s[g] = load(scores + 16 * g);
            if constexpr (F::SCALED) s[g] = s[g] * load(w.key_scale + 16 * g);
            if (p.softcap > 0.0f)
                s[g] = tanh(s[g] * (p.scale / p.softcap)) * (p.softcap * LOG2_E);
            else
                s[g] = s[g] * (p.scale * LOG2_E);
            if (partly) {
                i32x16 lane = i32x16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + 16 * g;
                s[g] = (lane >= from) & (lane <= to) ? s[g] : splat(HIDDEN);
            }
            highest = vmax(highest, s[g]);
        }
        float new_top = std::max(top, lane_max(highest));
        keep = exp2(splat(top - new_top))[0];
        top = new_top;
        f32x16 sum = load(sums) * keep;
        for (int g = 0; g < LANE_GROUPS; g++) {
            f32x16 weight = exp2(s[g] - new_top);
            sum = sum + weight;
            if constexpr (F::SCALED) weight = weight * load(w.value_scale + 16 * g);
            if constexpr (WIDTH == 2)
                store(reinterpret_cast<bf16*>(weights) + 16 * g, weight);
            else
                store(reinterpret_cast<float*>(weights) + 16 * g, weight);
        }
        store(sums, sum);
    }

    int rows(const Tile& t) const { return t.num_queries * p.group(); }

    void load_queries(const Tile& t, int64_t kv_head, const Workspace<Lane>& w) const {
        int group = p.group();
        for (int r = 0; r < rows(t); r++) {
            const T* from = static_cast<const T*>(p.q) + int64_t(t.first_token + r / group) * p.q_stride + (kv_head * group + r % group) * p.head_dim;
            F::query(from, w.queries + int64_t(r) * (p.head_dim / WIDTH), p.head_dim);
        }
    }

    void run_segment(const Tile& t, int64_t kv_head, int segment, const Workspace<Lane>& w, Partial part) const {
        int n = rows(t), group = p.group(), hd = p.head_dim;
        const int32_t* table = p.block_table + t.row * p.table_stride;
        for (int r = 0; r < n; r++) part.top[r] = NOTHING_SEEN;
        memset(part.acc, 0, sizeof(float) * n * hd);
        memset(w.sums, 0, sizeof(float) * n * 16);
        int visible = t.first_visible(p), end = t.end();
        int first = std::max(segment * SEGMENT, visible / CHUNK * CHUNK);
        int last = std::min((segment + 1) * SEGMENT, end);
        KeyChunk<Kind> keys;
        ValueChunk<Kind> values;
        for (int chunk_at = first; chunk_at < last; chunk_at += CHUNK) {
            bring(table, kv_head, chunk_at, visible, end, w, keys, values);
            scores_of<Kind>(w.queries, n, keys, hd / WIDTH, w.scores);
            for (int r = 0; r < n; r++)
                soften(w.scores + r * CHUNK, w.weights + r * (CHUNK / WIDTH), chunk_at, t.first_at + r / group, w,
                       part.top[r], w.sums + r * 16, w.keep[r]);
            outputs_of<Kind>(w.weights, n, values, hd, w.keep, part.acc);
        }
        for (int r = 0; r < n; r++) part.total[r] = lane_sum(load(w.sums + r * 16));
    }

    void write_out(const Tile& t, int64_t kv_head, Partial part) const {
        int group = p.group(), hd = p.head_dim;
        for (int r = 0; r < rows(t); r++) {
            T* to = static_cast<T*>(p.out) + (int64_t(t.first_token + r / group) * p.num_heads + kv_head * group + r % group) * hd;
            float inverse = 1.0f / part.total[r];
            for (int d = 0; d < hd; d += 16) store(to + d, load(part.acc + r * hd + d) * inverse);
        }
    }

    // All segments of a tile by one thread.
    void run_tile(const Tile& t, int64_t kv_head) const {
        int n = rows(t), first = t.first_segment(p);
        Workspace<Lane> w = Workspace<Lane>::take(p, n);
        Partial folded = Partial::at(w.segment, n);
        Partial next = Partial::at(w.segment + Partial::floats(n, p.head_dim), n);
        load_queries(t, kv_head, w);
        run_segment(t, kv_head, first, w, folded);
        for (int s = 1; s < t.num_segments(p); s++) {
            run_segment(t, kv_head, first + s, w, next);
            fold(folded, next, n, p.head_dim);
        }
        write_out(t, kv_head, folded);
    }

    // One segment of a tile whose segments are shared out; the thread that ends the last one folds them all.
    void run_part(const Tile& t, int64_t kv_head, int segment, float* parts, std::atomic<int>& unfinished) const {
        int n = rows(t);
        size_t size = Partial::floats(n, p.head_dim);
        Workspace<Lane> w = Workspace<Lane>::take(p, n);
        load_queries(t, kv_head, w);
        run_segment(t, kv_head, t.first_segment(p) + segment, w, Partial::at(parts + size * segment, n));
        if (unfinished.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
        for (int s = 1; s < t.num_segments(p); s++)
            fold(Partial::at(parts, n), Partial::at(parts + size * s, n), n, p.head_dim);
        write_out(t, kv_head, Partial::at(parts, n));
    }
};

// ---- sharing the work ----

int make_tiles(const Problem& p, Tile* tiles) {
    int per_tile = std::max(1, TILE_QUERY_VECTORS / p.group()), count = 0;
    for (int row = 0; row < p.num_rows; row++) {
        int begin = p.query_start[row], queries = p.query_start[row + 1] - begin;
        for (int i = 0; i < queries; i += per_tile)
            tiles[count++] = {row, begin + i, std::min(per_tile, queries - i), p.seq_lens[row] - queries + i};
    }
    // The dearest first, so that no thread is left with a long one at the end.
    std::sort(tiles, tiles + count, [&](const Tile& a, const Tile& b) { return a.cost(p) > b.cost(p); });
    return count;
}

template <class T, class Stored>
void attend(const Problem& p, int num_tokens, int threads) {
    Attention<T, Stored> work{p};
    Tile* tiles = static_cast<Tile*>(thread_scratch(sizeof(Tile) * num_tokens, 1));
    int count = make_tiles(p, tiles);
    int64_t products = 0;
    for (int i = 0; i < count; i++) products += tiles[i].cost(p) * p.num_heads * p.head_dim;
    threads = threads_for(products / 4, threads);
    std::atomic<int> next{0};
    // Few tiles cannot keep the threads busy: then their segments are shared out too. Bits do not depend on it.
    if (threads > 1 && count * p.num_kv_heads < 4 * threads) {
        int units = 0;
        size_t floats = 0;
        for (int i = 0; i < count; i++) {
            units += tiles[i].num_segments(p) * p.num_kv_heads;
            floats += Partial::floats(work.rows(tiles[i]), p.head_dim) * tiles[i].num_segments(p) * p.num_kv_heads;
        }
        float* parts = static_cast<float*>(thread_scratch(floats * sizeof(float), 2));
        auto* unfinished = static_cast<std::atomic<int>*>(thread_scratch(sizeof(std::atomic<int>) * count * p.num_kv_heads, 3));
        for (int i = 0; i < count * p.num_kv_heads; i++) new (&unfinished[i]) std::atomic<int>(tiles[i / p.num_kv_heads].num_segments(p));
        parallel(std::min(threads, units), [&](int, int) {
            for (int unit; (unit = next.fetch_add(1)) < units;) {
                int i = 0, left = unit;
                float* at = parts;
                while (left >= tiles[i].num_segments(p) * p.num_kv_heads) {
                    left -= tiles[i].num_segments(p) * p.num_kv_heads;
                    at += Partial::floats(work.rows(tiles[i]), p.head_dim) * tiles[i].num_segments(p) * p.num_kv_heads;
                    i++;
                }
                int head = left / tiles[i].num_segments(p), segment = left % tiles[i].num_segments(p);
                at += Partial::floats(work.rows(tiles[i]), p.head_dim) * tiles[i].num_segments(p) * head;
                work.run_part(tiles[i], head, segment, at, unfinished[i * p.num_kv_heads + head]);
            }
        });
        return;
    }
    parallel(threads, [&](int, int) {
        for (int unit; (unit = next.fetch_add(1)) < count * p.num_kv_heads;)
            work.run_tile(tiles[unit / p.num_kv_heads], unit % p.num_kv_heads);
    });
}

}  // namespace

// q [num_tokens, H, D] (tokens q_stride elements apart) -> out [num_tokens, H, D]. stored: dtype of the pages, `dtype`
// or I8. D a multiple of 16, block_size a multiple of 8. seq_lens counts the tokens in the cache, this step's included.
PAGODA_EXPORT void pagoda_attention(int dtype, int stored, const void* q, void* out, const void* k_pages,
                                    const void* v_pages, const float* k_scale, const float* v_scale,
                                    const int32_t* query_start, const int32_t* seq_lens, const int32_t* block_table,
                                    int64_t table_stride, int64_t q_stride, int num_tokens, int num_rows,
                                    int num_heads, int num_kv_heads, int head_dim, int block_size, float scale,
                                    int window, float softcap, int threads) {
    Problem p{q, out, static_cast<const char*>(k_pages), static_cast<const char*>(v_pages), k_scale, v_scale,
              query_start, seq_lens, block_table, table_stride, q_stride, num_rows, num_heads, num_kv_heads, head_dim,
              block_size, window, scale, softcap};
    if (stored == I8) {
        auto run = dtype == F32 ? attend<float, int8_t> : dtype == BF16 ? attend<bf16, int8_t> : attend<f16, int8_t>;
        run(p, num_tokens, threads);
    } else {
        auto run = dtype == F32 ? attend<float, float> : dtype == BF16 ? attend<bf16, bf16> : attend<f16, f16>;
        run(p, num_tokens, threads);
    }
}
