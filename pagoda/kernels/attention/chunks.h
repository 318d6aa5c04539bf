// Loads a chunk of a row's context, and its queries, in the form that the tiles multiply.
#pragma once

#include <type_traits>

#include "../kv_cache/pages.h"
#include "problem.h"
#include "tiles.h"
#include "widen.h"

// Stored: dtype of the pages. Kind: how they are multiplied.
template <class Stored>
struct Forms {
    static constexpr bool PAIRED = PageLayout<Stored>::PAIR == 2;
    using Kind = typename std::conditional<PAIRED, PairsOfBF16, Single>::type;
    using Lane = typename Kind::Lane;
    using Word = typename Kind::Word;
    static constexpr bool IN_PLACE = std::is_same<Stored, bf16>::value || std::is_same<Stored, float>::value;
    static constexpr bool SCALED = std::is_same<Stored, int8_t>::value;
    static constexpr int WIDTH = Kind::WIDTH;

    static const Stored* k_page(const Problem& p, int64_t block, int64_t kv_head) {
        return page(p.k_pages, block * p.k_stride, kv_head * p.block_size * p.k_page_dim());
    }
    static const Stored* v_page(const Problem& p, int64_t block, int64_t kv_head) {
        return page(p.v_pages, block * p.v_stride, kv_head * p.block_size * p.head_dim);
    }
    static const Stored* page(const char* pages, int64_t block_at, int64_t head_at) {
        return reinterpret_cast<const Stored*>(pages) + block_at + head_at;
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

    // One query vector as words.
    template <class T>
    static void query(const T* from, Word* to, int head_dim) {
        for (int d = 0; d < head_dim; d += 16) Kind::put(to, d, load(from + d));
    }
};

// A thread's scratch memory. Sizes in floats, lanes or words, of 32 bits each.
template <class Kind>
struct Workspace {
    using Lane = typename Kind::Lane;
    using Word = typename Kind::Word;
    Word *queries, *weights;  // queries: those of a tile, per head
    Lane *keys, *values;
    float *scores, *keep, *new_top, *sums, *key_scale, *value_scale, *partials;
    int rows, head_dim, key_dim, heads;

    static Workspace take(const Problem& p, int rows, int heads) {
        size_t d = p.head_dim, key = p.key_dim(), r = rows, h = heads;
        size_t partials = Partial::floats(rows, p.head_dim) * 2 * h;
        size_t sizes[] = {h * r * key, r * CHUNK, key * CHUNK, d * CHUNK, r * CHUNK, r, r, h * r * 16, CHUNK, CHUNK, partials};
        size_t total = 0;
        for (size_t& size : sizes) total += size = (size + 15) / 16 * 16;
        char* at = static_cast<char*>(thread_scratch(total * 4, 0));
        char* places[11];
        for (int i = 0; i < 11; i++) places[i] = at, at += sizes[i] * 4;
        auto words = [&](int i) { return reinterpret_cast<Word*>(places[i]); };
        auto lanes = [&](int i) { return reinterpret_cast<Lane*>(places[i]); };
        auto floats = [&](int i) { return reinterpret_cast<float*>(places[i]); };
        return {words(0),  words(1),  lanes(2),  lanes(3),  floats(4),  floats(5), floats(6),
                floats(7), floats(8), floats(9), floats(10), rows,      p.head_dim, p.key_dim(), heads};
    }
    Word* queries_of(int head) const { return queries + size_t(head) * rows * key_dim; }
    float* sums_of(int head) const { return sums + size_t(head) * rows * 16; }
    Partial combined(int head) const { return partial(head); }
    Partial next(int head) const { return partial(heads + head); }

  private:
    Partial partial(int index) const { return Partial::at(partials + Partial::floats(rows, head_dim) * index, rows); }
};

// The pages of rows, loaded one chunk at a time.
template <class Stored>
struct Context {
    using F = Forms<Stored>;
    using Kind = typename F::Kind;
    using Lane = typename F::Lane;
    static constexpr int WIDTH = F::WIDTH;
    const Problem& p;

    // Load positions chunk_at .. chunk_at + 63 of the row, of which some query sees [visible, end).
    // Blocks outside that range are not read: their table entries may be stale.
    void load_chunk(const int32_t* table, int64_t kv_head, int chunk_at, int visible, int end, const Workspace<Kind>& w,
               KeyChunk<Kind>& keys, ValueChunk<Kind>& values) const {
        int bs = p.block_size, low = std::max(chunk_at, visible), high = std::min(chunk_at + CHUNK, end);
        keys.groups = (high - chunk_at + 15) / 16;
        values.begin = (low - chunk_at) / WIDTH;
        values.end = (high - chunk_at + WIDTH - 1) / WIDTH;
        values.half_at_end = WIDTH == 2 && (high - chunk_at) % 2 == 1;
        if constexpr (F::SCALED) {
            load_scales(table, kv_head, chunk_at, low, high, w);
            if (bs % 16 == 0 && CHUNK % bs == 0) return load_whole_blocks(table, kv_head, chunk_at, low, high, w, keys, values);
        }
        load_values(table, kv_head, chunk_at, w, values);
        if (p.rope_dim > 0) {
            transpose_values(values, w.keys);
            load_keys<8, false>(table, kv_head, chunk_at, low, high, w.keys + p.head_dim / WIDTH * CHUNK, keys);
            for (int g = 0; g < LANE_GROUPS; g++) keys.keys[g] = w.keys + 16 * g;
        } else if (bs % 16 == 0) {
            load_keys<16, F::IN_PLACE>(table, kv_head, chunk_at, low, high, w.keys, keys);
        } else {
            load_keys<8, false>(table, kv_head, chunk_at, low, high, w.keys, keys);
        }
    }

    // The values of a chunk as keys: from a row of lanes per position (pair) to one per dimension (pair). Keys of positions
    // that no query sees stay as they are.
    void transpose_values(const ValueChunk<Kind>& values, Lane* keys) const {
        for (int j = values.begin; j < values.end; j++) {
            const Lane* v = values.rows[j];
            for (int d = 0; d < p.head_dim; d += WIDTH) {
                Lane* to = keys + d / WIDTH * CHUNK + j * WIDTH;
                if constexpr (WIDTH == 2) {
                    to[0] = (v[d] & 0xffff) | v[d + 1] << 16;
                    to[1] = v[d] >> 16 | (v[d + 1] & 0xffff0000);
                } else {
                    to[0] = v[d];
                }
            }
        }
    }

    void load_scales(const int32_t* table, int64_t kv_head, int chunk_at, int low, int high,
                      const Workspace<Kind>& w) const {
        memset(w.key_scale, 0, sizeof(float) * CHUNK);
        memset(w.value_scale, 0, sizeof(float) * CHUNK);
        int bs = p.block_size;
        for (int index = low / bs, at = low; at < high; at = ++index * bs) {
            int count = std::min((index + 1) * bs, high) - at;
            int64_t place = table[index] * p.scale_stride + kv_head * bs + at % bs;
            memcpy(w.key_scale + at - chunk_at, p.k_scale + place, sizeof(float) * count);
            memcpy(w.value_scale + at - chunk_at, p.v_scale + place, sizeof(float) * count);
        }
    }

    // int8 blocks of 16, 32 or 64 slots: a whole block is widened at once and keeps its page's layout.
    void load_whole_blocks(const int32_t* table, int64_t kv_head, int chunk_at, int low, int high, const Workspace<Kind>& w,
                     KeyChunk<Kind>& keys, ValueChunk<Kind>& values) const {
        int bs = p.block_size, hd = p.head_dim;
        for (int i = 0; i < CHUNK; i += bs) {
            bool seen = chunk_at + i + bs > low && chunk_at + i < high;
            int64_t block = table[(seen ? chunk_at + i : low) / bs];
            Lane *k = w.keys + i * (hd / WIDTH), *v = w.values + i * (hd / WIDTH);
            if (seen) {
                widen_int8(F::k_page(p, block, kv_head), bs * hd, k);
                widen_int8(F::v_page(p, block, kv_head), bs * hd, v);
            } else {
                memset(k, 0, sizeof(Lane) * bs * (hd / WIDTH));
            }
            for (int g = 0; g < bs / 16; g++) keys.keys[i / 16 + g] = k + 16 * g;
            for (int j = 0; j < bs / WIDTH; j++) values.rows[i / WIDTH + j] = v + j * hd;
        }
        keys.stride = bs;
    }

    // STEP adjacent slots are in one block.   DIRECT: keys are read where they are stored; else they are copied to `to`.
    template <int STEP, bool DIRECT>
    void load_keys(const int32_t* table, int64_t kv_head, int chunk_at, int low, int high, Lane* to,
                    KeyChunk<Kind>& keys) const {
        int bs = p.block_size, index = chunk_at / bs, slot = chunk_at % bs;
        int64_t seen_block = table[low / bs];  // used in place of blocks that no query sees
        keys.stride = DIRECT ? bs : CHUNK;
        for (int i = 0; i < CHUNK; i += STEP) {
            int at = chunk_at + i;
            int64_t block = at + STEP > low && at < high ? table[index] : seen_block;
            const Stored* k = F::k_page(p, block, kv_head) + slot * WIDTH;
            if constexpr (DIRECT) {
                keys.keys[i / 16] = reinterpret_cast<const Lane*>(k);
            } else {
                keys.keys[i / 16] = to + i / 16 * 16;
                for (int d = 0; d < p.k_page_dim() / WIDTH; d++, k += int64_t(bs) * WIDTH)
                    F::template widen<STEP>(k, to + d * CHUNK + i);
            }
            slot += STEP;
            if (slot == bs) slot = 0, index++;
        }
    }

    void load_values(const int32_t* table, int64_t kv_head, int chunk_at, const Workspace<Kind>& w,
                      ValueChunk<Kind>& values) const {
        int bs = p.block_size, hd = p.head_dim;
        int first = chunk_at + values.begin * WIDTH, index = first / bs, slot = first % bs;
        for (int j = values.begin; j < values.end; index++, slot = 0) {
            const Stored* v = F::v_page(p, table[index], kv_head) + int64_t(slot) * hd;
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

    // Prefetch the blocks of one chunk. A block of several chunks is prefetched whole, with its first chunk.
    void prefetch_chunk(const Unit& unit, int chunk_at, bool first_met, PagePrefetcher& ahead) const {
        const Tile& t = *unit.tile;
        Heads heads = unit.heads;
        const int32_t* table = p.block_table + t.row * p.table_stride;
        int bs = p.block_size, low = std::max(chunk_at, t.begin), high = std::min(chunk_at + CHUNK, t.end);
        for (int index = first_met ? low / bs : (low + bs - 1) / bs; index * bs < high; index++) {
            int64_t slots = int64_t(heads.count) * bs, bytes = slots * sizeof(Stored);
            ahead.add(reinterpret_cast<const char*>(F::k_page(p, table[index], heads.first)), bytes * p.k_page_dim());
            ahead.add(reinterpret_cast<const char*>(F::v_page(p, table[index], heads.first)), bytes * p.head_dim);
            if constexpr (F::SCALED) {
                int64_t place = table[index] * p.scale_stride + heads.first * bs;
                ahead.add(p.k_scale + place, slots * sizeof(float));
                ahead.add(p.v_scale + place, slots * sizeof(float));
            }
        }
    }
};
