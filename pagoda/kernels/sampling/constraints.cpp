// Logit constraints of a batch; their definition is sampling/reference.py. One row is one thread's work.
#include <cstring>
#include <limits>

#include "parallel.h"

namespace {

constexpr float NEVER = -std::numeric_limits<float>::infinity();

template <class Body>
void for_ids(const TokenRuns& runs, int64_t row, Body&& body) {
    for (int64_t i = runs.starts[row]; i < runs.starts[row + 1]; i++) body(runs.ids[i], i);
}

void constrain_row(float* logits, int64_t vocab, const LogitConstraints& c, int64_t row) {
    for_ids(c.bias, row, [&](int32_t id, int64_t i) { logits[id] += c.bias_values[i]; });
    float repetition = c.repetition[row], frequency = c.frequency[row], presence = c.presence[row];
    for_ids(c.penalized, row, [&](int32_t id, int64_t i) {
        float value = logits[id] > 0.0f ? logits[id] / repetition : logits[id] * repetition;
        int32_t count = c.output_counts[i];
        logits[id] = count > 0 ? value - (frequency * static_cast<float>(count) + presence) : value;
    });
    if (const uint8_t* allowed = c.allowed[row]) {
        int64_t length = c.allowed_lengths[row];
        for (int64_t id = 0; id < length; id++) logits[id] = allowed[id] ? logits[id] : NEVER;
        for (int64_t id = length; id < vocab; id++) logits[id] = NEVER;
    }
    for_ids(c.forbidden, row, [&](int32_t id, int64_t) { logits[id] = NEVER; });
}

}  // namespace

// logits [rows, vocab], changed in place. The caller has checked every row and id.
PAGODA_EXPORT void pagoda_constrain(float* logits, int64_t stride, int64_t rows, int64_t vocab,
                                    const LogitConstraints* c, int32_t threads) {
    (void)rows;
    for_claims(c->count, threads, [&](int64_t row) { constrain_row(logits + c->rows[row] * stride, vocab, *c, row); });
}
