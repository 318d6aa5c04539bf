// Sampling; its definition is sampling/reference.py. One row is one thread's work, and its sums run in an order fixed by
// the vocabulary, so a row's token does not depend on its neighbours.
//
// top_k and top_p never sort the vocabulary. The k-th largest of the maxima of blocks of 64 logits is a lower bound of the
// k-th largest logit; only the few hundred candidates that reach it are ranked. A nucleus
// with more tokens is found by buckets of a sixteenth of a nat: only the bucket in which it ends is ranked.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "parallel.h"
#include "simd.h"

namespace {

constexpr float NEVER = -std::numeric_limits<float>::infinity();
constexpr int BLOCK = 64;         // logits of which the maximum is kept
constexpr int SUM_CHUNK = 512;    // weights summed at a time when looking for the token that u points at
constexpr int FIRST_RANKS = 64;   // ranks tried first for top_p alone
constexpr int BUCKETS = 1024;     // of weights, by their logarithm; the last one holds all smaller ones

f64x8 fused(f64x8 a, f64x8 b, f64x8 c) {
#if defined(PAGODA_AVX512)
    return (f64x8)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(PAGODA_AVX2)
    using Half = decltype(f64x8::low);
    return {(Half)_mm256_fmadd_pd((__m256d)a.low, (__m256d)b.low, (__m256d)c.low),
            (Half)_mm256_fmadd_pd((__m256d)a.high, (__m256d)b.high, (__m256d)c.high)};
#else
    return a * b + c;
#endif
}

// e^x for x <= 0, to about two ulps; exactly 1 at 0 and exactly 0 below -708.
#if defined(PAGODA_AVX512)
f64x8 exp(f64x8 x) {
    // x = n ln(2) / 16 + r with |r| <= ln(2) / 32: a power of two, one of sixteen roots from a table, and e^r.
    constexpr double ROUNDER = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer in the low bits
    static const double ROOTS[16] = {
        0x1.0000000000000p+0, 0x1.0b5586cf9890fp+0, 0x1.172b83c7d517bp+0, 0x1.2387a6e756238p+0,
        0x1.306fe0a31b715p+0, 0x1.3dea64c123422p+0, 0x1.4bfdad5362a27p+0, 0x1.5ab07dd485429p+0,
        0x1.6a09e667f3bcdp+0, 0x1.7a11473eb0187p+0, 0x1.8ace5422aa0dbp+0, 0x1.9c49182a3f090p+0,
        0x1.ae89f995ad3adp+0, 0x1.c199bdd85529cp+0, 0x1.d5818dcfba487p+0, 0x1.ea4afa2a490dap+0};
    f64x8 rounder = f64x8{} + ROUNDER;
    f64x8 shifted = fused(x, f64x8{} + 0x1.71547652b82fep+4, rounder), n = shifted - rounder;
    f64x8 r = fused(n, f64x8{} - 0x1.62e42fefa0000p-5, x);
    r = fused(n, f64x8{} - 0x1.cf79abc9e3b3ap-44, r);
    f64x8 p = f64x8{} + 1.0 / 720.0;
    const double terms[] = {1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0};
    for (double term : terms) p = fused(p, r, f64x8{} + term);
    __m512d roots = _mm512_permutex2var_pd(_mm512_loadu_pd(ROOTS), (__m512i)shifted, _mm512_loadu_pd(ROOTS + 8));
    // Unsigned: lanes below -708, which are 0 in the end, may overflow.
    u64x8 power = (u64x8)((i64x8)shifted >> 4) << 52;
    return select(x < -708.0, f64x8{}, (f64x8)((u64x8)(p * (f64x8)roots) + power));
}
#else
f64x8 exp(f64x8 x) {
    constexpr double ROUNDER = 6755399441055744.0;
    f64x8 shifted = x * 1.4426950408889634 + ROUNDER, n = shifted - ROUNDER;
    f64x8 r = (x - n * 0x1.62e42fefa38p-1) - n * 0x1.ef35793c7673p-45;
    f64x8 p = f64x8{} + 1.0 / 6227020800.0;
    const double terms[] = {1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0, 1.0 / 362880.0, 1.0 / 40320.0,
                            1.0 / 5040.0,      1.0 / 720.0,      1.0 / 120.0,     1.0 / 24.0,     1.0 / 6.0,
                            0.5,               1.0,              1.0};
    for (double term : terms) p = fused(p, r, f64x8{} + term);
    f64x8 power = (f64x8)(((u64x8)shifted + 1023) << 52);  // unsigned: lanes that are 0 in the end may overflow
    return select(x < -708.0, f64x8{}, p * power);
}
#endif

template <class T, class Vector>
void store_up_to_8(T* to, Vector values, int64_t count) {
    if (count >= 8)
        store_lanes_of(to, values);
    else
        memcpy(to, &values, sizeof(T) * count);
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

    // Up to 8 logits, padded with -inf.
    f64x8 wide(int64_t at, int64_t count) const {
#if defined(PAGODA_AVX512)
        __mmask8 there = static_cast<__mmask8>(count >= 8 ? 0xff : (1 << count) - 1);
        __m256 nothing = _mm256_set1_ps(NEVER);
        return (f64x8)_mm512_cvtps_pd(_mm256_mask_loadu_ps(nothing, there, logits + at));
#else
        float copy[8];
        const float* from = logits + at;
        if (count < 8) {
            for (float& lane : copy) lane = NEVER;
            from = static_cast<const float*>(memcpy(copy, from, sizeof(float) * count));
        }
        return converted<f64x8>(load_as<f32x8>(from));
#endif
    }

    static bool all_below(const float* eight, float bound) {
        bool below = true;
        for (int i = 0; i < 8; i++) below &= eight[i] < bound;
        return below;
    }

    // Weights of up to 8 logits, those under min_p as 0.
    f64x8 weights(int64_t at, int64_t count) const {
        f64x8 w = exp((wide(at, count) - largest) * inverse_temperature);
        return select(w >= min_p, w, f64x8{});
    }

    // A logit below this has weight 0: its weight is under min_p.
    float cutoff() const {
        if (min_p <= 0.0) return NEVER;
        double bound = largest + (std::log(min_p) - 1e-6) / inverse_temperature;
        return std::nextafter(static_cast<float>(bound), NEVER);
    }

    // Running sums of the weights after each chunk; returns how many chunks. kept: the weights [vocab], if not null.
    int64_t chunk_sums(double* reached, double* kept = nullptr) const {
        double running = 0.0;
        int64_t chunks = 0;
        float lowest = cutoff();
        for (int64_t start = 0; start < vocab; start += SUM_CHUNK) {
            int64_t end = std::min(vocab, start + SUM_CHUNK);
            f64x8 sums = {};
            for (int64_t i = start; i < end; i += 8) {
                if (min_p > 0.0 && end - i >= 8 && all_below(logits + i, lowest)) continue;
                f64x8 w = weights(i, end - i);
                sums += w;
                if (kept != nullptr) store_up_to_8(kept + i, w, end - i);
            }
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
        // Summed one by one, the chunk may end slightly below its share: then take its last token with weight.
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

    // The best `ranks` tokens (at most vocab) or a few more, in rank order; returns how many.
    int64_t rank(int64_t ranks, float* maxima, Candidate* candidates) const {
        int64_t blocks = (vocab + BLOCK - 1) / BLOCK, count = 0;
        float bound = NEVER;
        if (ranks <= blocks) {
            block_maxima(maxima);
            std::nth_element(maxima, maxima + ranks - 1, maxima + blocks, std::greater<float>());
            bound = maxima[ranks - 1];
        }
        for (int64_t i = 0; i < vocab; i += 16) {
            if (lane_max(lanes(i)) < bound) continue;
            for (int64_t j = i; j < std::min(vocab, i + 16); j++)
                if (logits[j] >= bound) candidates[count++] = {logits[j], static_cast<int32_t>(j)};
        }
        if (count > 4 * ranks) {
            std::nth_element(candidates, candidates + ranks, candidates + count, before);
            count = ranks;
        }
        std::sort(candidates, candidates + count, before);
        return count;
    }

    // Up to 16 logits, padded with -inf.
    f32x16 lanes(int64_t at) const {
        return load_lanes_or(logits + at, static_cast<int>(std::min<int64_t>(16, vocab - at)), NEVER);
    }

    void block_maxima(float* maxima) const {
        for (int64_t start = 0, b = 0; start < vocab; start += BLOCK, b++) {
            f32x16 top = splat(NEVER);
            for (int64_t i = start; i < std::min(vocab, start + BLOCK); i += 16) top = vmax(top, lanes(i));
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

    // The bucket of each logit: sixteenths of a nat below the largest one; the last bucket holds the rest.
    void find_buckets(uint16_t* buckets) const {
        for (int64_t i = 0; i < vocab; i += 8) {
            f64x8 depth = (largest - wide(i, vocab - i)) * inverse_temperature * 16.0;
            depth = select(depth < double(BUCKETS - 1), depth, f64x8{} + double(BUCKETS - 1));
            store_up_to_8(buckets + i, converted<u16x8>(converted<i64x8>(depth)), vocab - i);
        }
    }

    // body(id) for each token whose bucket `wanted` accepts, in order of id.
    template <class Wanted, class Body>
    void for_buckets(const uint16_t* buckets, Wanted&& wanted, Body&& body) const {
        for (int64_t start = 0; start < vocab; start += BLOCK) {
            int64_t end = std::min(vocab, start + BLOCK);
            int any = 0;
            for (int64_t i = start; i < end; i++) any |= wanted(buckets[i]);
            if (!any) continue;
            for (int64_t i = start; i < end; i++)
                if (wanted(buckets[i])) body(i);
        }
    }

    // The tokens that top_p keeps of the whole vocabulary, in order of id; returns how many.
    // weights: of every token, `total` their sum.   scratch: room for the vocabulary.
    int64_t wide_nucleus(double top_p, double total, const double* weights, uint16_t* buckets, Candidate* kept,
                         Candidate* scratch) const {
        find_buckets(buckets);
        double sums[2][BUCKETS] = {};  // two, because consecutive additions to one element would wait for each other
        for (int64_t i = 0; i < vocab; i++) sums[i % 2][buckets[i]] += weights[i];
        double running = 0.0;
        int last = 0;
        for (; last < BUCKETS - 1; last++) {
            double next = running + (sums[0][last] + sums[1][last]);
            if (!(next < top_p * total)) break;
            running = next;
        }
        int64_t inside = 0, count = 0;
        for_buckets(buckets, [&](int bucket) { return bucket == last; },
                    [&](int64_t id) { scratch[inside++] = {logits[id], static_cast<int32_t>(id)}; });
        std::sort(scratch, scratch + inside, before);
        int64_t taken = 0;
        for (; taken < inside && (taken == 0 || running < top_p * total); taken++) running += weights[scratch[taken].id];
        for_buckets(buckets, [&](int bucket) { return bucket <= last; }, [&](int64_t id) {
            Candidate c{logits[id], static_cast<int32_t>(id)};
            if (buckets[id] < last || (taken > 0 && !before(scratch[taken - 1], c))) kept[count++] = c;
        });
        return count;
    }

    // From candidates in order of id.   weight_of: of a candidate.
    template <class WeightOf>
    int64_t pick(const Candidate* kept, int64_t count, WeightOf&& weight_of) const {
        auto kept_weight = [&](const Candidate& c) {
            double w = weight_of(c);
            return w >= min_p ? w : 0.0;
        };
        double total = 0.0, running = 0.0;
        for (int64_t i = 0; i < count; i++) total += kept_weight(kept[i]);
        double goal = target(total);
        for (int64_t i = 0; i < count; i++) {
            running += kept_weight(kept[i]);
            if (running > goal) return kept[i].id;
        }
        return kept[count - 1].id;  // unreachable: the running sum ends at the total, which is above the goal
    }
    int64_t pick_by_weight(const Candidate* kept, int64_t count, const double* all) const {
        return pick(kept, count, [&](const Candidate& c) { return all[c.id]; });
    }
    int64_t pick_from_ranked(Candidate* kept, int64_t count) const {
        std::sort(kept, kept + count, [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
        return pick(kept, count, [&](const Candidate& c) { return weight(c.logit); });
    }

    // The tokens that top_k and top_p keep, as candidates; returns how many.
    // by_weight: they are in order of id, and `weights` has those of the vocabulary. Else they are ranked.
    int64_t filter(int64_t top_k, double top_p, double* reached, float* maxima, Candidate* candidates, double* weights,
                   bool& by_weight) const {
        bool complete;
        by_weight = false;
        if (top_k > 0) {
            int64_t count = std::min(std::min(top_k, vocab), rank(std::min(top_k, vocab), maxima, candidates));
            if (top_p >= 1.0) return count;
            double total = 0.0;
            for (int64_t i = 0; i < count; i++) total += weight(candidates[i].logit);
            return nucleus(candidates, count, top_p, total, complete);
        }
        Row all = *this;
        all.min_p = 0.0;
        double total = reached[all.chunk_sums(reached, weights) - 1];
        int64_t count = rank(std::min<int64_t>(FIRST_RANKS, vocab), maxima, candidates);
        count = nucleus(candidates, count, top_p, total, complete);
        if (complete || count == vocab) return count;
        by_weight = true;
        auto* buckets = reinterpret_cast<uint16_t*>(weights + vocab);
        return wide_nucleus(top_p, total, weights, buckets, candidates, candidates + vocab);
    }
};

// What a thread needs for rows of a vocabulary.
struct RowScratch {
    double* weights;
    Candidate* candidates;
    float* maxima;
    double* reached;

    explicit RowScratch(int64_t vocab)
        : weights(static_cast<double*>(thread_scratch((sizeof(double) + sizeof(uint16_t)) * vocab, 0))),
          candidates(static_cast<Candidate*>(thread_scratch(2 * sizeof(Candidate) * vocab, 1))),
          maxima(static_cast<float*>(thread_scratch(sizeof(float) * (vocab / BLOCK + 1), 2))),
          reached(static_cast<double*>(thread_scratch(sizeof(double) * (vocab / SUM_CHUNK + 1), 3))) {}

    int64_t filter(const Row& row, int64_t top_k, double top_p, bool& by_weight) const {
        return row.filter(top_k, top_p, reached, maxima, candidates, weights, by_weight);
    }
};

bool filters(int64_t top_k, double top_p) { return top_k > 0 || top_p < 1.0; }

// Largest logit of a row; NaN if any of them is NaN.
float largest_of(const Row& row) {
    f32x16 top = splat(NEVER);
    i32x16 no_number = {};
    for (int64_t i = 0; i < row.vocab; i += 16) {
        f32x16 v = row.lanes(i);
        top = vmax(top, v);
        no_number |= v != v;
    }
    bool any = false;
    for (int i = 0; i < 16; i++) any |= no_number[i] != 0;
    return any ? std::numeric_limits<float>::quiet_NaN() : lane_max(top);
}

}  // namespace

// Largest logit of each row and the lowest id that has it; NaN and id 0 for a row with a NaN. logits [rows, vocab].
PAGODA_EXPORT void pagoda_best_tokens(const float* logits, int64_t stride, int64_t rows, int64_t vocab, float* values,
                                      int64_t* ids, int threads) {
    for_claims(rows, threads_for(rows * vocab, threads), [&](int64_t r) {
        Row row{logits + r * stride, vocab, 0, 0, 0, 0};
        values[r] = largest_of(row);
        int64_t id = 0;
        while (values[r] == values[r] && row.logits[id] != values[r]) id++;
        ids[r] = id;
    });
}

// Logits whose bit is 0 become -inf, in `count` different rows; bits [count, ceil(vocab / 32)], lowest bit first.
PAGODA_EXPORT void pagoda_mask_logits(float* logits, int64_t stride, int64_t rows, int64_t vocab, const int64_t* draws,
                                      int64_t count, const uint32_t* bits, int threads) {
    int64_t words = (vocab + 31) / 32;
    for_claims(count, threads_for(count * vocab, threads), [&](int64_t d) {
        float* row = logits + draws[d] * stride;
        const uint32_t* mask = bits + d * words;
        for (int64_t w = 0; w < words; w++) {
            uint32_t word = mask[w];
            if (word == ~0u) continue;
            int64_t begin = w * 32, end = std::min(vocab, begin + 32);
            if (word == 0)
                std::fill(row + begin, row + end, NEVER);
            else
                for (int64_t i = begin; i < end; i++) row[i] = (word >> (i - begin)) & 1 ? row[i] : NEVER;
        }
    });
    (void)rows;
}

// One token per row, as reference.sample; best_values and best_ids from pagoda_best_tokens. Arrays are [rows].
PAGODA_EXPORT void pagoda_sample(const float* logits, int64_t stride, int64_t rows, int64_t vocab,
                                 const float* best_values, const int64_t* best_ids, const float* temperature,
                                 const int32_t* top_k, const float* top_p, const float* min_p, const double* uniform,
                                 int64_t* tokens, int threads) {
    for_claims(rows, threads_for(rows * vocab, threads), [&](int64_t r) {
        RowScratch scratch(vocab);
        Row row{logits + r * stride, vocab, best_values[r], 1.0 / temperature[r], min_p[r], uniform[r]};
        bool by_weight;
        if (temperature[r] <= 0.0f) {
            tokens[r] = best_ids[r];
        } else if (!filters(top_k[r], top_p[r])) {
            tokens[r] = row.pick_from_all(scratch.reached);
        } else {
            int64_t count = scratch.filter(row, top_k[r], top_p[r], by_weight);
            tokens[r] = by_weight ? row.pick_by_weight(scratch.candidates, count, scratch.weights)
                                  : row.pick_from_ranked(scratch.candidates, count);
        }
    });
}

// Divides each row by its temperature and sets what pagoda_sample cannot choose to -inf; greedy rows and those without
// a finite largest logit stay. Arrays are [rows].
PAGODA_EXPORT void pagoda_process_logits(float* logits, int64_t stride, int64_t rows, int64_t vocab,
                                         const float* best_values, const float* temperature, const int32_t* top_k,
                                         const float* top_p, const float* min_p, int threads) {
    for_claims(rows, threads_for(rows * vocab, threads), [&](int64_t r) {
        RowScratch scratch(vocab);
        float* to = logits + r * stride;
        if (temperature[r] <= 0.0f || !std::isfinite(best_values[r])) return;
        Row row{to, vocab, best_values[r], 1.0 / temperature[r], min_p[r], 0.0};
        auto divided = [&](float logit) { return static_cast<float>(static_cast<double>(logit) / temperature[r]); };
        if (!filters(top_k[r], top_p[r])) {
            for (int64_t i = 0; i < vocab; i += 8) {
                int64_t count = std::min<int64_t>(8, vocab - i);
                f64x8 w = row.weights(i, count);
                for (int64_t j = 0; j < count; j++)
                    to[i + j] = w[j] > 0.0 || min_p[r] <= 0.0f ? divided(to[i + j]) : NEVER;
            }
            return;
        }
        bool by_weight;
        int64_t count = scratch.filter(row, top_k[r], top_p[r], by_weight);
        std::fill(to, to + vocab, NEVER);
        for (int64_t i = 0; i < count; i++) {
            const Candidate& c = scratch.candidates[i];
            double weight = by_weight ? scratch.weights[c.id] : row.weight(c.logit);
            if (weight >= min_p[r]) to[c.id] = divided(c.logit);
        }
    });
}

// Log-softmax of the chosen token (column 0) and of the k best, lower id first among equals; the chosen one's rank.
// chosen [rows]; ids, logprobs [rows, 1 + k]; ranks [rows]. k <= vocab. For a row with a NaN all of them are NaN.
PAGODA_EXPORT void pagoda_top_logprobs(const float* logits, int64_t stride, int64_t rows, int64_t vocab,
                                       const int64_t* chosen, int64_t k, int32_t* ids, float* logprobs, int32_t* ranks,
                                       int threads) {
    for_claims(rows, threads_for(rows * vocab, threads), [&](int64_t r) {
        RowScratch scratch(vocab);
        Row row{logits + r * stride, vocab, 0, 1.0, 0.0, 0};
        float largest = largest_of(row), own = row.logits[chosen[r]];
        int32_t* id = ids + r * (1 + k);
        float* logprob = logprobs + r * (1 + k);
        id[0] = static_cast<int32_t>(chosen[r]);
        ranks[r] = 1;
        if (largest != largest) {
            for (int64_t i = 0; i <= k; i++) logprob[i] = largest;
            for (int64_t i = 1; i <= k; i++) id[i] = static_cast<int32_t>(i - 1);
            return;
        }
        row.largest = largest;
        double normaliser = largest + std::log(scratch.reached[row.chunk_sums(scratch.reached) - 1]);
        logprob[0] = static_cast<float>(own - normaliser);
        for (int64_t i = 0; i < vocab; i++) ranks[r] += row.logits[i] > own;
        if (k > 0) row.rank(k, scratch.maxima, scratch.candidates);
        for (int64_t i = 0; i < k; i++) {
            id[1 + i] = scratch.candidates[i].id;
            logprob[1 + i] = static_cast<float>(scratch.candidates[i].logit - normaliser);
        }
    });
}
