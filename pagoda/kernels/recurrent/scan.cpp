// Recurrent layers with a matrix per head as their state: Mamba-2 and the gated delta rule, as recurrent/reference.py
// defines them.
//
// Prompts are computed token by token, as decodes are, so no border between chunks can change a bit. The columns of a
// state do not depend on each other: a slab of them, which the nearest caches hold, goes through a tile of tokens
// before the next slab does. In between it is in scratch memory; the first token of a row reads a block of the cache in
// place, and the last one of each block writes one.
#include <cmath>

#include "elementwise.h"
#include "state_rows.h"

namespace {

constexpr int TILE = 16;  // tokens
// Vectors in a row of a slab: as many as leave registers for the sums over its rows. A decode reads memory faster in
// longer rows, and fastest in whole ones; of the delta rule it has half of the sums.
#if defined(PAGODA_AVX512)
constexpr int MOST_VECTORS = 4, MOST_OF_DECODES = 8;
#else
constexpr int MOST_VECTORS = 1, MOST_OF_DECODES = 1;
#endif

// Rows of a slab, `stride` floats apart.
struct Place {
    float* data;
    int64_t stride;
};

// A slab of VECTORS * 16 columns. Unless WHOLE, it is one vector whose first `lanes` columns exist.
template <int VECTORS, bool WHOLE>
struct Slab {
    using Row = f32x16[VECTORS];
    int lanes;

    f32x16 load_row(const float* p, int i) const { return WHOLE ? load(p + 16 * i) : load_lanes(p, lanes); }
    void store_row(float* p, int i, f32x16 v) const {
        if constexpr (WHOLE) store(p + 16 * i, v);
        else store_lanes(p, v, lanes);
    }

    // keys S, of `rows` rows: even and odd rows are summed apart.
    void reduce(Place s, const float* keys, int64_t rows, Row& sums) const {
        f32x16 halves[2][VECTORS] = {};
        for (int64_t k = 0; k < rows; k++)
            for (int i = 0; i < VECTORS; i++) {
                f32x16& sum = halves[k & 1][i];
                sum = fma(splat(keys[k]), load_row(s.data + k * s.stride, i), sum);
            }
        for (int i = 0; i < VECTORS; i++) sums[i] = halves[0][i] + halves[1][i];
    }

    // S = decay * S + key update^T, from one place to the other; given = query S of the result and, with NEXT,
    // found = next S, both summed as `reduce` sums.
    template <bool NEXT>
    __attribute__((always_inline)) void advance(Place from, Place to, float decay, const float* key, const float* query, const float* next,
                 int64_t rows, const Row& update, Row& given, Row& found) const {
        f32x16 of_query[2][VECTORS] = {}, of_next[2][VECTORS] = {};
        auto row = [&](int64_t k, int half) __attribute__((always_inline)) {
            for (int i = 0; i < VECTORS; i++) {
                f32x16 s = load_row(from.data + k * from.stride, i) * decay;
                s = fma(splat(key[k]), update[i], s);
                store_row(to.data + k * to.stride, i, s);
                of_query[half][i] = fma(splat(query[k]), s, of_query[half][i]);
                if constexpr (NEXT) of_next[half][i] = fma(splat(next[k]), s, of_next[half][i]);
            }
        };
        int64_t k = 0;
        for (; k + 2 <= rows; k += 2) {
            row(k, 0);
            row(k + 1, 1);
        }
        if (k < rows) row(k, 0);
        for (int i = 0; i < VECTORS; i++) {
            given[i] = of_query[0][i] + of_query[1][i];
            if constexpr (NEXT) found[i] = of_next[0][i] + of_next[1][i];
        }
    }
};

// An op's arguments. Of the tokens' rows x: where values, keys and queries begin.   raw: dt, or a and b.
template <class T>
struct Problem {
    const Tensor& x;
    int64_t values_at, keys_at, queries_at, groups;
    const Tensor *decay_raw, *gain_raw;
    const float *rate, *dt_bias, *d;
    float dt_min, dt_max;
    bool tiled;
    const KVPages& states;
    const Tensor& out;

    int64_t key_dim() const { return states.block_size; }
    int64_t value_dim() const { return states.value_dim; }
    int64_t group_of(int64_t head) const { return tiled ? head % groups : head / (states.kv_heads / groups); }
    float* state(int32_t block, int64_t head) const {
        return static_cast<float*>(states.v) + block * states.v_stride + head * key_dim() * value_dim();
    }
};

// A head's numbers for a tile of tokens.   gain: of Mamba-2 the size of the step, of the delta rule how far a value is
// corrected.
struct Tile {
    float *keys, *queries;  // a padded row per token
    int64_t stride;
    alignas(64) float decay[TILE], gain[TILE];
};

template <class T>
f32x16 gather(const Tensor& from, int64_t token, int64_t head, int count) {
    float numbers[16] = {};
    for (int i = 0; i < count; i++)
        numbers[i] = load_first(elements_of<const T>(from) + (token + i) * from.stride + head, 1)[0];
    return load(numbers);
}

// x times factor over its length.
template <class T>
void normalize(const T* x, int64_t dim, float factor, float* to) {
    f32x16 squares = {};
    for_lanes(dim, [&](int64_t i, int n) {
        f32x16 v = load_lanes(x + i, n);
        squares = fma(v, v, squares);
        store(to + i, v);
    });
    float scale = factor / std::sqrt(lane_sum(squares) + 1e-6f);
    for_lanes(dim, [&](int64_t i, int) { store(to + i, load(to + i) * scale); });
}

template <class T, bool DELTA>
void fill(Tile& tile, const Problem<T>& p, int64_t token, int64_t head, int count) {
    int64_t group = p.group_of(head), dim = p.key_dim();
    float query_factor = 1.0f / std::sqrt(static_cast<float>(dim));
    for (int t = 0; t < count; t++) {
        const T* x = elements_of<const T>(p.x) + (token + t) * p.x.stride + group * dim;
        float *key = tile.keys + t * tile.stride, *query = tile.queries + t * tile.stride;
        if constexpr (DELTA) {
            normalize(x + p.keys_at, dim, 1.0f, key);
            normalize(x + p.queries_at, dim, query_factor, query);
        } else {
            widen(x + p.keys_at, key, dim);
            widen(x + p.queries_at, query, dim);
        }
    }
    f32x16 step = softplus(gather<T>(*p.decay_raw, token, head, count) + p.dt_bias[head]);
    step = select(step < p.dt_min, splat(p.dt_min), step);
    step = select(step > p.dt_max, splat(p.dt_max), step);
    store(tile.decay, exp(splat(p.rate[head]) * step));
    store(tile.gain, DELTA ? sigmoid(gather<T>(*p.gain_raw, token, head, count)) : step);
}

template <class T, bool DELTA, int VECTORS, bool WHOLE>
class Scan {
    static constexpr int WIDTH = 16 * VECTORS;
    const Problem<T>& p;
    Tile tile;
    float* scratch;  // the slabs of a head, one after the other

  public:
    explicit Scan(const Problem<T>& problem) : p(problem) {
        tile.stride = (p.key_dim() + 15) / 16 * 16;
        int64_t vectors = 2 * TILE * tile.stride, state = slabs(p) * p.key_dim() * WIDTH;
        tile.keys = static_cast<float*>(thread_scratch(static_cast<size_t>(vectors + state) * sizeof(float)));
        tile.queries = tile.keys + TILE * tile.stride;
        scratch = tile.keys + vectors;
    }

    static int64_t slabs(const Problem<T>& p) { return (p.value_dim() + WIDTH - 1) / WIDTH; }

    // mine: slabs of all heads, counted through.
    void compute(const StateRow& row, Range mine) {
        int64_t per_head = slabs(p);
        for (int64_t head = mine.begin / per_head; head * per_head < mine.end; head++) {
            Range of_head = {std::max(mine.begin - head * per_head, int64_t(0)),
                             std::min(mine.end - head * per_head, per_head)};
            for (int64_t first = 0; first < row.num_new; first += TILE) {
                int count = static_cast<int>(std::min<int64_t>(TILE, row.num_new - first));
                fill<T, DELTA>(tile, p, row.first + first, head, count);
                for (int64_t slab = of_head.begin; slab < of_head.end; slab++)
                    run(row, head, slab, first, count);
            }
        }
    }

  private:
    Place in_scratch(int64_t slab) const { return {scratch + slab * p.key_dim() * WIDTH, WIDTH}; }
    Place in_block(int32_t block, int64_t head, int64_t slab) const {
        return {p.state(block, head) + slab * WIDTH, p.value_dim()};
    }
    // Where the state is after so many new tokens: in scratch memory, but for the last computed one of a block.
    Place after(const StateRow& row, int64_t head, int64_t slab, int64_t done) const {
        int64_t index = (row.start + done - 1) / row.block_size;
        int32_t block = row.done_at(index) == done ? row.blocks[index] : 0;
        return block == 0 ? in_scratch(slab) : in_block(block, head, slab);
    }
    Place before(const StateRow& row, int64_t head, int64_t slab) const {
        if (row.before() != 0) return in_block(row.before(), head, slab);
        Place zeros = in_scratch(slab);
        memset(zeros.data, 0, static_cast<size_t>(p.key_dim() * WIDTH) * sizeof(float));
        return zeros;
    }

    void run(const StateRow& row, int64_t head, int64_t slab, int64_t first, int count) const {
        int64_t column = slab * WIDTH, rows = p.key_dim();
        Slab<VECTORS, WHOLE> s = {static_cast<int>(std::min<int64_t>(16, p.value_dim() - column))};
        Place at = first == 0 ? before(row, head, slab) : after(row, head, slab, first);
        f32x16 update[VECTORS], given[VECTORS], found[VECTORS], value[VECTORS];
        if constexpr (DELTA) s.reduce(at, tile.keys, rows, found);
        for (int t = 0; t < count; t++) {
            int64_t token = row.first + first + t, of_head = head * p.value_dim() + column;
            const T* x = elements_of<const T>(p.x) + token * p.x.stride + p.values_at + of_head;
            for (int i = 0; i < VECTORS; i++) {
                value[i] = WHOLE ? load(x + 16 * i) : load_lanes(x, s.lanes);
                update[i] = (DELTA ? value[i] - found[i] * tile.decay[t] : value[i]) * tile.gain[t];
            }
            Place to = after(row, head, slab, first + t + 1);
            const float *key = tile.keys + t * tile.stride, *query = tile.queries + t * tile.stride;
            if (DELTA && t + 1 < count)
                s.template advance<true>(at, to, tile.decay[t], key, query, key + tile.stride, rows, update, given,
                                         found);
            else
                s.template advance<false>(at, to, tile.decay[t], key, query, nullptr, rows, update, given, found);
            T* out = elements_of<T>(p.out) + token * p.out.stride + of_head;
            for (int i = 0; i < VECTORS; i++) {
                f32x16 y = DELTA ? given[i] : fma(splat(p.d[head]), value[i], given[i]);
                store_lanes(out + 16 * i, y, WHOLE ? 16 : s.lanes);
            }
            at = to;
        }
    }
};

// Threads divide the slabs of all heads, so that each computes the rows in their order. Slabs of rows with several new
// tokens may be narrower.
template <bool DELTA, int OF_DECODES, int VECTORS, bool WHOLE, class T>
void scan(const Problem<T>& p, const RowGroup& group, int threads) {
    using Decode = Scan<T, DELTA, OF_DECODES, WHOLE>;
    int64_t pieces = p.states.kv_heads * Decode::slabs(p), elements = p.x.rows * pieces * p.key_dim() * 16 * OF_DECODES;
    parallel(threads_for(elements, threads, pieces), [&](int thread, int num_threads) {
        Range mine = share_of(pieces, thread, num_threads);
        constexpr int64_t RATIO = OF_DECODES / VECTORS;
        for (int64_t i = 0; i < group.num_rows; i++) {
            StateRow row(group, i);
            if (row.num_new == 1) Decode(p).compute(row, mine);
            else if (row.num_new > 1)
                Scan<T, DELTA, VECTORS, WHOLE>(p).compute(row, {mine.begin * RATIO, mine.end * RATIO});
        }
    });
}

template <bool DELTA, class T>
void by_width(const Problem<T>& p, const RowGroup& group, int threads) {
    if constexpr (DELTA && MOST_OF_DECODES > MOST_VECTORS) {
        int64_t width = 16 * MOST_OF_DECODES;
        if (p.value_dim() % width == 0 && p.states.kv_heads * p.value_dim() / width >= threads)
            return scan<DELTA, MOST_OF_DECODES, MOST_VECTORS, true>(p, group, threads);
    }
    if (p.value_dim() % (16 * MOST_VECTORS) == 0)
        return scan<DELTA, MOST_VECTORS, MOST_VECTORS, true>(p, group, threads);
    if (p.value_dim() % 16 == 0) return scan<DELTA, 1, 1, true>(p, group, threads);
    scan<DELTA, 1, 1, false>(p, group, threads);
}

int64_t groups_of(const Tensor& x, const Tensor& out, const KVPages& states) {
    return (x.heads * x.dim - out.dim) / (2 * states.block_size);
}

}  // namespace

PAGODA_EXPORT void pagoda_mamba2(const Mamba2Args* a, int32_t threads) {
    by_dtype(a->x.dtype, [&](auto element) {
        int64_t values = a->out.dim, keys = (a->x.heads * a->x.dim - values) / 2;
        Problem<decltype(element)> p = {a->x,
                                        0,
                                        values,
                                        values + keys,
                                        groups_of(a->x, a->out, a->states),
                                        &a->dt,
                                        nullptr,
                                        elements_of<const float>(a->rate),
                                        elements_of<const float>(a->dt_bias),
                                        elements_of<const float>(a->d),
                                        a->dt_min,
                                        a->dt_max,
                                        false,
                                        a->states,
                                        a->out};
        by_width<false>(p, *a->metadata, threads);
    });
}

PAGODA_EXPORT void pagoda_gated_delta(const GatedDeltaArgs* a, int32_t threads) {
    by_dtype(a->x.dtype, [&](auto element) {
        int64_t keys = (a->x.heads * a->x.dim - a->out.dim) / 2;
        Problem<decltype(element)> p = {a->x,
                                        2 * keys,
                                        keys,
                                        0,
                                        groups_of(a->x, a->out, a->states),
                                        &a->a,
                                        &a->b,
                                        elements_of<const float>(a->rate),
                                        elements_of<const float>(a->dt_bias),
                                        nullptr,
                                        0.0f,
                                        INFINITY,
                                        a->tiled != 0,
                                        a->states,
                                        a->out};
        by_width<true>(p, *a->metadata, threads);
    });
}
