// Mixture of experts; its definition is moe/reference.py.
//
// A pair is a token and one of its experts. Pairs are sorted by expert, so that each expert multiplies all of its tokens
// at once, with the linear layer's own tiles. A row's bits do not depend on its neighbours: routing looks at one token,
// a tile sums each row in one order, and a token's results are added by rank.
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

// A block of tokens, routed.
struct Routing {
    float* weights;    // [tokens][top_k], by rank
    int32_t* experts;  // [tokens][top_k], by rank
    int32_t* place;    // [tokens][top_k], index of a pair in the order sorted by expert
    int32_t* begin;    // [experts + 1], first sorted pair of an expert
};

// The softmax over the logits of one token.
struct Softmax {
    f32x16 largest;
    float total;
    Softmax(const float* logits, int64_t count) {
        f32x16 top = splat(-INFINITY), sums = {};
        for_lanes(count, [&](int64_t i, int n) { top = vmax(top, load_lanes_or(logits + i, n, -INFINITY)); });
        largest = splat(lane_max(top));
        for_lanes(count, [&](int64_t i, int n) {
            sums = sums + exp(load_lanes_or(logits + i, n, -INFINITY) - largest);
        });
        total = lane_sum(sums);
    }
    f32x16 of(f32x16 logits) const { return exp(logits - largest) / total; }
};

// The top_k experts of one token, the largest choice first and the lower id among equals.
void choose(const float* choice, int64_t count, int64_t top_k, int32_t* experts) {
    for (int64_t k = 0; k < top_k; k++) {
        int64_t best = -1;
        for (int64_t e = 0; e < count; e++) {
            bool taken = std::find(experts, experts + k, static_cast<int32_t>(e)) != experts + k;
            if (!taken && (best < 0 || choice[e] > choice[best])) best = e;
        }
        experts[k] = static_cast<int32_t>(best);
    }
}

// The top_k experts of one token by their logits, with their softmax weights, or with the sigmoids that scale their input.
void route_token(const float* logits, int64_t count, int64_t top_k, bool renormalize, bool scales_input, float* weights,
                 int32_t* experts) {
    choose(logits, count, top_k, experts);
    if (scales_input) {
        for (int64_t k = 0; k < top_k; k++) weights[k] = sigmoid(splat(logits[experts[k]]))[0];
        return;
    }
    Softmax softmax(logits, count);
    float chosen = 0.0f;
    for (int64_t k = 0; k < top_k; k++) {
        weights[k] = softmax.of(splat(logits[experts[k]]))[0];
        chosen += weights[k];
    }
    if (renormalize)
        for (int64_t k = 0; k < top_k; k++) weights[k] /= chosen;
}

// How experts are chosen in groups (grouped_moe); without one, by their logits alone.
struct Groups {
    const float* bias;
    bool sigmoid;
    int64_t count, top, best;
    float factor;
};

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

// The top_k experts of one token by score + bias, in its best groups. logits: [count], become scores; choice: [count].
void route_in_groups(float* logits, float* choice, int64_t count, int64_t top_k, bool renormalize, const Groups& groups,
                     float* weights, int32_t* experts) {
    if (groups.sigmoid) {
        for_lanes(count, [&](int64_t i, int n) { store_lanes(logits + i, sigmoid(load_lanes(logits + i, n)), n); });
    } else {
        Softmax softmax(logits, count);
        for_lanes(count, [&](int64_t i, int n) { store_lanes(logits + i, softmax.of(load_lanes(logits + i, n)), n); });
    }
    for (int64_t e = 0; e < count; e++) choice[e] = logits[e] + groups.bias[e];
    int64_t size = count / groups.count;
    auto* of_group = choice + count;
    for (int64_t g = 0; g < groups.count; g++) of_group[g] = sum_of_best(choice + g * size, size, groups.best);
    for (int64_t taken = groups.count; taken > groups.top; taken--) {  // leave out the worst, of equals the higher
        int64_t worst = -1;
        for (int64_t g = 0; g < groups.count; g++)
            if (of_group[g] != INFINITY && (worst < 0 || of_group[g] <= of_group[worst])) worst = g;
        if (worst < 0) break;
        of_group[worst] = INFINITY;
        std::fill(choice + worst * size, choice + (worst + 1) * size, -INFINITY);
    }
    choose(choice, count, top_k, experts);
    float chosen = 0.0f;
    for (int64_t k = 0; k < top_k; k++) {
        weights[k] = logits[experts[k]];
        chosen += weights[k];
    }
    for (int64_t k = 0; k < top_k; k++) weights[k] = (renormalize ? weights[k] / chosen : weights[k]) * groups.factor;
}

void route(const MoeArgs& a, const Groups* groups, int64_t first, int64_t tokens, const Routing& to, int threads) {
    int64_t count = a.router_logits.dim;
    by_dtype(a.router_logits.dtype, [&](auto element) {
        using T = decltype(element);
        parallel(threads_for(tokens * count * a.top_k, threads, tokens), [&](int thread, int num_threads) {
            Range mine = share_of(tokens, thread, num_threads);
            auto* logits = static_cast<float*>(thread_scratch(sizeof(float) * 3 * count, 1));
            for (int64_t t = mine.begin; t < mine.end; t++) {
                const T* from = elements_of<const T>(a.router_logits) + (first + t) * a.router_logits.stride;
                for_lanes(count, [&](int64_t i, int n) { store_lanes(logits + i, load_lanes(from + i, n), n); });
                float* weights = to.weights + t * a.top_k;
                int32_t* experts = to.experts + t * a.top_k;
                if (groups == nullptr)
                    route_token(logits, count, a.top_k, a.renormalize, a.scales_input, weights, experts);
                else
                    route_in_groups(logits, logits + count, count, a.top_k, a.renormalize, *groups, weights, experts);
                if (a.factors.data != nullptr)
                    for (int64_t k = 0; k < a.top_k; k++) weights[k] *= elements_of<const float>(a.factors)[experts[k]];
            }
        });
    });
    int64_t pairs = tokens * a.top_k, experts = a.gate_up->count;
    std::fill(to.begin, to.begin + experts + 1, 0);
    for (int64_t i = 0; i < pairs; i++) to.begin[to.experts[i] + 1]++;
    for (int64_t e = 0; e < experts; e++) to.begin[e + 1] += to.begin[e];
    for (int64_t i = 0; i < pairs; i++) {
        int32_t place = to.begin[to.experts[i]]++;
        to.place[i] = place;
    }
    for (int64_t e = experts; e > 0; e--) to.begin[e] = to.begin[e - 1];
    to.begin[0] = 0;
}

// Multiply each expert with its pairs. job: covers all pairs; its weight may be any expert's.
void multiply_experts(LinearJob job, const ExpertStack& stack, const Routing& routing, int threads) {
    int32_t* active = static_cast<int32_t*>(thread_scratch(sizeof(int32_t) * stack.count, 1));
    int64_t count = 0;
    for (int64_t e = 0; e < stack.count; e++)
        if (routing.begin[e + 1] > routing.begin[e]) active[count++] = static_cast<int32_t>(e);
    linear_convert_all(job, 2, threads);
    int64_t panels = linear_panels(job), all = count * panels;
    threads = threads_for(count * job.weight->out_features * job.weight->in_features, threads, all);
    int64_t pieces = threads == 1 ? 1 : job.rows < FEW_ROWS * count ? threads : std::min<int64_t>(8 * threads, all);
    std::atomic<int64_t> next{0};
    parallel(threads, [&](int, int) {
        for (int64_t piece; (piece = next.fetch_add(1)) < pieces;) {
            int64_t at = all * piece / pieces, end = all * (piece + 1) / pieces;
            while (at < end) {
                int32_t expert = active[at / panels];
                int64_t panel = at % panels, panel_end = std::min(panels, panel + end - at);
                LinearJob mine = job;
                mine.weight = stack.experts[expert];
                linear_multiply_part(mine, routing.begin[expert], routing.begin[expert + 1], panel, panel_end);
                at += panel_end - panel;
            }
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
void run_block(const MoeArgs& a, const Groups* groups, int64_t first, int64_t tokens, int threads) {
    int64_t pairs = tokens * a.top_k, hidden = a.x.dim, inner = a.down->experts[0]->in_features;
    int64_t out_features = a.gate_up->experts[0]->out_features;
    bool gated = out_features != inner, fused = a.limit == 0.0f && (!gated || inner % PANEL == 0);
    int64_t up_width = fused ? inner : out_features;
    int64_t bytes = 4 * 64 + 3 * pairs * 4 + 4 * (a.gate_up->count + 1) + 64 +
                    pairs * (hidden + up_width + inner) * static_cast<int64_t>(sizeof(T)) + pairs * hidden * 4 + 4 * 64;
    Allocation memory{static_cast<char*>(thread_scratch(bytes, 0))};
    Routing routing{};
    routing.weights = memory.take<float>(pairs);
    routing.experts = memory.take<int32_t>(pairs);
    routing.place = memory.take<int32_t>(pairs);
    routing.begin = memory.take<int32_t>(a.gate_up->count + 1);
    T *sorted = memory.take<T>(pairs * hidden), *up = memory.take<T>(pairs * up_width);
    T* active = fused ? up : memory.take<T>(pairs * inner);
    auto* results = memory.take<float>(pairs * hidden);
    route(a, groups, first, tokens, routing, threads);
    const T* x = elements_of<const T>(a.x) + first * a.x.stride;
    parallel(threads_for(pairs * hidden, threads, pairs), [&](int thread, int num_threads) {
        Range mine = share_of(pairs, thread, num_threads);
        for (int64_t i = mine.begin; i < mine.end; i++) {
            const T* from = x + i / a.top_k * a.x.stride;
            T* to = sorted + routing.place[i] * hidden;
            f32x16 factor = splat(routing.weights[i]);
            if (a.scales_input)
                for_lanes(hidden, [&](int64_t j, int n) { store_lanes(to + j, load_lanes(from + j, n) * factor, n); });
            else
                memcpy(static_cast<void*>(to), from, sizeof(T) * hidden);
        }
    });
    if (a.scales_input) std::fill(routing.weights, routing.weights + pairs, 1.0f);
    int32_t dtype = a.x.dtype;
    multiply_experts({a.gate_up->experts[0], sorted, pairs, hidden, dtype, dtype, up, up_width,
                      fused ? a.activation : ACTIVATION_IDENTITY, fused && gated},
                     *a.gate_up, routing, threads);
    if (!fused)
        parallel(threads_for(pairs * inner * 2, threads, pairs), [&](int thread, int num_threads) {
            Range mine = share_of(pairs, thread, num_threads);
            by_activation(a.activation, [&](auto function) {
                for (int64_t i = mine.begin; i < mine.end; i++) {
                    const T* from = up + i * up_width;
                    if (a.limit == 0.0f)
                        gate_lanes<decltype(function)>(from, inner, active + i * inner, inner);
                    else
                        limited_gate(from, inner, active + i * inner, inner, a.alpha, a.limit);
                }
            });
        });
    multiply_experts({a.down->experts[0], active, pairs, inner, dtype, F32, results, hidden}, *a.down,
                     routing, threads);
    parallel(threads_for(pairs * hidden, threads, tokens), [&](int thread, int num_threads) {
        Range mine = share_of(tokens, thread, num_threads);
        for (int64_t t = mine.begin; t < mine.end; t++) {
            const int32_t* place = routing.place + t * a.top_k;
            const float* weights = routing.weights + t * a.top_k;
            T* out = elements_of<T>(a.out) + (first + t) * hidden;
            for_lanes(hidden, [&](int64_t i, int n) {
                f32x16 sum = {};
                for (int64_t k = 0; k < a.top_k; k++)
                    sum = fma(splat(weights[k]), load_lanes(results + place[k] * hidden + i, n), sum);
                store_lanes(out + i, sum, n);
            });
        }
    });
}

void run_blocks(const MoeArgs& a, const Groups* groups, int threads) {
    int64_t block = std::max<int64_t>(1, MOST_PAIRS / a.top_k);
    by_dtype(a.x.dtype, [&](auto element) {
        for (int64_t first = 0; first < a.x.rows; first += block)
            run_block<decltype(element)>(a, groups, first, std::min(block, a.x.rows - first), threads);
    });
}

}  // namespace

PAGODA_EXPORT void pagoda_moe(const MoeArgs* a, int32_t threads) { run_blocks(*a, nullptr, threads); }

PAGODA_EXPORT void pagoda_grouped_moe(const GroupedMoeArgs* a, int32_t threads) {
    Groups groups{elements_of<const float>(a->bias), a->sigmoid != 0, a->groups, a->top_groups, a->best, a->factor};
    run_blocks({a->x, a->router_logits, a->gate_up, a->down, a->top_k, a->renormalize, 1.0f, 0.0f, a->activation, {}, 0, a->out},
               &groups, threads);
}
