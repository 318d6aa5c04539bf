"""The engine process: an engine core behind a socket. Started by ProcessClient as `python -m pagoda.engine_process`.

It blocks while there is nothing to do, takes what has come in between two steps, and ends when its parent does.
"""

import contextlib
import dataclasses
import signal
import sys
import threading
import time

import msgspec
import zmq

from pagoda.base.errors import ConfigError, PagodaError
from pagoda.engine import wire
from pagoda.engine.engine_core import EngineCore
from pagoda.engine.process_client import ProcessOptions

STATS_INTERVAL_S = 0.1


class EngineServer:
    """Serves one client over one socket until the socket or the parent goes away."""

    def __init__(self, core: EngineCore, socket: zmq.Socket[bytes]) -> None:
        self._core = core
        self._socket = socket
        self._codec = wire.Codec(wire.ToEngine)
        self._stats_at = 0.0

    def run(self) -> None:
        core = self._core
        while True:
            if not core.has_unfinished_requests():
                self._socket.send(self._codec.encode(wire.StatsReport(self._make_stats())))
                self._handle(self._socket.recv())
            self._drain()
            for outputs in core.step().values():
                now = time.monotonic()
                stats = None
                if now - self._stats_at >= STATS_INTERVAL_S:
                    self._stats_at, stats = now, self._make_stats()
                self._socket.send(self._codec.encode(wire.StepOutputs(outputs, stats)))

    def _drain(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                self._handle(self._socket.recv(zmq.NOBLOCK))

    def _handle(self, data: bytes) -> None:
        match self._codec.decode(data):
            case wire.AddRequest(request):
                try:
                    self._core.add_request(request)
                except PagodaError as error:
                    refused = wire.RequestRefused(request.request_id, request.handle, str(error))
                    self._socket.send(self._codec.encode(refused))
            case wire.AbortRequests(request_ids):
                self._core.abort(list(request_ids))
            case wire.FinishBranch(request_id, branch, status):
                self._core.finish_branch(request_id, branch, status)
            case wire.ResetPrefixCache(call_id, preempt_running):
                done = self._core.reset_prefix_cache(preempt_running)
                self._socket.send(self._codec.encode(wire.ResetReply(call_id, done)))

    def _make_stats(self) -> wire.EngineStats:
        return wire.EngineStats(**dataclasses.asdict(self._core.make_stats()))


def main() -> None:
    """Read ProcessOptions from standard input, build the engine, serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches the whole group; the parent decides
    stdin = sys.stdin.buffer
    size = int.from_bytes(stdin.read(8), "little")
    options = msgspec.msgpack.decode(stdin.read(size), type=ProcessOptions)
    threading.Thread(target=_end_with_parent, args=(stdin,), daemon=True).start()
    socket = zmq.Context().socket(zmq.PAIR)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.connect(options.socket)
    codec = wire.Codec(wire.ToEngine)
    began = time.monotonic()
    try:
        core = _build(options)
    except (PagodaError, OSError, MemoryError) as error:
        socket.send(codec.encode(wire.StartFailed(str(error), isinstance(error, ConfigError))))
        socket.close()
        sys.exit(1)
    socket.send(codec.encode(wire.Ready(dataclasses.replace(core.facts, load_s=time.monotonic() - began))))
    EngineServer(core, socket).run()


if __name__ == "__main__":
    main()
