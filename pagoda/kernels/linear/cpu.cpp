// The linear layers' entry points; their definition is linear/reference.py.
#include <algorithm>

#include "elementwise.h"
#include "gemm.h"

namespace {

constexpr int64_t MOST_CONVERTED_BYTES = 8 << 20;  // of rows of all heads, which are converted before they are multiplied

void run(const Tensor& x, const PackedLinear* weight, const Tensor& out, int threads, int32_t activation, bool gated) {
    if (x.rows == 0) return;
    auto* to = static_cast<char*>(out.data);
    for (; weight != nullptr; weight = weight->next) {
        linear_run({weight, x.data, x.rows, x.stride, x.dtype, out.dtype, to, out.stride, activation, gated}, threads);
        to += weight->out_features * element_bytes(out);
    }
}

}  // namespace

PAGODA_EXPORT void pagoda_linear(const LinearArgs* a, int32_t threads) {
    run(a->x, a->weight, a->out, threads, ACTIVATION_IDENTITY, false);
}
PAGODA_EXPORT void pagoda_logits(const LogitsArgs* a, int32_t threads) {
    run(a->x, a->weight, a->out, threads, ACTIVATION_IDENTITY, false);
}
PAGODA_EXPORT void pagoda_linear_activate(const LinearActivateArgs* a, int32_t threads) {
    run(a->x, a->weight, a->out, threads, a->kind, false);
}
PAGODA_EXPORT void pagoda_linear_gate(const LinearGateArgs* a, int32_t threads) {
    run(a->x, a->weight, a->out, threads, a->kind, true);
}

// Head h of x times rows h * out .. of the weight: whole panels, each multiplied with the x of its head.
PAGODA_EXPORT void pagoda_linear_by_head(const LinearByHeadArgs* a, int32_t threads) {
    int64_t heads = a->x.heads;
    auto job_of = [&](int64_t head, int64_t first, int64_t rows) -> LinearJob {
        const char* x = static_cast<const char*>(a->x.data) + (first * a->x.stride + head * a->x.dim) * element_bytes(a->x);
        char* out = static_cast<char*>(a->out.data) + first * a->out.stride * element_bytes(a->x);
        return {a->weight, x, rows, a->x.stride, a->x.dtype, a->out.dtype, out, a->out.stride};
    };
    int64_t per_row = static_cast<int64_t>(linear_scratch_bytes(job_of(0, 0, 1))), panels = linear_panels(job_of(0, 0, 1));
    int64_t block = per_row > 0 ? std::max<int64_t>(1, MOST_CONVERTED_BYTES / (heads * per_row)) : a->x.rows;
    for (int64_t first = 0; first < a->x.rows; first += block) {
        int64_t rows = std::min(block, a->x.rows - first);
        int64_t bytes = (static_cast<int64_t>(linear_scratch_bytes(job_of(0, first, rows))) + 63) / 64 * 64;
        char* scratch = bytes > 0 ? static_cast<char*>(thread_scratch(bytes * heads, 3)) : nullptr;
        auto with_scratch = [&](int64_t head) {
            LinearJob job = job_of(head, first, rows);
            if (scratch != nullptr) job.scratch = scratch + head * bytes;
            return job;
        };
        if (scratch != nullptr)
            for_shares(heads, heads * rows * a->x.dim, threads, [&](int64_t head) {
                LinearJob job = with_scratch(head);
                linear_convert(job, 0, linear_pieces_of_x(job));
            });
        for_claims(heads, threads_for(a->weight->out_features * a->x.dim, threads), [&](int64_t head) {
            linear_multiply_part(with_scratch(head), 0, rows, panels * head / heads, panels * (head + 1) / heads);
        });
    }
}

// Write a weight's plan: panels (or pairs), the segments that they may be divided at, and threads.
PAGODA_EXPORT void pagoda_linear_plan(const PackedLinear* weight, int32_t threads, int64_t* plan) {
    LinearPlan of = plan_of(*weight, weight->in_pairs, threads);
    plan[0] = of.panels, plan[1] = of.segments, plan[2] = of.threads;
}

PAGODA_EXPORT int64_t pagoda_linear_bytes(const PackedLinear* weight) {
    return panel_bytes(*weight) * ((weight->out_features + PANEL - 1) / PANEL);
}

// Rows [rows, steps] of 2- or 4-byte words to panels [steps][32] of a weight, from row `first` on, which begins a panel.
// Rows are read a cache line at a time: 32 of them are more streams than the processor fetches ahead by itself.
template <class Word>
static void pack_words(const PackedLinear& w, const Word* from, int64_t first, int64_t rows, int threads) {
    constexpr int64_t LINE = 64 / sizeof(Word), AHEAD = 4 * LINE;
    int64_t begin_panel = first / PANEL, end_panel = begin_panel + (rows + PANEL - 1) / PANEL;
    int64_t steps = panel_bytes(w) / static_cast<int64_t>(PANEL * sizeof(Word));
    auto* to = static_cast<Word*>(const_cast<void*>(w.panels)) + begin_panel * steps * PANEL;
    on_owners(w, threads, begin_panel, end_panel, [&](int64_t p, int64_t last) {
        alignas(64) Word tile[LINE * PANEL];
        for (p -= begin_panel, last -= begin_panel; p < last; p++) {
            int64_t columns = rows - p * PANEL < PANEL ? rows - p * PANEL : PANEL;
            if (columns < PANEL) memset(tile, 0, sizeof(tile));
            auto pack_tile = [&](int64_t begin, auto count) {
                for (int64_t c = 0; c < columns; c++) {
                    const Word* row = from + (p * PANEL + c) * steps + begin;
                    __builtin_prefetch(reinterpret_cast<const char*>(row) + AHEAD * sizeof(Word), 0, 0);
                    for (int64_t s = 0; s < count; s++) memcpy(tile + s * PANEL + c, row + s, sizeof(Word));
                }
                store_past_caches(to + (p * steps + begin) * PANEL, tile, count * PANEL * sizeof(Word));
            };
            int64_t begin = 0;
            for (; begin + LINE <= steps; begin += LINE) pack_tile(begin, std::integral_constant<int64_t, LINE>());
            if (begin < steps) pack_tile(begin, steps - begin);
        }
        end_stores_past_caches();
    });
}
PAGODA_EXPORT void pagoda_pack_words(const PackedLinear* weight, const void* from, int64_t first_row, int64_t rows,
                                     int32_t threads) {
    if (weight->kind == KIND_F16)
        pack_words(*weight, static_cast<const uint16_t*>(from), first_row, rows, threads);
    else
        pack_words(*weight, static_cast<const uint32_t*>(from), first_row, rows, threads);
}

// Codes uint8 [out, groups * group] and scales [out, groups], f16 or exponents, to panels of records; `offsets` are f16
// minima or u16 zero points, [out, groups], for the forms that have them. Of forms with integer scales, `scales` are what
// they and minima count, f16 [out, groups, 1 or 2], and `offsets` the integers as they are packed, [out, groups, bytes].
PAGODA_EXPORT void pagoda_pack_codes(const PackedLinear* weight, const uint8_t* codes, const uint8_t* scales,
                                     const uint8_t* offsets, int32_t threads) {
    const PackedLinear w = *weight;
    int64_t groups = (w.in_features + w.group - 1) / w.group, panels = (w.out_features + PANEL - 1) / PANEL;
    int64_t record = quantized_record_bytes(w.kind, w.group), header = header_bytes(w.kind, w.group) / PANEL;
    int64_t scale_bytes = (WEIGHT_FORMS[w.kind].sub_group != 0 ? units_bytes(w.kind) : scales_bytes(w.kind)) / PANEL;
    auto* to = static_cast<uint8_t*>(const_cast<void*>(w.panels));
    on_owners(w, threads, 0, panels, [&](int64_t p, int64_t end) {
        for (; p < end; p++) {
            int64_t columns = w.out_features - p * PANEL < PANEL ? w.out_features - p * PANEL : PANEL;
            for (int64_t g = 0; g < groups; g++) {
                auto row_at = [&](int64_t c) { return (p * PANEL + c) * groups + g; };
                write_record(w, to + (p * groups + g) * record, columns,
                             [&](int64_t c) { return scales + row_at(c) * scale_bytes; },
                             [&](int64_t c) { return offsets + row_at(c) * (header - scale_bytes); },
                             [&](int64_t c) { return codes + row_at(c) * w.group; });
            }
        }
    });
}
