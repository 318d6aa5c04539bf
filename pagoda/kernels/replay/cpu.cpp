// A whole forward in one call: runs a recorded list of steps.
//
// Every step is the function that op-by-op execution calls, so both give the same bits. A replay saves the
// Python between ops, memory traffic, and waking threads: the pool's threads still spin when the next step starts.
// No op is named here: `run_op` is generated from the op table.
#include <chrono>

#include "parallel.h"

namespace {

constexpr int64_t ALIGN = 64;

// Bytes of a slot: the most that any domain needs.
int64_t slot_bytes(const Program& program, int64_t slot, const int64_t* rows) {
    int64_t most = 0;
    for (int domain = 0; domain < NUM_DOMAINS; domain++) {
        int64_t bytes = program.slot_bytes[slot * NUM_DOMAINS + domain] * rows[domain];
        if (bytes > most) most = bytes;
    }
    return (most + ALIGN - 1) / ALIGN * ALIGN;
}

int32_t check(const Check& c, const Run& run, int64_t* bad_at) {
    int64_t rows = c.domain < 0 ? -1 : run.rows[c.domain];
    if (c.group == nullptr) {
        int64_t limit = c.limit < 0 ? run.rows[-1 - c.limit] : c.limit;
        return pagoda_check_indices(run.places[c.place], c.dtype, rows * c.width, limit, bad_at);
    }
    return pagoda_check_group(c.group, c.limit, rows, c.written < 0 ? 0 : run.rows[c.written], bad_at);
}

void bind(const Step& step, const Run& run) {
    for (int32_t i = 0; i < step.num_bindings; i++) {
        const Binding& b = step.bindings[i];
        auto* tensor = reinterpret_cast<Tensor*>(static_cast<char*>(step.args) + b.field);
        tensor->data = static_cast<char*>(run.places[b.place]) + b.bytes;
        tensor->rows = run.rows[b.domain];
    }
}

}  // namespace

PAGODA_EXPORT int64_t pagoda_replay_scratch_bytes(const Program* program, const int64_t* rows) {
    int64_t total = 0;
    for (int64_t slot = 0; slot < program->num_slots; slot++) total += slot_bytes(*program, slot, rows);
    return total;
}

// run.scratch: pagoda_replay_scratch_bytes(), aligned to 64. Returns the failed check (then nothing has run), or 0.
// nanoseconds: null, or [NUM_OPS]; each op's time is added.
PAGODA_EXPORT int32_t pagoda_replay(const Program* program, Run* run, int32_t threads, int64_t* nanoseconds) {
    for (int64_t i = 0; i < program->num_checks; i++) {
        int32_t bad = check(program->checks[i], *run, &run->bad_at);
        if (bad == BAD_NOTHING) continue;
        run->bad_check = i;
        return bad;
    }
    char* at = static_cast<char*>(run->scratch);
    for (int64_t slot = 0; slot < program->num_slots; slot++) {
        run->places[slot] = at;
        at += slot_bytes(*program, slot, run->rows);
    }
    using Clock = std::chrono::steady_clock;
    for (int64_t i = 0; i < program->num_steps; i++) {
        const Step& step = program->steps[i];
        bind(step, *run);
        if (nanoseconds == nullptr) {
            run_op(step.op, step.args, threads);
            continue;
        }
        auto begin = Clock::now();
        run_op(step.op, step.args, threads);
        nanoseconds[step.op] += std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begin).count();
    }
    return BAD_NOTHING;
}
