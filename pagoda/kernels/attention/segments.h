// Attention of a tile: online softmax over the chunks of a segment; segments are combined from left to right.
#pragma once

#include "chunks.h"

constexpr float NOTHING_SEEN = -1e30f;  // running maximum before any position: finite, so that differences are not NaN
constexpr float HIDDEN = -1e37f;        // score of a masked position: its weight is exactly 0

template <class Stored>
struct Attention {
    using F = Forms<Stored>;
    using Kind = typename F::Kind;
    using Lane = typename F::Lane;
    using Word = typename F::Word;
    static constexpr int WIDTH = F::WIDTH;
    const Problem& p;
    Context<Stored> context{p};

    // Whether finished scores are exponents of 2, and not only once multiplied by exponent_scale().
    bool finishes_exponents() const { return p.softcap > 0.0f || p.bias != nullptr; }
    float exponent_scale() const { return finishes_exponents() ? 1.0f : p.scale * LOG2_E; }

    // The bias of 16 keys, the first of which is `distance` positions after the query.
    f32x16 bias_of(const float* bias, int distance) const {
        int most = p.bias_reach;
        if (distance >= -most && distance + 15 <= most) return load(bias + most + distance);
        float each[16];
        for (int i = 0; i < 16; i++) each[i] = bias[most + std::clamp(distance + i, -most, most)];
        return load(each);
    }

    // Scale, cap, add the bias and mask one query vector's scores as needed; return the largest exponent.
    float finish_scores(float* scores, int groups, int chunk_at, const Tile& t, int query, int64_t head,
                        const Workspace<Kind>& w) const {
        int at = t.first_at + query, from = p.first_visible(at) - chunk_at;
        int to = p.last_visible(token_of(t, query), at, t.length) - chunk_at;
        bool partly = from > 0 || to < CHUNK - 1;
        f32x16 highest = splat(HIDDEN);
        for (int g = 0; g < groups; g++) {
            f32x16 s = load(scores + 16 * g);
            if constexpr (F::SCALED) s = s * load(w.key_scale + 16 * g);
            if (p.softcap > 0.0f)
                s = tanh(s * (p.scale / p.softcap)) * (p.softcap * LOG2_E);
            else if (p.bias != nullptr)
                s = s * (p.scale * LOG2_E);
            if (p.bias != nullptr) {
                const float* bias = p.bias + head * (2 * p.bias_reach + 1);
                s = fma(bias_of(bias, chunk_at + 16 * g - at), splat(LOG2_E), s);
            }
            if (partly) {
                i32x16 lane = lane_numbers() + 16 * g;
                s = select((lane >= from) & (lane <= to), s, splat(HIDDEN));
            }
            if (F::SCALED || finishes_exponents() || partly) store(scores + 16 * g, s);
            highest = vmax(highest, s);
        }
        return lane_max(highest) * exponent_scale();
    }

    // Turn one query vector's scores into weights and add them to its running sums.
    void weigh(const float* scores, int groups, Word* weights, float top, float keep, float* sums,
               const Workspace<Kind>& w) const {
        f32x16 sum = load(sums) * keep;
        for (int g = 0; g < groups; g++) {
            f32x16 weight = exp2(fma(load(scores + 16 * g), splat(exponent_scale()), splat(-top)));
            sum = sum + weight;
            if constexpr (F::SCALED) weight = weight * load(w.value_scale + 16 * g);
            Kind::put(weights, 16 * g, weight);
        }
        store(sums, sum);
    }

    // Online softmax of a chunk for all rows of a tile: scores to weights, with `keep` for what was summed before.
    void online_softmax(const Tile& t, int64_t kv_head, int chunk_at, int groups, const Workspace<Kind>& w, Partial part,
                        float* sums) const {
        int n = rows(t), group = p.group();
        for (int r = 0; r < n; r++) {
            int64_t head = kv_head * group + r % group;
            float top = finish_scores(w.scores + r * CHUNK, groups, chunk_at, t, r / group, head, w);
            w.new_top[r] = std::max(part.top[r], top);
        }
        for_lanes(n, [&](int64_t r, int lanes) {
            f32x16 top = load_lanes(w.new_top + r, lanes);
            store_lanes(w.keep + r, exp2(load_lanes(part.top + r, lanes) - top), lanes);
            store_lanes(part.top + r, top, lanes);
        });
        for (int r = 0; r < n; r++)
            weigh(w.scores + r * CHUNK, groups, w.weights + r * WEIGHT_WORDS<Kind>, part.top[r], w.keep[r], sums + r * 16, w);
    }

    int rows(const Tile& t) const { return t.num_queries * p.group(); }
    int token_of(const Tile& t, int query) const { return p.tokens[t.first + query]; }
    Partial kept(const Tile& t, int kv_head) const {
        size_t rows = size_t(p.num_kept) * p.group();
        Partial of_head = Partial::at(p.kept + kv_head * Partial::floats(rows, p.head_dim), rows);
        return of_head.from(size_t(t.kept) * p.group(), p.head_dim);
    }

    void load_queries(const Tile& t, Heads heads, const Workspace<Kind>& w) const {
        by_dtype(p.dtype, [&](auto element) {
            for (int h = 0; h < heads.count; h++)
                load_queries_of<decltype(element)>(t, heads.first + h, w.queries_of(h), w);
        });
    }
    template <class T>
    void load_queries_of(const Tile& t, int64_t kv_head, Word* to, const Workspace<Kind>& w) const {
        int group = p.group();
        int64_t depth = p.key_dim() / WIDTH, words = words_of<Kind>(depth);
        Word* in_order = reinterpret_cast<Word*>(w.partials);  // used by no segment yet; rope_dim is at most head_dim
        for (int r = 0; r < rows(t); r++) {
            int64_t token = token_of(t, r / group), head = kv_head * group + r % group;
            const T* from = static_cast<const T*>(p.q) + token * p.q_stride + head * p.head_dim;
            F::query(from, in_order + r * words, p.head_dim);
            if (p.rope_dim > 0) {
                const T* rope = static_cast<const T*>(p.q_rope) + token * p.q_rope_stride + head * p.rope_dim;
                F::query(rope, in_order + r * words + words_of<Kind>(p.head_dim / WIDTH), p.rope_dim);
            }
        }
        order_by_tile<Kind>(to, rows(t), depth, [&](int r, int64_t i) { return in_order[r * words + i]; });
    }

    // Compute a segment's sums; part(h) receives those of the unit's h-th head. Meanwhile prefetch what this thread reads
    // next: the unit's positions below `walked_until`, then the beginning of `upcoming`.
    template <class PartOf>
    void run_segment(const Unit& unit, int segment, const Workspace<Kind>& w, PartOf&& part, int walked_until,
                     const Unit* upcoming) const {
        const Tile& t = *unit.tile;
        Heads heads = unit.heads;
        PagePrefetcher ahead;
        int n = rows(t), hd = p.head_dim;
        const int32_t* table = p.block_table + t.row * p.table_stride;
        for (int h = 0; h < heads.count; h++) {
            Partial sums = part(h);
            std::fill(sums.top, sums.top + n, NOTHING_SEEN);
            memset(sums.acc, 0, sizeof(float) * n * hd);
            memset(w.sums_of(h), 0, sizeof(float) * n * 16);
        }
        int first = std::max(segment * SEGMENT, t.begin / CHUNK * CHUNK);
        int last = std::min((segment + 1) * SEGMENT, t.end);
        KeyChunk<Kind> keys;
        ValueChunk<Kind> values;
        for (int chunk_at = first; chunk_at < last; chunk_at += CHUNK) {
            ahead.clear();
            if (chunk_at + CHUNK < walked_until)
                context.prefetch_chunk(unit, chunk_at + CHUNK, false, ahead);
            else if (upcoming != nullptr)
                context.prefetch_chunk(*upcoming, upcoming->tile->begin / CHUNK * CHUNK, true, ahead);
            for (int h = 0; h < heads.count; h++) {
                Partial sums = part(h);
                context.load_chunk(table, heads.first + h, chunk_at, t.begin, t.end, w, keys, values);
                scores_of<Kind>(w.queries_of(h), n, keys, p.key_dim() / WIDTH, w.scores, ahead);
                online_softmax(t, heads.first + h, chunk_at, keys.groups, w, sums, w.sums_of(h));
                outputs_of<Kind>(w.weights, n, values, hd, w.keep, sums.acc, ahead);
            }
            ahead.issue_rest();
        }
        for (int h = 0; h < heads.count; h++) {
            Partial sums = part(h);
            for (int r = 0; r < n; r++) sums.total[r] = lane_sum(load(w.sums_of(h) + r * 16));
            for (int i = 0; i < n * hd; i += 16) store(sums.acc + i, without_denormals(load(sums.acc + i)));
        }
    }

    void write_out(const Tile& t, int64_t kv_head, Partial part) const {
        by_dtype(p.dtype, [&](auto element) { write_out_as<decltype(element)>(t, kv_head, part); });
    }
    template <class T>
    void write_out_as(const Tile& t, int64_t kv_head, Partial part) const {
        int group = p.group(), hd = p.head_dim;
        for (int r = 0; r < rows(t); r++) {
            int64_t token = token_of(t, r / group), head = kv_head * group + r % group;
            T* to = static_cast<T*>(p.out) + (token * p.num_heads + head) * hd;
            float total = part.total[r];
            if (p.sinks != nullptr) {  // scores are in units of log 2
                float sink = load_lanes(static_cast<const T*>(p.sinks) + head, 1)[0] * 1.44269504f;
                total += exp2(splat(sink - part.top[r]))[0];
            }
            float inverse = 1.0f / total;
            // Combining with a segment that sees nothing turns -0 into +0, so always do that.
            for (int d = 0; d < hd; d += 16) store(to + d, load(part.acc + r * hd + d) * inverse + 0.0f);
        }
    }

    // Run all segments of a unit. The same thread runs `upcoming` next.
    void run_unit(const Unit& unit, const Unit* upcoming) const {
        const Tile& t = *unit.tile;
        Heads heads = unit.heads;
        int n = rows(t);
        auto w = Workspace<Kind>::take(p, n, heads.count);
        load_queries(t, heads, w);
        auto sums = [&](int h) { return t.kept >= 0 ? kept(t, heads.first + h) : w.combined(h); };
        for (int s = 0; s < t.num_segments(); s++) {
            bool adds = s > 0 || t.continues();
            auto part = [&](int h) { return adds ? w.next(h) : sums(h); };
            run_segment(unit, t.first_segment() + s, w, part, t.end, upcoming);
            for (int h = 0; adds && h < heads.count; h++) combine(sums(h), w.next(h), n, p.head_dim);
        }
        for (int h = 0; !t.is_prefix() && h < heads.count; h++) write_out(t, heads.first + h, sums(h));
    }

    // Run one segment of a tile whose segments are divided among threads; the thread that ends the last one combines them.
    void run_part(const Tile& t, int kv_head, int segment, float* parts, std::atomic<int>& unfinished) const {
        int n = rows(t);
        size_t size = Partial::floats(n, p.head_dim);
        auto w = Workspace<Kind>::take(p, n, 1);
        Heads heads{kv_head, 1};
        load_queries(t, heads, w);
        auto part_of = [&](int s) {
            return s == 0 && t.is_prefix() ? kept(t, kv_head) : Partial::at(parts + size * s, n);
        };
        int index = t.first_segment() + segment;
        int until = std::min((index + 1) * SEGMENT, t.end);
        run_segment({&t, heads}, index, w, [&](int) { return part_of(segment); }, until, nullptr);
        if (unfinished.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
        Partial sums = t.continues() ? kept(t, kv_head) : part_of(0);
        for (int s = t.continues() ? 0 : 1; s < t.num_segments(); s++) combine(sums, part_of(s), n, p.head_dim);
        if (!t.is_prefix()) write_out(t, kv_head, sums);
    }
};
