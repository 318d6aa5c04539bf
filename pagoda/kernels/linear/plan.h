// Which thread computes which part of a weight. Packing reads it too: a thread writes, and so first touches, the memory that
// it will read.
#pragma once

#include <algorithm>

#include "abi.h"
#include "parallel.h"

struct LinearPlan {
    int64_t panels;    // or pairs of them: of a gate and its partner
    int64_t segments;  // of K_SEGMENT along K that threads may divide a panel at; 1 where they take whole panels
    int threads;       // that have a part, of equal size but for one segment

    // The part of a thread: segments, panel by panel.
    Range part(int thread) const { return share_of(panels * segments, thread, threads); }
    // The panels of which it has the first segment.
    Range owned(int thread) const {
        Range mine = part(thread);
        return {(mine.begin + segments - 1) / segments, (mine.end + segments - 1) / segments};
    }
};

inline int64_t num_segments(const PackedLinear& w) { return (w.in_features + K_SEGMENT - 1) / K_SEGMENT; }

inline LinearPlan plan_of(const PackedLinear& w, bool in_pairs, int threads) {
    int64_t panels = (w.out_features + PANEL - 1) / PANEL / (in_pairs ? 2 : 1);
    int64_t segments = num_segments(w);
    threads = threads_for(w.out_features * w.in_features, threads);
    auto most_of = [&](int64_t count) { return (count + threads - 1) / threads; };  // that one thread has
    // The sums of a panel that is divided pass through memory: only where the busiest thread gets a twentieth less to do.
    if (20 * most_of(panels * segments) > 19 * most_of(panels) * segments) segments = 1;
    return {panels, segments, static_cast<int>(std::min<int64_t>(threads, panels * segments))};
}

// Call body(first panel, end) with the panels that each thread owns, on that thread, of those in [begin, end).
template <class Body>
void on_owners(const PackedLinear& w, int threads, int64_t begin, int64_t end, Body&& body) {
    LinearPlan plan = plan_of(w, w.in_pairs, threads);
    parallel(plan.threads, [&](int thread, int count) {
        for (; thread < plan.threads; thread += count)
            for (int64_t side = 0; side < (w.in_pairs ? 2 : 1); side++) {
                Range own = plan.owned(thread);
                int64_t first = std::max(begin, own.begin + side * plan.panels);
                int64_t last = std::min(end, own.end + side * plan.panels);
                if (first < last) body(first, last);
            }
    });
}
