// Between stages on different machines: sockets in place of shared memory.
//
// A message is its size in bytes, then itself. Waiting ends, too, when another rank of the stage has failed, when
// the other side closes its socket, and after the deadline.
#pragma once

#include <poll.h>
#include <sys/socket.h>

#include "segment.h"

namespace collectives {

// Move bytes through a socket; return false, with this rank failed, if that cannot be done.
template <typename Move>
bool move_through(RankState& state, int socket, short event, int64_t bytes, int peer, Move move) {
    int64_t begin = now_ns();
    for (int64_t at = 0; at < bytes;) {
        pollfd ready{socket, event, 0};
        int num_ready = poll(&ready, 1, NAP_NS / 1000000);
        if (is_aborted(state, peer)) return false;
        if (num_ready == 0 && now_ns() - begin > state.deadline_ns) return fail(state, RANKS_DEADLINE, peer);
        if (num_ready <= 0) continue;
        ssize_t moved = move(at, static_cast<size_t>(bytes - at));
        if (moved > 0)
            at += moved;
        else if (moved == 0 || (errno != EAGAIN && errno != EINTR))
            return fail(state, RANKS_PEER_GONE, peer);
    }
    return true;
}

inline bool write_to(RankState& state, int socket, const void* data, int64_t bytes, int peer) {
    return move_through(state, socket, POLLOUT, bytes, peer, [&](int64_t at, size_t left) {
        return send(socket, static_cast<const char*>(data) + at, left, MSG_NOSIGNAL | MSG_DONTWAIT);
    });
}

inline bool read_from(RankState& state, int socket, void* data, int64_t bytes, int peer) {
    return move_through(state, socket, POLLIN, bytes, peer, [&](int64_t at, size_t left) {
        return recv(socket, static_cast<char*>(data) + at, left, MSG_DONTWAIT);
    });
}

inline void send_message(RankState& state, const void* data, int64_t bytes, int to) {
    if (write_to(state, state.next, &bytes, sizeof(bytes), to)) write_to(state, state.next, data, bytes, to);
}

inline void receive_message(RankState& state, void* data, int64_t bytes, int from) {
    int64_t of_message;
    if (!read_from(state, state.previous, &of_message, sizeof(of_message), from)) return;
    if (of_message != bytes)
        fail(state, RANKS_DISAGREE, from);
    else
        read_from(state, state.previous, data, bytes, from);
}

}  // namespace collectives
