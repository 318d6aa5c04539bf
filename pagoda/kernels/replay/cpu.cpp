// A whole forward in one call: a recorded list of steps, walked.
//
// Every step is the same function that op-by-op execution calls, so both give the same bits. What a replay saves is
// Python between the ops, memory traffic, and waking threads: the pool's are still awake when the next step comes.
#include <chrono>

#include "entry_points.h"

namespace {

// Mirrored by replay/program.py.
enum Op : int32_t { EMBEDDING, RMS_NORM, ADD_RMS_NORM, ADD, LINEAR, ROTARY, WRITE_KV, ATTENTION, GATED, SOFTCAP, SELECT };

// Where a value stands: a slot of scratch memory, and in it `offset` elements on, a token every `stride`.
// slot RESULT is the caller's output; NOTHING is absent.
constexpr int32_t NOTHING = -1, RESULT = -2;
struct View {
    int64_t offset, stride;
    int32_t slot, unused;
};

// What the numbers mean is said where each op reads them.
struct Step {
    int32_t op, group;
    int32_t tail, unused;  // tail: its outputs are those of the batch's tail
    View in[2], out[2];
    const void* pointers[6];
    int64_t numbers[5];
    float factors[2];
};

struct Program {
    const Step* steps;
    const int64_t* slot_widths;  // elements a token
    int64_t num_steps, num_slots;
    int32_t dtype, unused;
};

// The batch, or its tail, as one KV group sees it; AttentionMetadata.
struct Group {
    const int32_t *query_start, *seq_lens, *block_table;
    const int64_t* slot_mapping;
    int64_t table_stride, block_size, num_rows;
};

struct Batch {
    const int32_t *token_ids, *positions;
    const Group* groups;  // the batch's, then the tail's
    const int64_t* tail_index;
    void *scratch, *result;
    int64_t num_tokens, num_tail;
};

constexpr int64_t ALIGN = 64;
constexpr int64_t MAX_SLOTS = 32;

int64_t element_bytes(int32_t dtype) { return dtype == F32 ? 4 : 2; }

template <class T>
void add_rows(const void* a, const void* b, void* out, int64_t elements, int threads) {
    parallel(threads_for(elements, threads), [&](int thread, int num_threads) {
        Range mine = share_of(elements, thread, num_threads, 16);
        const T *x = static_cast<const T*>(a) + mine.begin, *y = static_cast<const T*>(b) + mine.begin;
        T* to = static_cast<T*>(out) + mine.begin;
        for_lanes(mine.end - mine.begin,
                  [&](int64_t i, int n) { store_lanes(to + i, load_lanes(x + i, n) + load_lanes(y + i, n), n); });
    });
}

void select_rows(const char* x, int64_t stride, const int64_t* index, int64_t rows, int64_t width, char* out) {
    for (int64_t i = 0; i < rows; i++) memcpy(out + i * width, x + index[i] * stride, static_cast<size_t>(width));
}

class Walk {
  public:
    Walk(const Program& program, const Batch& batch, int threads)
        : dtype_(program.dtype), batch_(batch), threads_(threads) {
        char* at = static_cast<char*>(batch.scratch);
        for (int64_t slot = 0; slot < program.num_slots; slot++) {
            slots_[slot] = at;
            at += round_up(program.slot_widths[slot] * batch.num_tokens * element_bytes(dtype_), ALIGN);
        }
    }

    void run(const Step& s) const {
        const int64_t tokens = s.tail ? batch_.num_tail : batch_.num_tokens;
        const void *x = place(s.in[0]), *second = place(s.in[1]);
        void* out = place(s.out[0]);
        const int64_t* n = s.numbers;
        switch (s.op) {
            case EMBEDDING:  // table | hidden
                return pagoda_embedding(dtype_, batch_.token_ids, s.pointers[0], out, tokens, n[0], s.factors[0],
                                        threads_);
            case RMS_NORM:  // weight | vectors a token, elements between them, elements of one, unit offset
                return pagoda_rms_norm(dtype_, x, nullptr, s.pointers[0], out, nullptr, tokens, n[0], s.in[0].stride,
                                       n[1], n[2], s.factors[0], static_cast<int>(n[3]), threads_);
            case ADD_RMS_NORM:  // weight | 1, 0, width, unit offset
                return pagoda_rms_norm(dtype_, x, second, s.pointers[0], out, place(s.out[1]), tokens, 1,
                                       s.in[0].stride, 0, n[2], s.factors[0], static_cast<int>(n[3]), threads_);
            case ADD: {  // width
                auto add = dtype_ == F32 ? add_rows<float> : dtype_ == BF16 ? add_rows<bf16> : add_rows<f16>;
                return add(x, second, out, tokens * n[0], threads_);
            }
            case LINEAR:  // packed weight | gate
                return linear_run({static_cast<const PackedLinear*>(s.pointers[0]), x, tokens, s.in[0].stride, dtype_,
                                   dtype_, out, s.out[0].stride, static_cast<int32_t>(n[0]), nullptr},
                                  threads_);
            case ROTARY:  // cos, sin | heads, head size
                return pagoda_rotary(dtype_, x, out, batch_.positions, floats(s, 0), floats(s, 1), tokens, n[0], n[1],
                                     s.in[0].stride, threads_);
            case WRITE_KV: {  // pages of k and v, their scales, cos and sin or null | KV heads, head size, stored dtype
                const Group& group = batch_.groups[s.group];
                return pagoda_write_kv(dtype_, static_cast<int>(n[2]), x, second, const_cast<void*>(s.pointers[0]),
                                       const_cast<void*>(s.pointers[1]), const_cast<float*>(floats(s, 2)),
                                       const_cast<float*>(floats(s, 3)), group.slot_mapping, tokens, n[0], n[1],
                                       s.in[0].stride, s.in[1].stride, group.block_size,
                                       s.pointers[4] == nullptr ? nullptr : batch_.positions, floats(s, 4),
                                       floats(s, 5), threads_);
            }
            case ATTENTION: {  // pages, their scales | heads, KV heads, head size, stored dtype, window | scale, softcap
                const Group& group = batch_.groups[s.group];
                return pagoda_attention(
                    dtype_, static_cast<int>(n[3]), x, out, s.pointers[0], s.pointers[1], floats(s, 2), floats(s, 3),
                    group.query_start, group.seq_lens, group.block_table, group.table_stride, s.in[0].stride,
                    static_cast<int>(tokens), static_cast<int>(group.num_rows), static_cast<int>(n[0]),
                    static_cast<int>(n[1]), static_cast<int>(n[2]),
                    static_cast<int>(group.block_size), s.factors[0], static_cast<int>(n[4]), s.factors[1], threads_);
            }
            case GATED: {  // width, gate
                auto gated = n[1] == GATE_SILU ? pagoda_silu_mul : pagoda_gelu_tanh_mul;
                return gated(dtype_, x, out, tokens, n[0], threads_);
            }
            case SOFTCAP:  // width
                return pagoda_softcap(dtype_, x, out, tokens * n[0], s.factors[0], threads_);
            case SELECT: {  // width
                int64_t bytes = element_bytes(dtype_);
                return select_rows(static_cast<const char*>(x), s.in[0].stride * bytes, batch_.tail_index, tokens,
                                   n[0] * bytes, static_cast<char*>(out));
            }
            default: abort();
        }
    }

  private:
    char* place(const View& view) const {
        if (view.slot == NOTHING) return nullptr;
        char* base = view.slot == RESULT ? static_cast<char*>(batch_.result) : slots_[view.slot];
        return base + view.offset * element_bytes(dtype_);
    }
    static const float* floats(const Step& s, int index) { return static_cast<const float*>(s.pointers[index]); }

    int32_t dtype_;
    const Batch& batch_;
    int threads_;
    char* slots_[MAX_SLOTS] = {};
};

}  // namespace

PAGODA_EXPORT int64_t pagoda_replay_scratch_bytes(const Program* program, int64_t num_tokens) {
    int64_t total = 0;
    for (int64_t slot = 0; slot < program->num_slots; slot++)
        total += round_up(program->slot_widths[slot] * num_tokens * element_bytes(program->dtype), ALIGN);
    return total;
}

// batch.scratch: pagoda_replay_scratch_bytes(), aligned to 64. The hidden states go to batch.result, contiguous.
// nanoseconds: null, or [ops], to which each op's time is added.
PAGODA_EXPORT void pagoda_replay(const Program* program, const Batch* batch, int threads, int64_t* nanoseconds) {
    using Clock = std::chrono::steady_clock;
    Walk walk(*program, *batch, threads);
    if (nanoseconds == nullptr) {
        for (int64_t i = 0; i < program->num_steps; i++) walk.run(program->steps[i]);
        return;
    }
    for (int64_t i = 0; i < program->num_steps; i++) {
        auto begin = Clock::now();
        walk.run(program->steps[i]);
        auto spent = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begin);
        nanoseconds[program->steps[i].op] += spent.count();
    }
}
