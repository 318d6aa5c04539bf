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
#include "widen.h"

namespace {

constexpr int SEGMENT = 256;
constexpr int TILE_QUERY_VECTORS = 48;  // query vectors (queries x heads of a KV head) that share a pass
constexpr int FEW_VECTORS = 12;  // tiles of more query vectors compute longer than their pages take to come
constexpr size_t MOST_SHARED_BYTES = 64 << 20;  // of partial results of segments that are shared out
constexpr float NOTHING_SEEN = -1e30f;  // running maximum before any position: finite, so that differences are numbers
constexpr float HIDDEN = -1e37f;        // score of a position out of sight: its weight comes out as exactly 0

struct Problem {
    int dtype;
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

// Calls body with an element of the compute dtype.
template <class Body>
void by_dtype(int dtype, Body&& body) {
    switch (dtype) {
        case F32: return body(float());
        case BF16: return body(bf16());
        default: return body(f16());
    }
}

// Consecutive queries of one row. `first_at`: position of the first one.
struct Tile {
    int row, first_token, num_queries, first_at;
    int first_visible(const Problem& p) const { return p.window > 0 ? std::max(0, first_at - p.window + 1) : 0; }
    int end() const { return first_at + num_queries; }  // one past the last position any query sees
    int first_segment(const Problem& p) const { return first_visible(p) / SEGMENT; }
    int num_segments(const Problem& p) const { return (end() - 1) / SEGMENT - first_segment(p) + 1; }
    int64_t cost(const Problem& p) const { return int64_t(end() - first_visible(p)) * (num_queries + 1); }
};

// vdpbf16ps takes a denormal sum for 0, also where it adds nothing; what ends as one would depend on what others saw.
inline f32x16 without_denormals(f32x16 v) { return magnitude_bits(v) < 0x00800000 ? f32x16{} : v; }

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

// Stored: dtype of the pages. Kind: how they are multiplied.
template <class Stored>
struct Forms {
    static constexpr bool PAIRED = PageLayout<Stored>::PAIR == 2;
    using Kind = typename std::conditional<PAIRED, Paired, Single>::type;
    using Lane = typename Kind::Lane;
    static constexpr bool IN_PLACE = std::is_same<Stored, bf16>::value || std::is_same<Stored, float>::value;
    static constexpr bool SCALED = std::is_same<Stored, int8_t>::value;
    static constexpr int WIDTH = Kind::WIDTH;

    static const Stored* page(const char* pages, const Problem& p, int64_t block, int64_t kv_head) {
        return reinterpret_cast<const Stored*>(pages) + (block * p.num_kv_heads + kv_head) * p.block_size * p.head_dim;
    }

    // N lanes of stored values as operands. A block of 8 slots is half a vector.
    template <int N>
    static void widen(const Stored* from, Lane* to) {
        if constexpr (IN_PLACE) {
            memcpy(static_cast<void*>(to), from, sizeof(Lane) * N);
        } else if constexpr (SCALED) {
            int8_t codes[32] = {};
            memcpy(codes, from, 2 * N);
            u32x16 lanes = widen_32(codes);
            memcpy(to, &lanes, 4 * N);
        } else {
            store_lanes(reinterpret_cast<float*>(to), load_lanes(from, N), N);
        }
    }

    // One query vector as `head_dim / WIDTH` lanes.
    template <class T>
    static void query(const T* from, Lane* to, int head_dim) {
        for (int d = 0; d < head_dim; d += 16) {
            if constexpr (WIDTH == 2)
                store(reinterpret_cast<bf16*>(to) + d, load(from + d));
            else
                store(reinterpret_cast<float*>(to) + d, load(from + d));
        }
    }
};

// KV heads [first, first + count).
struct Heads {
    int first, count;
};
// What a thread claims: heads of a tile, which it walks through together.
struct Unit {
    const Tile* tile;
    Heads heads;
};

// What one thread works in. Sizes in floats or lanes; all are 32 bit.
template <class Lane>
struct Workspace {
    Lane *queries, *weights, *keys, *values;  // queries: a tile's for each head
    float *scores, *keep, *new_top, *sums, *key_scale, *value_scale, *partials;
    int rows, head_dim, heads;

    static Workspace take(const Problem& p, int rows, int heads) {
        size_t d = p.head_dim, r = rows, h = heads;
        size_t partials = Partial::floats(rows, p.head_dim) * 2 * h;
        size_t sizes[] = {h * r * d, r * CHUNK, d * CHUNK, d * CHUNK, r * CHUNK, r, r, h * r * 16, CHUNK, CHUNK, partials};
        size_t total = 0;
        for (size_t& size : sizes) total += size = (size + 15) / 16 * 16;
        char* at = static_cast<char*>(thread_scratch(total * 4, 0));
        char* places[11];
        for (int i = 0; i < 11; i++) places[i] = at, at += sizes[i] * 4;
        auto lanes = [&](int i) { return reinterpret_cast<Lane*>(places[i]); };
        auto floats = [&](int i) { return reinterpret_cast<float*>(places[i]); };
        return {lanes(0),  lanes(1),  lanes(2),  lanes(3),  floats(4),  floats(5), floats(6),
                floats(7), floats(8), floats(9), floats(10), rows,      p.head_dim, heads};
    }
    Lane* queries_of(int head) const { return queries + size_t(head) * rows * head_dim; }
    float* sums_of(int head) const { return sums + size_t(head) * rows * 16; }
    Partial folded(int head) const { return partial(head); }
    Partial next(int head) const { return partial(heads + head); }

  private:
    Partial partial(int index) const { return Partial::at(partials + Partial::floats(rows, head_dim) * index, rows); }
};

template <class Stored>
struct Attention {
    using F = Forms<Stored>;
    using Kind = typename F::Kind;
    using Lane = typename F::Lane;
    static constexpr int WIDTH = F::WIDTH;
    const Problem& p;

    // Positions chunk_at .. chunk_at + 63 of the row, of which [visible, end) will be looked at by some query.
    // Blocks outside that range are not touched: their table entries may be stale.
    void bring(const int32_t* table, int64_t kv_head, int chunk_at, int visible, int end, const Workspace<Lane>& w,
               KeyChunk<Kind>& keys, ValueChunk<Kind>& values) const {
        int bs = p.block_size, low = std::max(chunk_at, visible), high = std::min(chunk_at + CHUNK, end);
        values.begin = (low - chunk_at) / WIDTH;
        values.end = (high - chunk_at + WIDTH - 1) / WIDTH;
        values.half_at_end = WIDTH == 2 && (high - chunk_at) % 2 == 1;
        if constexpr (F::SCALED) {
            bring_scales(table, kv_head, chunk_at, low, high, w);
            if (bs % 16 == 0 && CHUNK % bs == 0) return bring_whole(table, kv_head, chunk_at, low, high, w, keys, values);
        }
        if (bs % 16 == 0)
            bring_keys<16>(table, kv_head, chunk_at, low, high, w, keys);
        else
            bring_keys<8>(table, kv_head, chunk_at, low, high, w, keys);
        bring_values(table, kv_head, chunk_at, w, values);
    }

    void bring_scales(const int32_t* table, int64_t kv_head, int chunk_at, int low, int high,
                      const Workspace<Lane>& w) const {
        memset(w.key_scale, 0, sizeof(float) * CHUNK);
        memset(w.value_scale, 0, sizeof(float) * CHUNK);
        int bs = p.block_size;
        for (int index = low / bs, at = low; at < high; at = ++index * bs) {
            int count = std::min((index + 1) * bs, high) - at;
            int64_t place = (table[index] * int64_t(p.num_kv_heads) + kv_head) * bs + at % bs;
            memcpy(w.key_scale + at - chunk_at, p.k_scale + place, sizeof(float) * count);
            memcpy(w.value_scale + at - chunk_at, p.v_scale + place, sizeof(float) * count);
        }
    }

    // int8 blocks of 16, 32 or 64 slots: all of a block is widened in one run, and lies then as it does in its page.
    void bring_whole(const int32_t* table, int64_t kv_head, int chunk_at, int low, int high, const Workspace<Lane>& w,
                     KeyChunk<Kind>& keys, ValueChunk<Kind>& values) const {
        int bs = p.block_size, hd = p.head_dim;
        for (int i = 0; i < CHUNK; i += bs) {
            bool seen = chunk_at + i + bs > low && chunk_at + i < high;
            int64_t block = table[(seen ? chunk_at + i : low) / bs];
            Lane *k = w.keys + i * (hd / WIDTH), *v = w.values + i * (hd / WIDTH);
            if (seen) {
                widen_int8(F::page(p.k_pages, p, block, kv_head), bs * hd, k);
                widen_int8(F::page(p.v_pages, p, block, kv_head), bs * hd, v);
            } else {
                memset(k, 0, sizeof(Lane) * bs * (hd / WIDTH));
            }
            for (int g = 0; g < bs / 16; g++) keys.keys[i / 16 + g] = k + 16 * g;
            for (int j = 0; j < bs / WIDTH; j++) values.rows[i / WIDTH + j] = v + j * hd;
        }
        keys.stride = bs;
    }

    // STEP slots side by side lie in one block.
    template <int STEP>
    void bring_keys(const int32_t* table, int64_t kv_head, int chunk_at, int low, int high, const Workspace<Lane>& w,
                    KeyChunk<Kind>& keys) const {
        constexpr bool DIRECT = F::IN_PLACE && STEP == 16;
        int bs = p.block_size, index = chunk_at / bs, slot = chunk_at % bs;
        int64_t seen_block = table[low / bs];  // stands in for blocks that nobody sees
        keys.stride = DIRECT ? bs : CHUNK;
        for (int i = 0; i < CHUNK; i += STEP) {
            int at = chunk_at + i;
            int64_t block = at + STEP > low && at < high ? table[index] : seen_block;
            const Stored* k = F::page(p.k_pages, p, block, kv_head) + slot * WIDTH;
            if constexpr (DIRECT) {
                keys.keys[i / 16] = reinterpret_cast<const Lane*>(k);
            } else {
                keys.keys[i / 16] = w.keys + i / 16 * 16;
                for (int d = 0; d < p.head_dim / WIDTH; d++, k += int64_t(bs) * WIDTH)
                    F::template widen<STEP>(k, w.keys + d * CHUNK + i);
            }
            slot += STEP;
            if (slot == bs) slot = 0, index++;
        }
    }

    void bring_values(const int32_t* table, int64_t kv_head, int chunk_at, const Workspace<Lane>& w,
                      ValueChunk<Kind>& values) const {
        int bs = p.block_size, hd = p.head_dim;
        int first = chunk_at + values.begin * WIDTH, index = first / bs, slot = first % bs;
        for (int j = values.begin; j < values.end; index++, slot = 0) {
            const Stored* v = F::page(p.v_pages, p, table[index], kv_head) + int64_t(slot) * hd;
            int stop = std::min(values.end, j + (bs - slot) / WIDTH);
            for (; j < stop; j++, v += WIDTH * hd) {
                if constexpr (F::IN_PLACE) {
                    values.rows[j] = reinterpret_cast<const Lane*>(v);
                } else {
                    for (int d = 0; d < hd; d += 16) F::template widen<16>(v + d * WIDTH, w.values + j * hd + d);
                    values.rows[j] = w.values + j * hd;
                }
            }
        }
    }

    // What scores are multiplied by to become exponents of 2. A soft cap has brought them there already.
    float exponent_scale() const { return p.softcap > 0.0f ? 1.0f : p.scale * LOG2_E; }

    // Scales, caps and masks one query vector's scores where there is need; returns the largest exponent.
    float finish_scores(float* scores, int chunk_at, int at, const Workspace<Lane>& w) const {
        int from = p.window > 0 ? at - p.window + 1 - chunk_at : 0, to = at - chunk_at;
        bool partly = from > 0 || to < CHUNK - 1;
        f32x16 highest = splat(HIDDEN);
        for (int g = 0; g < LANE_GROUPS; g++) {
            f32x16 s = load(scores + 16 * g);
            if constexpr (F::SCALED) s = s * load(w.key_scale + 16 * g);
            if (p.softcap > 0.0f) s = tanh(s * (p.scale / p.softcap)) * (p.softcap * LOG2_E);
            if (partly) {
                i32x16 lane = i32x16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + 16 * g;
                s = (lane >= from) & (lane <= to) ? s : splat(HIDDEN);
            }
            if (F::SCALED || p.softcap > 0.0f || partly) store(scores + 16 * g, s);
            highest = vmax(highest, s);
        }
        return lane_max(highest) * exponent_scale();
    }

    // Scores of one query vector become weights, and are added to its running sums.
    void weigh(const float* scores, Lane* weights, float top, float keep, float* sums, const Workspace<Lane>& w) const {
        f32x16 sum = load(sums) * keep;
        for (int g = 0; g < LANE_GROUPS; g++) {
            f32x16 weight = exp2(fma(load(scores + 16 * g), splat(exponent_scale()), splat(-top)));
            sum = sum + weight;
            if constexpr (F::SCALED) weight = weight * load(w.value_scale + 16 * g);
            if constexpr (WIDTH == 2)
                store(reinterpret_cast<bf16*>(weights) + 16 * g, weight);
            else
                store(reinterpret_cast<float*>(weights) + 16 * g, weight);
        }
        store(sums, sum);
    }

    // Online softmax of a chunk for all rows of a tile: scores to weights, with `keep` for what was summed before.
    void soften(const Tile& t, int chunk_at, const Workspace<Lane>& w, Partial part, float* sums) const {
        int n = rows(t), group = p.group();
        for (int r = 0; r < n; r++) {
            float top = finish_scores(w.scores + r * CHUNK, chunk_at, t.first_at + r / group, w);
            w.new_top[r] = std::max(part.top[r], top);
        }
        for_lanes(n, [&](int64_t r, int lanes) {
            f32x16 top = load_lanes(w.new_top + r, lanes);
            store_lanes(w.keep + r, exp2(load_lanes(part.top + r, lanes) - top), lanes);
            store_lanes(part.top + r, top, lanes);
        });
        for (int r = 0; r < n; r++)
            weigh(w.scores + r * CHUNK, w.weights + r * (CHUNK / WIDTH), part.top[r], w.keep[r], sums + r * 16, w);
    }

    // The blocks of one chunk; of a block that holds several chunks, all with the first one that is met.
    void look_ahead(const Unit& unit, int chunk_at, bool first_met, PagesAhead& ahead) const {
        const Tile& t = *unit.tile;
        Heads heads = unit.heads;
        const int32_t* table = p.block_table + t.row * p.table_stride;
        int bs = p.block_size, low = std::max(chunk_at, t.first_visible(p)), high = std::min(chunk_at + CHUNK, t.end());
        for (int index = first_met ? low / bs : (low + bs - 1) / bs; index * bs < high; index++) {
            int64_t place = (table[index] * int64_t(p.num_kv_heads) + heads.first) * bs, slots = int64_t(heads.count) * bs;
            int64_t slot_bytes = int64_t(p.head_dim) * sizeof(Stored);
            ahead.add(p.k_pages + place * slot_bytes, slots * slot_bytes);
            ahead.add(p.v_pages + place * slot_bytes, slots * slot_bytes);
            if constexpr (F::SCALED) {
                ahead.add(p.k_scale + place, slots * sizeof(float));
                ahead.add(p.v_scale + place, slots * sizeof(float));
            }
        }
    }

    int rows(const Tile& t) const { return t.num_queries * p.group(); }

    void load_queries(const Tile& t, Heads heads, const Workspace<Lane>& w) const {
        by_dtype(p.dtype, [&](auto element) {
            for (int h = 0; h < heads.count; h++)
                load_queries_of<decltype(element)>(t, heads.first + h, w.queries_of(h));
        });
    }
    template <class T>
    void load_queries_of(const Tile& t, int64_t kv_head, Lane* to) const {
        int group = p.group();
        for (int r = 0; r < rows(t); r++) {
            int64_t token = t.first_token + r / group, head = kv_head * group + r % group;
            const T* from = static_cast<const T*>(p.q) + token * p.q_stride + head * p.head_dim;
            F::query(from, to + int64_t(r) * (p.head_dim / WIDTH), p.head_dim);
        }
    }

    // A segment's sums; part(h) is where those of the unit's h-th head go. What this thread reads next is asked for on the
    // way: the unit's positions below `walked_until`, and then the beginning of `then`.
    template <class PartOf>
    void run_segment(const Unit& unit, int segment, const Workspace<Lane>& w, PartOf&& part, int walked_until,
                     const Unit* then) const {
        const Tile& t = *unit.tile;
        Heads heads = unit.heads;
        PagesAhead ahead;
        int n = rows(t), hd = p.head_dim;
        const int32_t* table = p.block_table + t.row * p.table_stride;
        for (int h = 0; h < heads.count; h++) {
            for (int r = 0; r < n; r++) part(h).top[r] = NOTHING_SEEN;
            memset(part(h).acc, 0, sizeof(float) * n * hd);
            memset(w.sums_of(h), 0, sizeof(float) * n * 16);
        }
        int visible = t.first_visible(p), end = t.end();
        int first = std::max(segment * SEGMENT, visible / CHUNK * CHUNK);
        int last = std::min((segment + 1) * SEGMENT, end);
        KeyChunk<Kind> keys;
        ValueChunk<Kind> values;
        for (int chunk_at = first; chunk_at < last; chunk_at += CHUNK) {
            ahead.clear();
            if (n <= FEW_VECTORS) {
                if (chunk_at + CHUNK < walked_until)
                    look_ahead(unit, chunk_at + CHUNK, false, ahead);
                else if (then != nullptr)
                    look_ahead(*then, then->tile->first_visible(p) / CHUNK * CHUNK, true, ahead);
            }
            for (int h = 0; h < heads.count; h++) {
                bring(table, heads.first + h, chunk_at, visible, end, w, keys, values);
                scores_of<Kind>(w.queries_of(h), n, keys, hd / WIDTH, w.scores, ahead);
                soften(t, chunk_at, w, part(h), w.sums_of(h));
                outputs_of<Kind>(w.weights, n, values, hd, w.keep, part(h).acc, ahead);
            }
            ahead.ask_rest();
        }
        for (int h = 0; h < heads.count; h++) {
            for (int r = 0; r < n; r++) part(h).total[r] = lane_sum(load(w.sums_of(h) + r * 16));
            for (int i = 0; i < n * hd; i += 16) store(part(h).acc + i, without_denormals(load(part(h).acc + i)));
        }
    }

    void write_out(const Tile& t, int64_t kv_head, Partial part) const {
        by_dtype(p.dtype, [&](auto element) { write_out_as<decltype(element)>(t, kv_head, part); });
    }
    template <class T>
    void write_out_as(const Tile& t, int64_t kv_head, Partial part) const {
        int group = p.group(), hd = p.head_dim;
        for (int r = 0; r < rows(t); r++) {
            int64_t token = t.first_token + r / group, head = kv_head * group + r % group;
            T* to = static_cast<T*>(p.out) + (token * p.num_heads + head) * hd;
            float inverse = 1.0f / part.total[r];
            // Folded with a segment that saw nothing, a -0 has become +0: it always does.
            for (int d = 0; d < hd; d += 16) store(to + d, load(part.acc + r * hd + d) * inverse + 0.0f);
        }
    }

    // All segments of a unit. The same thread will run `then` next.
    void run_unit(const Unit& unit, const Unit* then) const {
        const Tile& t = *unit.tile;
        Heads heads = unit.heads;
        int n = rows(t), first = t.first_segment(p);
        auto w = Workspace<Lane>::take(p, n, heads.count);
        load_queries(t, heads, w);
        for (int s = 0; s < t.num_segments(p); s++) {
            auto part = [&](int h) { return s == 0 ? w.folded(h) : w.next(h); };
            run_segment(unit, first + s, w, part, t.end(), then);
            if (s == 0) continue;
            for (int h = 0; h < heads.count; h++) fold(w.folded(h), w.next(h), n, p.head_dim);
        }
        for (int h = 0; h < heads.count; h++) write_out(t, heads.first + h, w.folded(h));
    }

    // One segment of a tile whose segments are shared out; the thread that ends the last one folds them all.
    void run_part(const Tile& t, int kv_head, int segment, float* parts, std::atomic<int>& unfinished) const {
        int n = rows(t);
        size_t size = Partial::floats(n, p.head_dim);
        auto w = Workspace<Lane>::take(p, n, 1);
        Heads heads{kv_head, 1};
        load_queries(t, heads, w);
        auto part = [&](int) { return Partial::at(parts + size * segment, n); };
        int index = t.first_segment(p) + segment;
        run_segment({&t, heads}, index, w, part, std::min((index + 1) * SEGMENT, t.end()), nullptr);
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

template <class Stored>
void attend(const Problem& p, int num_tokens, int threads) {
    Attention<Stored> work{p};
    Tile* tiles = static_cast<Tile*>(thread_scratch(sizeof(Tile) * num_tokens, 1));
    int count = make_tiles(p, tiles);
    int64_t products = 0;
    for (int i = 0; i < count; i++) products += tiles[i].cost(p) * p.num_heads * p.head_dim;
    threads = threads_for(products / 4, threads);
    std::atomic<int> next{0};
    int num_segments = 0;
    size_t floats = 0;
    for (int i = 0; i < count; i++) {
        num_segments += tiles[i].num_segments(p) * p.num_kv_heads;
        floats += Partial::floats(work.rows(tiles[i]), p.head_dim) * tiles[i].num_segments(p) * p.num_kv_heads;
    }
    // Few tiles cannot keep the threads busy: then their segments are shared out too. Bits do not depend on it.
    if (threads > 1 && count * p.num_kv_heads < 4 * threads && floats * sizeof(float) <= MOST_SHARED_BYTES) {
        int units = num_segments;
        float* parts = static_cast<float*>(thread_scratch(floats * sizeof(float), 2));
        int heads = count * p.num_kv_heads;
        auto* unfinished = static_cast<std::atomic<int>*>(thread_scratch(sizeof(std::atomic<int>) * heads, 3));
        for (int i = 0; i < heads; i++)
            new (&unfinished[i]) std::atomic<int>(tiles[i / p.num_kv_heads].num_segments(p));
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
    // A tile of few query vectors waits for memory, and takes the heads of its blocks together, as they lie there.
    bool together = count >= 4 * threads;
    Unit* units = static_cast<Unit*>(thread_scratch(sizeof(Unit) * count * p.num_kv_heads, 2));
    int num_units = 0;
    for (int i = 0; i < count; i++) {
        int heads = together && work.rows(tiles[i]) <= FEW_VECTORS ? p.num_kv_heads : 1;
        for (int head = 0; head < p.num_kv_heads; head += heads) units[num_units++] = {&tiles[i], {head, heads}};
    }
    parallel(threads, [&](int, int) {
        int upcoming = next.fetch_add(1);  // claimed one ahead: its memory is asked for while the one before computes
        while (upcoming < num_units) {
            const Unit& unit = units[upcoming];
            upcoming = next.fetch_add(1);
            work.run_unit(unit, upcoming < num_units ? &units[upcoming] : nullptr);
        }
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
    Problem p{dtype, q, out, static_cast<const char*>(k_pages), static_cast<const char*>(v_pages), k_scale, v_scale,
              query_start, seq_lens, block_table, table_stride, q_stride, num_rows, num_heads, num_kv_heads, head_dim,
              block_size, window, scale, softcap};
    auto run = stored == I8     ? attend<int8_t>
               : stored == F32  ? attend<float>
               : stored == BF16 ? attend<bf16>
                                : attend<f16>;
    run(p, num_tokens, threads);
}
