// Mixture of experts; its definition is moe/reference.py.
//
// A pair is a token and one of its experts. Pairs are sorted by expert, so that each expert multiplies all of its tokens
// at once, with the linear layer's own tiles. A row's bits do not depend on its neighbours: routing looks at one token,
// a tile sums each row in one order, and a token's results are added in the order of its experts.
#include <algorithm>
#include <cmath>

#include "../activation/functions.h"
#include "../linear/gemm.h"
#include "elementwise.h"

namespace {

constexpr int64_t MOST_PAIRS = 4096;  // per block of tokens: their results are held in float until they are added
constexpr int64_t FEW_ROWS = 16;      // with fewer per expert, weights are read once: one long stream per thread

// Parts of one allocation; each starts on a cache line.
struct Allocation {
    char* at;
    template <class T>
    T* take(int64_t count) {
        auto* part = reinterpret_cast<T*>(at);
        at += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
        return part;
    }
};

// The scores of one token's logits: their sigmoids, or their softmax.
struct Scores {
    bool sigmoids;
    f32x16 largest = {};
    float total = 1.0f;
    Scores(bool sigmoids, const float* logits, int64_t count) : sigmoids(sigmoids) {
        if (sigmoids) return;
        f32x16 top = splat(-INFINITY), sums = {};
        for_lanes(count, [&](int64_t i, int n) { top = vmax(top, load_lanes_or(logits + i, n, -INFINITY)); });
        largest = splat(lane_max(top));
        for_lanes(count, [&](int64_t i, int n) {
            sums = sums + exp(load_lanes_or(logits + i, n, -INFINITY) - largest);
        });
        total = lane_sum(sums);
    }
    f32x16 of(f32x16 logits) const { return sigmoids ? sigmoid(logits) : exp(logits - largest) / total; }
};

// The top_k experts of one token, the largest choice first and the lower id among equals.
void choose(const float* choice, int64_t count, int64_t top_k, int64_t* experts) {
    for (int64_t k = 0; k < top_k; k++) {
        int64_t best = -1;
        for (int64_t e = 0; e < count; e++) {
            bool taken = std::find(experts, experts + k, e) != experts + k;
            if (!taken && (best < 0 || choice[e] > choice[best])) best = e;
        }
        experts[k] = best;
    }
}

// The sum of the `best` largest of `count` values.
float sum_of_best(const float* values, int64_t count, int64_t best) {
    float sum = 0.0f;
    for (int64_t i = 0; i < count; i++) {
        int64_t larger = 0;
        for (int64_t j = 0; j < count; j++) larger += values[j] > values[i] || (j < i && values[j] == values[i]);
        if (larger < best) sum += values[i];
    }
    return sum;
}

// Set the choice of experts outside of the top groups to -inf. of_group: [groups], scratch.
void leave_out_groups(const RouteArgs& a, float* choice, int64_t count, float* of_group) {
    int64_t size = count / a.groups;
    for (int64_t g = 0; g < a.groups; g++) of_group[g] = sum_of_best(choice + g * size, size, a.best);
    for (int64_t taken = a.groups; taken > a.top_groups; taken--) {  // the worst, of equals the higher
        int64_t worst = -1;
        for (int64_t g = 0; g < a.groups; g++)
            if (of_group[g] != INFINITY && (worst < 0 || of_group[g] <= of_group[worst])) worst = g;
        if (worst < 0) break;
        of_group[worst] = INFINITY;
        std::fill(choice + worst * size, choice + (worst + 1) * size, -INFINITY);
    }
}

// scratch: two numbers per expert.
void route_token(const RouteArgs& a, const float* logits, float* scratch, int64_t* experts, float* weights) {
    int64_t count = a.router_logits.dim;
    Scores scores(a.sigmoid, logits, count);
    if (a.bias.data == nullptr) {
        choose(logits, count, a.top_k, experts);
    } else {
        const float* bias = elements_of<const float>(a.bias);
        for_lanes(count, [&](int64_t i, int n) {
            store_lanes(scratch + i, scores.of(load_lanes(logits + i, n)) + load_lanes(bias + i, n), n);
        });
        leave_out_groups(a, scratch, count, scratch + count);
        choose(scratch, count, a.top_k, experts);
    }
    float chosen = 0.0f;
    for (int64_t k = 0; k < a.top_k; k++) {
        weights[k] = scores.of(splat(logits[experts[k]]))[0];
        chosen += weights[k];
    }
    for (int64_t k = 0; k < a.top_k; k++) {
        weights[k] = (a.renormalize ? weights[k] / chosen : weights[k]) * a.factor;
        if (a.factors.data != nullptr) weights[k] *= elements_of<const float>(a.factors)[experts[k]];
    }
}

// A block of pairs, sorted.
struct Order {
    int32_t* place;  // [pairs], index of a pair among those sorted by expert
    int32_t* begin;  // [experts + 1], first sorted pair of an expert
};

void sort_pairs(const int64_t* expert, int64_t pairs, int64_t num_experts, const Order& to) {
    std::fill(to.begin, to.begin + num_experts + 1, 0);
    for (int64_t i = 0; i < pairs; i++) to.begin[expert[i] + 1]++;
    for (int64_t e = 0; e < num_experts; e++) to.begin[e + 1] += to.begin[e];
    for (int64_t i = 0; i < pairs; i++) to.place[i] = to.begin[expert[i]]++;
    for (int64_t e = num_experts; e > 0; e--) to.begin[e] = to.begin[e - 1];
    to.begin[0] = 0;
}

// Multiply each expert with its pairs. job: covers all pairs; its weight may be any expert's.
void multiply_experts(LinearJob job, const ExpertStack& stack, const Order& order, int threads) {
    int32_t* active = static_cast<int32_t*>(thread_scratch(sizeof(int32_t) * stack.count, 1));
    int64_t count = 0;
    for (int64_t e = 0; e < stack.count; e++)
        if (order.begin[e + 1] > order.begin[e]) active[count++] = static_cast<int32_t>(e);
    linear_convert_all(job, 2, threads);
    int64_t panels = linear_panels(job), all = count * panels;
    threads = threads_for(count * job.weight->out_features * job.weight->in_features, threads, all);
    int64_t pieces = threads == 1 ? 1 : job.rows < FEW_ROWS * count ? threads : std::min<int64_t>(8 * threads, all);
    for_claims(pieces, threads, [&](int64_t piece) {
        int64_t at = all * piece / pieces, end = all * (piece + 1) / pieces;
        while (at < end) {
            int32_t expert = active[at / panels];
            int64_t panel = at % panels, panel_end = std::min(panels, panel + end - at);
            LinearJob mine = job;
            mine.weight = stack.experts[expert];
            linear_multiply_part(mine, order.begin[expert], order.begin[expert + 1], panel, panel_end);
            at += panel_end - panel;
        }
    });
}

// out = gate * sigmoid(alpha * gate) * (up + 1), both limited; of `count` elements.
template <class T>
void limited_gate(const T* gate, int64_t up, T* out, int64_t count, float alpha, float limit) {
    for_lanes(count, [&](int64_t i, int n) {
        f32x16 g = load_lanes(gate + i, n), u = load_lanes(gate + up + i, n);
        g = select(g > limit, splat(limit), g);
        u = select(u > limit, splat(limit), select(u < -limit, splat(-limit), u));
        store_lanes(out + i, g * sigmoid(alpha * g) * (u + 1.0f), n);
    });
}

template <class T>
void run_block(const MoeArgs& a, int64_t first, int64_t tokens, int threads) {
    int64_t top_k = a.experts.dim, pairs = tokens * top_k, hidden = a.x.dim, inner = a.down->experts[0]->in_features;
    int64_t out_features = a.gate_up->experts[0]->out_features, num_experts = a.gate_up->count;
    bool gated = out_features != inner, fused = a.limit == 0.0f && (!gated || inner % PANEL == 0);
    int64_t up_width = fused ? inner : out_features;
    int64_t bytes = 6 * 64 + 4 * pairs + 4 * (num_experts + 1) + 4 * pairs * hidden +
                    pairs * (hidden + up_width + inner) * static_cast<int64_t>(sizeof(T));
    Allocation memory{static_cast<char*>(thread_scratch(bytes, 0))};
    Order order{memory.take<int32_t>(pairs), memory.take<int32_t>(num_experts + 1)};
    T *sorted = memory.take<T>(pairs * hidden), *up = memory.take<T>(pairs * up_width);
    T* active = fused ? up : memory.take<T>(pairs * inner);
    auto* results = memory.take<float>(pairs * hidden);
    const float* weights = elements_of<const float>(a.weights) + first * top_k;
    const T* x = elements_of<const T>(a.x) + first * a.x.stride;
    sort_pairs(elements_of<const int64_t>(a.experts) + first * top_k, pairs, num_experts, order);
    for_shares(pairs, pairs * hidden, threads, [&](int64_t i) {
        const T* from = x + i / top_k * a.x.stride;
        T* to = sorted + order.place[i] * hidden;
        f32x16 factor = splat(weights[i]);
        if (a.scales_input)
            for_lanes(hidden, [&](int64_t j, int n) { store_lanes(to + j, load_lanes(from + j, n) * factor, n); });
        else
            memcpy(static_cast<void*>(to), from, sizeof(T) * hidden);
    });
    int32_t dtype = a.x.dtype;
    multiply_experts({a.gate_up->experts[0], sorted, pairs, hidden, dtype, dtype, up, up_width,
                      fused ? a.activation : ACTIVATION_IDENTITY, fused && gated},
                     *a.gate_up, order, threads);
    if (!fused)
        by_activation(a.activation, [&](auto function) {
            for_shares(pairs, pairs * inner * 2, threads, [&](int64_t i) {
                const T* from = up + i * up_width;
                if (a.limit == 0.0f)
                    gate_lanes<decltype(function)>(from, inner, active + i * inner, inner);
                else
                    limited_gate(from, inner, active + i * inner, inner, a.alpha, a.limit);
            });
        });
    multiply_experts({a.down->experts[0], active, pairs, inner, dtype, F32, results, hidden}, *a.down, order, threads);
    for_shares(tokens, pairs * hidden, threads, [&](int64_t t) {
        const int32_t* place = order.place + t * top_k;
        T* out = elements_of<T>(a.out) + (first + t) * hidden;
        for_lanes(hidden, [&](int64_t i, int n) {
            f32x16 sum = {};
            for (int64_t k = 0; k < top_k; k++) {
                f32x16 weight = splat(a.scales_input ? 1.0f : weights[t * top_k + k]);
                sum = fma(weight, load_lanes(results + place[k] * hidden + i, n), sum);
            }
            store_lanes(out + i, sum, n);
        });
    });
}

}  // namespace

PAGODA_EXPORT void pagoda_route(const RouteArgs* a, int32_t threads) {
    int64_t tokens = a->router_logits.rows, count = a->router_logits.dim, top_k = a->top_k;
    by_dtype(a->router_logits.dtype, [&](auto element) {
        auto* from = elements_of<const decltype(element)>(a->router_logits);
        for_shares(tokens, tokens * count * top_k, threads, [&](int64_t t) {
            auto* logits = static_cast<float*>(thread_scratch(sizeof(float) * 3 * count, 1));
            const auto* row = from + t * a->router_logits.stride;
            for_lanes(count, [&](int64_t i, int n) { store_lanes(logits + i, load_lanes(row + i, n), n); });
            route_token(*a, logits, logits + count, elements_of<int64_t>(a->experts) + t * top_k,
                        elements_of<float>(a->weights) + t * top_k);
        });
    });
}

PAGODA_EXPORT void pagoda_moe(const MoeArgs* a, int32_t threads) {
    int64_t block = std::max<int64_t>(1, MOST_PAIRS / a->experts.dim);
    by_dtype(a->x.dtype, [&](auto element) {
        for (int64_t first = 0; first < a->x.rows; first += block)
            run_block<decltype(element)>(*a, first, std::min(block, a->x.rows - first), threads);
    });
}
