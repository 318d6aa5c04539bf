// Sampling; its definition is sampling/reference.py. One row is one thread's work, and its sums run in an order fixed by
// the vocabulary, so a row's token does not depend on its neighbours.
//
// top_k and top_p never sort the vocabulary. The k-th largest of the maxima of blocks of 64 logits bounds the k-th
// largest logit from below; what reaches that bound is a few hundred candidates, and only they are ranked. A nucleus
// that is wider than that is found by buckets of a sixteenth of a nat: only the bucket where it ends is ranked.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "parallel.h"
#include "simd.h"

namespace {

constexpr int BLOCK = 64;         // logits of which the maximum is kept
constexpr int SUM_CHUNK = 512;    // weights summed at a time when looking for the token that u points at
constexpr int FIRST_RANKS = 64;   // ranks tried first for top_p alone
constexpr int BUCKETS = 1024;     // of weights, by their logarithm; the last one takes what is left

typedef double f64x8 __attribute__((vector_size(64)));
typedef int64_t i64x8 __attribute__((vector_size(64)));
typedef float f32x8 __attribute__((vector_size(32)));

f64x8 fma(f64x8 a, f64x8 b, f64x8 c) {
#if defined(PAGODA_AVX512)
    return (f64x8)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#else
    return a * b + c;
#endif
}

// e^x for x <= 0, to about an ulp; exactly 1 at 0 and exactly 0 below -708.
f64x8 exp(f64x8 x) {
    constexpr double ROUNDER = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer in the low bits
    f64x8 shifted = x * 1.4426950408889634 + ROUNDER, n = shifted - ROUNDER;
    f64x8 r = (x - n * 0x1.62e42fefa38p-1) - n * 0x1.ef35793c7673p-45;
    f64x8 p = f64x8{} + 1.0 / 6227020800.0;
    const double terms[] = {1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0, 1.0 / 362880.0, 1.0 / 40320.0,
                            1.0 / 5040.0,      1.0 / 720.0,      1.0 / 120.0,     1.0 / 24.0,     1.0 / 6.0,
                            0.5,               1.0,              1.0};
    for (double term : terms) p = fma(p, r, f64x8{} + term);
    f64x8 power = (f64x8)(((i64x8)shifted + 1023) << 52);
    return x < -708.0 ? f64x8{} : p * power;
}

struct Candidate {
    float logit;
    int32_t id;
};

struct Row {
    const float* logits;
    int64_t vocab;
    double largest, inverse_temperature, min_p, uniform;

    double weight(float logit) const { return std::exp((static_cast<double>(logit) - largest) * inverse_temperature); }

    // Weights of up to 8 logits, those under min_p as 0.
    f64x8 weights(int64_t at, int64_t count) const {
        f32x8 raw = f32x8{} - std::numeric_limits<float>::infinity();
        memcpy(&raw, logits + at, sizeof(float) * (count < 8 ? count : 8));
        f64x8 w = exp((__builtin_convertvector(raw, f64x8) - largest) * inverse_temperature);
        return w >= min_p ? w : f64x8{};
    }

    // Running sums of the weights after each chunk; returns how many chunks.
    int64_t chunk_sums(double* reached) const {
        double running = 0.0;
        int64_t chunks = 0;
        for (int64_t start = 0; start < vocab; start += SUM_CHUNK) {
            int64_t end = std::min(vocab, start + SUM_CHUNK);
            f64x8 sums = {};
            for (int64_t i = start; i < end; i += 8) sums += weights(i, end - i);
            running += ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
            reached[chunks++] = running;
        }
        return chunks;
    }

    // u * total may round up to the total itself.
    double target(double total) const { return std::min(uniform * total, std::nextafter(total, 0.0)); }

    // No ranks: the first token whose running sum exceeds the target.
    int64_t pick_from_all(double* reached) const {
        int64_t chunks = chunk_sums(reached);
        double goal = target(reached[chunks - 1]);
        int64_t chunk = std::upper_bound(reached, reached + chunks, goal) - reached;
        double running = chunk > 0 ? reached[chunk - 1] : 0.0;
        // Summed one by one, the chunk may end a hair under its share: then its last entry with weight is meant.
        int64_t last = chunk * SUM_CHUNK, end = std::min(vocab, last + SUM_CHUNK);
        for (int64_t i = last; i < end; i += 8) {
            f64x8 w = weights(i, end - i);
            for (int64_t j = 0; j < 8 && i + j < end; j++) {
                running += w[j];
                if (running > goal) return i + j;
                if (w[j] > 0.0) last = i + j;
            }
        }
        return last;
    }

    static bool before(const Candidate& a, const Candidate& b) {
        return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
    }

    // The best `ranks` (at most vocab) or some more, in rank order; returns how many.
    int64_t rank(int64_t ranks, float* maxima, Candidate* candidates) const {
        int64_t blocks = (vocab + BLOCK - 1) / BLOCK, count = 0;
        float bound = -std::numeric_limits<float>::infinity();
        if (ranks <= blocks) {
            block_maxima(maxima);
            std::nth_element(maxima, maxima + ranks - 1, maxima + blocks, std::greater<float>());
            bound = maxima[ranks - 1];
        }
        for (int64_t i = 0; i < vocab; i += 16) {
            int n = static_cast<int>(std::min<int64_t>(16, vocab - i));
            if (lane_max(n == 16 ? load(logits + i) : tail(i, n)) < bound) continue;
            for (int64_t j = i; j < i + n; j++)
                if (logits[j] >= bound) candidates[count++] = {logits[j], static_cast<int32_t>(j)};
        }
        if (count > 4 * ranks) {
            std::nth_element(candidates, candidates + ranks, candidates + count, before);
            count = ranks;
        }
        std::sort(candidates, candidates + count, before);
        return count;
    }

    f32x16 tail(int64_t at, int n) const {
        f32x16 v = splat(-std::numeric_limits<float>::infinity());
        memcpy(&v, logits + at, sizeof(float) * n);
        return v;
    }

    void block_maxima(float* maxima) const {
        for (int64_t start = 0, b = 0; start < vocab; start += BLOCK, b++) {
            f32x16 top = splat(-std::numeric_limits<float>::infinity());
            for (int64_t i = start; i < std::min(vocab, start + BLOCK); i += 16)
                top = vmax(top, vocab - i >= 16 ? load(logits + i) : tail(i, static_cast<int>(vocab - i)));
            maxima[b] = lane_max(top);
        }
    }

    // How many of the ranked candidates top_p keeps; `complete` false if its share lies beyond them.
    int64_t nucleus(const Candidate* candidates, int64_t count, double top_p, double total, bool& complete) const {
        double running = 0.0;
        for (int64_t i = 0; i < count; i++) {
            if (i > 0 && !(running < top_p * total)) {
                complete = true;
                return i;
            }
            running += weight(candidates[i].logit);
        }
        complete = false;
        return count;
    }

    int bucket(float logit) const {
        double depth = (largest - static_cast<double>(logit)) * inverse_temperature * 16.0;
        return depth < BUCKETS - 1 ? static_cast<int>(depth) : BUCKETS - 1;
    }

    // The tokens that top_p keeps of the whole vocabulary, in order of id; returns how many. `total`: of all weights.
    // scratch: room for the vocabulary.
    int64_t wide_nucleus(double top_p, double total, Candidate* kept, Candidate* scratch) const {
        double sums[BUCKETS] = {};
        for (int64_t i = 0; i < vocab; i += 8) {
            f64x8 w = weights(i, vocab - i);
            for (int64_t j = i; j < std::min(vocab, i + 8); j++) sums[bucket(logits[j])] += w[j - i];
        }
        double running = 0.0;
        int last = 0;
        for (; last < BUCKETS - 1 && running + sums[last] < top_p * total; last++) running += sums[last];
        int64_t inside = 0, count = 0;
        for (int64_t i = 0; i < vocab; i++)
            if (bucket(logits[i]) == last) scratch[inside++] = {logits[i], static_cast<int32_t>(i)};
        std::sort(scratch, scratch + inside, before);
        int64_t taken = 0;
        for (; taken < inside && (taken == 0 || running < top_p * total); taken++) running += weight(scratch[taken].logit);
        for (int64_t i = 0; i < vocab; i++) {
            Candidate c{logits[i], static_cast<int32_t>(i)};
            int b = bucket(c.logit);
            if (b < last || (b == last && taken > 0 && !before(scratch[taken - 1], c))) kept[count++] = c;
        }
        return count;
    }

    // From ranked candidates.
    int64_t pick_from_best(Candidate* kept, int64_t count) const {
        std::sort(kept, kept + count, [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
        return pick_from(kept, count);
    }
    // From candidates in order of id.
    int64_t pick_from(const Candidate* kept, int64_t count) const {
        double total = 0.0, running = 0.0;
        for (int64_t i = 0; i < count; i++) total += weighed(kept[i]);
        double goal = target(total);
        for (int64_t i = 0; i < count; i++) {
            running += weighed(kept[i]);
            if (running > goal) return kept[i].id;
        }
        return kept[count - 1].id;  // not reached: the running sum ends at the total, which the goal is below
    }
    double weighed(const Candidate& c) const {
        double w = weight(c.logit);
        return w >= min_p ? w : 0.0;
    }

    int64_t pick_filtered(int64_t top_k, double top_p, double* reached, float* maxima, Candidate* candidates) const {
        bool complete;
        if (top_k > 0) {
            int64_t count = std::min(std::min(top_k, vocab), rank(std::min(top_k, vocab), maxima, candidates));
            if (top_p < 1.0) {
                double total = 0.0;
                for (int64_t i = 0; i < count; i++) total += weight(candidates[i].logit);
                count = nucleus(candidates, count, top_p, total, complete);
            }
            return pick_from_best(candidates, count);
        }
        Row all = *this;
        all.min_p = 0.0;
        double total = reached[all.chunk_sums(reached) - 1];
        int64_t count = rank(std::min<int64_t>(FIRST_RANKS, vocab), maxima, candidates);
        count = nucleus(candidates, count, top_p, total, complete);
        if (complete || count == vocab) return pick_from_best(candidates, count);
        return pick_from(candidates, all.wide_nucleus(top_p, total, candidates, candidates + vocab));
    }
};

// Largest logit of a row; NaN if there is one among them.
float largest_of(const Row& row) {
    f32x16 top = splat(-std::numeric_limits<float>::infinity());
    i32x16 no_number = {};
    for (int64_t i = 0; i < row.vocab; i += 16) {
        f32x16 v = row.vocab - i >= 16 ? load(row.logits + i) : row.tail(i, static_cast<int>(row.vocab - i));
        top = vmax(top, v);
        no_number |= v != v;
    }
    bool any = false;
    for (int i = 0; i < 16; i++) any |= no_number[i] != 0;
    return any ? std::numeric_limits<float>::quiet_NaN() : lane_max(top);
}

}  // namespace

// Largest logit of each row and its lowest id; NaN, with id 0, for a row that has one. logits [rows, vocab].
PAGODA_EXPORT void pagoda_best_tokens(const float* logits, int64_t stride, int64_t rows, int64_t vocab, float* values,
                                      int64_t* ids, int threads) {
    std::atomic<int64_t> next{0};
    parallel(rows > 1 ? threads_for(rows * vocab, threads) : 1, [&](int, int) {
        for (int64_t r; (r = next.fetch_add(1)) < rows;) {
            Row row{logits + r * stride, vocab, 0, 0, 0, 0};
            values[r] = largest_of(row);
            int64_t id = 0;
            while (values[r] == values[r] && row.logits[id] != values[r]) id++;
            ids[r] = id;
        }
    });
}

// One token a row, as reference.sample; best_values and best_ids from pagoda_best_tokens. Arrays are [rows].
PAGODA_EXPORT void pagoda_sample(const float* logits, int64_t stride, int64_t rows, int64_t vocab,
                                 const float* best_values, const int64_t* best_ids, const float* temperature,
                                 const int32_t* top_k, const float* top_p, const float* min_p, const double* uniform,
                                 int64_t* tokens, int threads) {
    std::atomic<int64_t> next{0};
    parallel(rows > 1 ? threads_for(rows * vocab, threads) : 1, [&](int, int) {
        int64_t blocks = (vocab + BLOCK - 1) / BLOCK;
        auto* candidates = static_cast<Candidate*>(thread_scratch(2 * sizeof(Candidate) * vocab, 1));
        auto* maxima = static_cast<float*>(thread_scratch(sizeof(float) * blocks, 2));
        auto* reached = static_cast<double*>(thread_scratch(sizeof(double) * (vocab / SUM_CHUNK + 1), 3));
        for (int64_t r; (r = next.fetch_add(1)) < rows;) {
            Row row{logits + r * stride, vocab, best_values[r], 1.0 / temperature[r], min_p[r], uniform[r]};
            if (temperature[r] <= 0.0f)
                tokens[r] = best_ids[r];
            else if (top_k[r] <= 0 && top_p[r] >= 1.0f)
                tokens[r] = row.pick_from_all(reached);
            else
                tokens[r] = row.pick_filtered(top_k[r], top_p[r], reached, maxima, candidates);
        }
    });
}

// Log-softmax of the chosen token (column 0) and of the k best, lower id first among equals; the chosen one's rank.
// chosen [rows]; ids, logprobs [rows, 1 + k]; ranks [rows]. k <= vocab. A row with a NaN has nothing but NaN.
PAGODA_EXPORT void pagoda_top_logprobs(const float* logits, int64_t stride, int64_t rows, int64_t vocab,
                                       const int64_t* chosen, int64_t k, int32_t* ids, float* logprobs, int32_t* ranks,
                                       int threads) {
    std::atomic<int64_t> next{0};
    parallel(rows > 1 ? threads_for(rows * vocab, threads) : 1, [&](int, int) {
        auto* candidates = static_cast<Candidate*>(thread_scratch(sizeof(Candidate) * vocab, 1));
        auto* maxima = static_cast<float*>(thread_scratch(sizeof(float) * (vocab / BLOCK + 1), 2));
        auto* reached = static_cast<double*>(thread_scratch(sizeof(double) * (vocab / SUM_CHUNK + 1), 3));
        for (int64_t r; (r = next.fetch_add(1)) < rows;) {
            Row row{logits + r * stride, vocab, 0, 1.0, 0.0, 0};
            float largest = largest_of(row), own = row.logits[chosen[r]];
            int32_t* id = ids + r * (1 + k);
            float* logprob = logprobs + r * (1 + k);
            id[0] = static_cast<int32_t>(chosen[r]);
            ranks[r] = 1;
            if (largest != largest) {
                for (int64_t i = 0; i <= k; i++) logprob[i] = largest;
                for (int64_t i = 1; i <= k; i++) id[i] = static_cast<int32_t>(i - 1);
                continue;
            }
            row.largest = largest;
            double normaliser = largest + std::log(reached[row.chunk_sums(reached) - 1]);
            logprob[0] = static_cast<float>(own - normaliser);
            for (int64_t i = 0; i < vocab; i++) ranks[r] += row.logits[i] > own;
            if (k > 0) row.rank(k, maxima, candidates);
            for (int64_t i = 0; i < k; i++) {
                id[1 + i] = candidates[i].id;
                logprob[1 + i] = static_cast<float>(candidates[i].logit - normaliser);
            }
        }
    });
}
