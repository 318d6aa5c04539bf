// The memory that the ranks of one machine share, and how they wait for each other.
//
// A RankSegment, a flag, then a line per rank, an inbox per rank, the ranks' areas and the slots of their inboxes. A new segment
// is zeros, except for the RankSegment.
//
// Ranks meet: each counts its meetings in its line, and waits until the others of its stage have counted as many. What
// a rank has written before a meeting, the others may read after it. An area has two halves, used in turn: a rank that
// has come to the next meeting has read everything of the last one, so the half before may be written again.
//
// Waiting spins as long as the segment says and then sleeps on a futex. It ends, too, when another rank has failed,
// when the process of the rank that is waited for is gone, and after a deadline: a rank that has failed blocks no other rank.
#pragma once

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <sys/types.h>
#include <unistd.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#include "parallel.h"

namespace collectives {

constexpr int64_t NAP_NS = 20000000;  // how long a rank sleeps before it looks for failures

// A count that one rank raises and others wait for.
struct Count {
    std::atomic<uint32_t> value;
    std::atomic<uint32_t> sleepers;
};

// calls, columns: of the last two chunks, what this rank computes and the bytes of its rows.
struct alignas(64) RankLine {
    Count meetings;
    std::atomic<int32_t> pid;  // 0 until the rank has joined
    uint64_t calls[2];
    int64_t row_bytes[2];
};

// What the stage before sends: slots in turn, each with the bytes of its whole message in front.
struct alignas(64) Inbox {
    Count sent;
    alignas(64) Count received;
};

constexpr int64_t PAGE = 4096, SLOT_HEADER = 64;
inline int64_t pages(int64_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

// Where the parts of a segment begin.
struct Places {
    int64_t lines, inboxes, areas, slots, end;
};
inline Places places_of(const RankSegment& sizes) {
    Places at;
    at.lines = 128;
    at.inboxes = at.lines + sizes.num_ranks * int64_t(sizeof(RankLine));
    at.areas = pages(at.inboxes + sizes.num_ranks * int64_t(sizeof(Inbox)));
    at.slots = at.areas + 2 * sizes.num_ranks * sizes.half_bytes;
    at.end = pages(at.slots + sizes.num_ranks * sizes.num_slots * (SLOT_HEADER + sizes.slot_bytes));
    return at;
}

struct Segment {
    char* base;

    const RankSegment& sizes() const { return *reinterpret_cast<RankSegment*>(base); }
    Places at() const { return places_of(sizes()); }
    // Whether a rank has failed, and with it all.
    std::atomic<uint32_t>& failed() const { return *reinterpret_cast<std::atomic<uint32_t>*>(base + 64); }
    RankLine& line(int rank) const { return reinterpret_cast<RankLine*>(base + at().lines)[rank]; }
    Inbox& inbox(int rank) const { return reinterpret_cast<Inbox*>(base + at().inboxes)[rank]; }
    char* half(int rank, int64_t chunk) const {
        return base + at().areas + (2 * rank + chunk % 2) * sizes().half_bytes;
    }
    char* slot(int rank, int64_t message) const {
        int64_t number = rank * sizes().num_slots + message % sizes().num_slots;
        return base + at().slots + number * (SLOT_HEADER + sizes().slot_bytes);
    }
};

inline Segment segment_of(const RankState& state) { return {static_cast<char*>(state.segment)}; }

// This rank cannot go on, and with it all ranks. Returns false.
inline bool fail(RankState& state, int32_t failure, int peer) {
    state.failed = failure;
    state.peer = peer;
    segment_of(state).failed().store(1);
    return false;
}

inline void sleep_until_changed(std::atomic<uint32_t>& value, uint32_t seen) {
#if defined(__linux__)
    timespec nap{0, NAP_NS};
    syscall(SYS_futex, &value, FUTEX_WAIT, seen, &nap, nullptr, 0);
#else
    if (value.load() == seen) usleep(50);
#endif
}

// Raise a count, and wake those that sleep. As the sleeper announces itself before it reads the count again, and this
// rank raises it before it looks for sleepers, at least one of them sees the other.
inline void raise_to(Count& count, int64_t to) {
    count.value.store(static_cast<uint32_t>(to));
    if (count.sleepers.load() == 0) return;
#if defined(__linux__)
    syscall(SYS_futex, &count.value, FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
#endif
}

inline bool is_gone(const RankLine& line) {
    int32_t pid = line.pid.load(std::memory_order_relaxed);
    return pid != 0 && kill(pid, 0) != 0 && errno == ESRCH;
}

inline bool is_aborted(RankState& state, int peer) {
    return segment_of(state).failed().load() != 0 && !fail(state, RANKS_ABORTED, peer);
}

// Wait until `peer` has raised a count to `wanted`; return false, with this rank failed, if that will not be.
inline bool wait_for(RankState& state, Count& count, int64_t wanted, int peer) {
    auto reached = [&] {  // counts wrap around
        return static_cast<int32_t>(count.value.load() - static_cast<uint32_t>(wanted)) >= 0;
    };
    Segment segment = segment_of(state);
    int64_t begin = now_ns();
    do {
        for (int i = 0; i < 64; i++) {
            if (reached()) return true;
            spin_pause();
        }
        sched_yield();  // the rank that is waited for may need this core
    } while (now_ns() - begin < segment.sizes().spin_ns);
    for (;;) {
        count.sleepers.fetch_add(1);
        uint32_t seen = count.value.load();
        if (!reached()) sleep_until_changed(count.value, seen);
        count.sleepers.fetch_sub(1);
        if (is_aborted(state, peer)) return false;
        if (reached()) return true;
        if (is_gone(segment.line(peer))) return fail(state, RANKS_PEER_GONE, peer);
        if (now_ns() - begin > state.deadline_ns) return fail(state, RANKS_DEADLINE, peer);
    }
}

// Meet the other ranks of the stage. Returns false, with this rank failed, if they do not all come.
inline bool meet(RankState& state) {
    Segment segment = segment_of(state);
    raise_to(segment.line(state.number).meetings, ++state.meetings);
    for (int peer = state.first; peer < state.first + state.size; peer++)
        if (peer != state.number && !wait_for(state, segment.line(peer).meetings, state.meetings, peer)) return false;
    return !is_aborted(state, state.number);
}

// Begin a chunk of a call: return where this rank writes its part, before it calls `meet_for`.
inline char* begin_chunk(RankState& state) { return segment_of(state).half(state.number, ++state.chunks); }

// Meet for a chunk. call: what all ranks must agree on.   row_bytes: of this rank.
inline bool meet_for(RankState& state, uint64_t call, int64_t row_bytes) {
    Segment segment = segment_of(state);
    int64_t parity = state.chunks % 2;
    segment.line(state.number).calls[parity] = call;
    segment.line(state.number).row_bytes[parity] = row_bytes;
    if (!meet(state)) return false;
    for (int peer = state.first; peer < state.first + state.size; peer++)
        if (segment.line(peer).calls[parity] != call) return fail(state, RANKS_DISAGREE, peer);
    return true;
}

}  // namespace collectives
