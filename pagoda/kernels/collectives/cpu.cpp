// Sums and gathers of the ranks of a stage, and messages from stage to stage, in shared memory. The definition of the
// ops is collectives/reference.py.
//
// A call that fails leaves zeros, and the rank failed: all further calls return at once, and the caller raises.
#include "segment.h"
#include "stage_socket.h"

#include "elementwise.h"

using namespace collectives;

namespace {

constexpr int64_t SHARED_SUM_MIN_BYTES = 32768;  // from here on, each of three ranks or more sums only its share

// Copy within a machine, by several threads where that is faster.
void copy(void* to, const void* from, int64_t bytes, int threads) {
    parallel(threads_for(bytes / 4, threads), [&](int thread, int num_threads) {
        Range mine = share_of(bytes, thread, num_threads, 4096);
        memcpy(static_cast<char*>(to) + mine.begin, static_cast<const char*>(from) + mine.begin,
               static_cast<size_t>(mine.end - mine.begin));
    });
}

int64_t bytes_of(const Tensor& x) { return num_elements(x) * element_bytes(x); }

uint64_t call_of(int32_t op, const Tensor& x, int64_t width) {
    return uint64_t(op) << 60 ^ uint64_t(x.dtype) << 56 ^ uint64_t(x.rows) << 28 ^ uint64_t(width);
}

// out[i] = the sum of all parts' [i], for `count` elements.
template <class T>
void sum_parts(T* out, const T* const* parts, int size, int64_t count, int threads) {
    each_element(out, count, threads, [&](int64_t i, int n) {
        f32x16 total = load_lanes(parts[0] + i, n);
        for (int rank = 1; rank < size; rank++) total = total + load_lanes(parts[rank] + i, n);
        return total;
    });
}

template <class T>
bool sum_chunk(RankState& state, const T* x, T* out, int64_t count, uint64_t call, int threads) {
    Segment segment = segment_of(state);
    copy(begin_chunk(state), x, count * int64_t(sizeof(T)), threads);
    if (!meet_for(state, call, 0)) return false;
    T* parts[MAX_RANKS];
    for (int rank = 0; rank < state.size; rank++)
        parts[rank] = reinterpret_cast<T*>(segment.half(state.first + rank, state.chunks));
    if (state.size < 3 || count * int64_t(sizeof(T)) < SHARED_SUM_MIN_BYTES) {
        sum_parts(out, parts, state.size, count, threads);
        return true;
    }
    // Each rank sums its share, which it alone reads from the parts, in place of its own part of that share.
    int me = state.number - state.first;
    const T* at[MAX_RANKS];
    Range mine = share_of(count, me, state.size, 64);
    for (int rank = 0; rank < state.size; rank++) at[rank] = parts[rank] + mine.begin;
    sum_parts(parts[me] + mine.begin, at, state.size, mine.end - mine.begin, threads);
    if (!meet(state)) return false;
    for (int rank = 0; rank < state.size; rank++) {
        Range share = share_of(count, rank, state.size, 64);
        copy(out + share.begin, parts[rank] + share.begin, (share.end - share.begin) * int64_t(sizeof(T)), threads);
    }
    return true;
}

// Copy bytes at .. at + bytes of a rank's rows, laid end to end, to their columns in rows of out_row_bytes.
void place_columns(char* out, int64_t out_row_bytes, const char* from, int64_t row_bytes, int64_t at, int64_t bytes) {
    while (bytes > 0) {
        int64_t column = at % row_bytes, run = row_bytes - column < bytes ? row_bytes - column : bytes;
        memcpy(out + at / row_bytes * out_row_bytes + column, from, static_cast<size_t>(run));
        from += run, at += run, bytes -= run;
    }
}

}  // namespace

PAGODA_EXPORT void pagoda_all_reduce(const AllReduceArgs* a, int32_t threads) {
    RankState& state = *a->ranks;
    by_dtype(a->x.dtype, [&](auto element) {
        using T = decltype(element);
        const T* x = elements_of<T>(a->x);
        T* out = elements_of<T>(a->out);
        int64_t elements = num_elements(a->x), most = segment_of(state).sizes().half_bytes / int64_t(sizeof(T));
        uint64_t call = call_of(1, a->x, row_elements(a->x));
        for (int64_t at = 0; at < elements; at += most) {
            int64_t count = elements - at < most ? elements - at : most;
            if (state.failed || !sum_chunk(state, x + at, out + at, count, call, threads)) {
                memset(static_cast<void*>(out + at), 0, static_cast<size_t>(elements - at) * sizeof(T));
                return;
            }
        }
    });
}

PAGODA_EXPORT void pagoda_all_gather(const AllGatherArgs* a, int32_t threads) {
    RankState& state = *a->ranks;
    Segment segment = segment_of(state);
    int64_t half = segment.sizes().half_bytes, out_row_bytes = a->out.dim * element_bytes(a->x);
    int64_t row_bytes = a->x.dim * element_bytes(a->x), bytes = a->x.rows * row_bytes;
    const char* x = elements_of<char>(a->x);
    char* out = elements_of<char>(a->out);
    uint64_t call = call_of(2, a->x, a->out.dim);
    // How many chunks there are depends on the rank with most columns, which the first meeting tells.
    int64_t most_bytes = a->x.rows != 0 ? 1 : 0;
    bool going_on = state.failed == RANKS_NOTHING;
    for (int64_t at = 0; at < most_bytes && going_on; at += half) {
        char* part = begin_chunk(state);
        if (at < bytes) copy(part, x + at, bytes - at < half ? bytes - at : half, threads);
        going_on = meet_for(state, call, row_bytes);
        int64_t first_column = 0;
        for (int rank = state.first; rank < state.first + state.size && going_on; rank++) {
            int64_t of_rank = segment.line(rank).row_bytes[state.chunks % 2], end = a->x.rows * of_rank;
            if (first_column + of_rank > out_row_bytes) going_on = fail(state, RANKS_DISAGREE, rank);
            else if (at < end)
                place_columns(out + first_column, out_row_bytes, segment.half(rank, state.chunks), of_rank, at,
                              end - at < half ? end - at : half);
            first_column += of_rank;
            most_bytes = most_bytes < end ? end : most_bytes;
        }
        if (going_on && first_column != out_row_bytes) going_on = fail(state, RANKS_DISAGREE, state.number);
    }
    if (!going_on) memset(out, 0, static_cast<size_t>(a->x.rows * out_row_bytes));
}

// Send bytes to this rank of the next stage; return when they may be changed.
PAGODA_EXPORT void pagoda_send(RankState* state, const void* data, int64_t bytes) {
    Segment segment = segment_of(*state);
    int to = state->number + state->size;
    if (state->next) return send_message(*state, data, bytes, to);
    Inbox& inbox = segment.inbox(to);
    for (int64_t at = 0, most = segment.sizes().slot_bytes; at < bytes && !state->failed; at += most) {
        if (!wait_for(*state, inbox.received, state->sent + 1 - segment.sizes().num_slots, to)) return;
        char* slot = segment.slot(to, state->sent);
        memcpy(slot, &bytes, sizeof(bytes));
        memcpy(slot + SLOT_HEADER, static_cast<const char*>(data) + at,
               static_cast<size_t>(bytes - at < most ? bytes - at : most));
        raise_to(inbox.sent, ++state->sent);
    }
}

// Receive so many bytes from this rank of the stage before.
PAGODA_EXPORT void pagoda_receive(RankState* state, void* data, int64_t bytes) {
    Segment segment = segment_of(*state);
    int from = state->number - state->size;
    if (state->previous) return receive_message(*state, data, bytes, from);
    Inbox& inbox = segment.inbox(state->number);
    for (int64_t at = 0, most = segment.sizes().slot_bytes; at < bytes && !state->failed; at += most) {
        if (!wait_for(*state, inbox.sent, state->received + 1, from)) return;
        const char* slot = segment.slot(state->number, state->received);
        int64_t of_message;
        memcpy(&of_message, slot, sizeof(of_message));
        if (of_message != bytes) {
            fail(*state, RANKS_DISAGREE, from);
            return;
        }
        memcpy(static_cast<char*>(data) + at, slot + SLOT_HEADER,
               static_cast<size_t>(bytes - at < most ? bytes - at : most));
        raise_to(inbox.received, ++state->received);
    }
}

PAGODA_EXPORT void pagoda_send_rows(const SendRowsArgs* a, int32_t) { pagoda_send(a->ranks, a->x.data, bytes_of(a->x)); }

PAGODA_EXPORT void pagoda_receive_rows(const ReceiveRowsArgs* a, int32_t) {
    pagoda_receive(a->ranks, a->out.data, bytes_of(a->out));
    if (a->ranks->failed) memset(a->out.data, 0, static_cast<size_t>(bytes_of(a->out)));
}

// Bytes of a segment with these sizes.
PAGODA_EXPORT int64_t pagoda_rank_segment_bytes(const RankSegment* sizes) { return places_of(*sizes).end; }

// Make this process a rank of its segment: others find out when it ends.
PAGODA_EXPORT void pagoda_join_ranks(RankState* state) { segment_of(*state).line(state->number).pid.store(getpid()); }
