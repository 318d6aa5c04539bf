"""The engine process: serves an engine core over a socket. ProcessClient starts it as a module.

It blocks while there is no work, handles messages between steps, and exits when its parent does.
"""

import contextlib
import dataclasses
import logging
import os
import signal
import sys
import time
from concurrent.futures import Future
from typing import Any

import msgspec
import zmq

from pagoda.assembly.assemble import build_engine_core
from pagoda.assembly.replica_share import take_share
from pagoda.base.config import EngineConfig
from pagoda.base.errors import CapacityError, ConfigError, InvariantBroken, PagodaError, RequestError, WorkerDied
from pagoda.core.events import Event, Removed, Stored
from pagoda.core.request import LoraRef
from pagoda.engine import wire
from pagoda.engine.clients.calls import Calls
from pagoda.engine.clients.engine_link import SOCKET, open_recorder
from pagoda.engine.engine_core import EngineCore, why_refused
from pagoda.executors.multi_process import RankDied
from pagoda.process.allocator import collecting_nothing, keep_objects, return_freed_memory
from pagoda.process.child_process import RendezvousDir, end_with_parent, read_start
from pagoda.process.logs import configure_logging
from pagoda.process.out_of_memory import is_out_of_memory

logger = logging.getLogger("pagoda.engine")

STATS_INTERVAL_S = 0.1
RETURN_MEMORY_AFTER_MS = 1_000
"""Without a message for so long, an idle engine returns the memory of its largest steps to the system."""
LOOK_AT_LOADS_MS = 5


class EngineServer:
    """Serves the clients of the parent process over one socket until that exits."""

    def __init__(self, core: EngineCore, socket: "zmq.Socket[bytes]", tells_cache: bool = False) -> None:
        """tells_cache: send what changes in the prefix cache."""
        self._core = core
        self._cache_changes: dict[bytes, bool] = {}  # whether a hash is found now
        if tells_cache:
            core.subscribe(self._note_cache, cache=True)
        self._socket = socket
        self._codec = wire.Codec(wire.ToEngine)
        self._stats_at = 0.0
        self._num_handled = 0
        self._calls_s = 0.0  # in the engine core's `step`
        self._loading: list[tuple[LoraRef, Future[Any], Future[None]]] = []  # adapters, and the replies
        services = {
            "abort": core.abort,
            "finish_sequence": core.finish_sequence,
            "reset_prefix_cache": core.reset_prefix_cache,
            "load_adapter": self._load,
            "unload_adapter": core.unload_adapter,
            "look": self._look,
        }
        self._calls = _EngineCalls(self._send, services)

    def run(self) -> None:
        """Serve forever. An exception of the engine core ends the process; the client can replay its requests."""
        core = self._core
        while True:
            self._end_loads()
            if not core.has_unfinished_requests():
                # Also while adapters are read, from however slow a disk: such an engine does not hang.
                self._send(wire.IdleReport(self._make_stats(), self._num_handled))
                while self._loading and not self._socket.poll(LOOK_AT_LOADS_MS):
                    self._end_loads()
                if not self._socket.poll(RETURN_MEMORY_AFTER_MS):
                    return_freed_memory()
                self._handle(self._socket.recv())
            self.step()

    def step(self) -> None:
        """Handle the messages that are there, run a step of the engine core, and send what came of it."""
        core = self._core
        self._drain()
        began_s = core.now()
        of_step = core.step()
        self._calls_s += core.now() - began_s
        if self._cache_changes:
            self._send_cache_changes()
        has_stats = self._is_time_for_stats() or any(outputs.ends for outputs in of_step.values())
        if of_step or has_stats:
            stats = self._make_stats() if has_stats else None
            self._send(wire.StepOutputs(of_step, core.strip.take_step_tokens(), stats))

    def _note_cache(self, event: Event) -> None:
        if isinstance(event, Stored | Removed) and event.group == self._core.sizes.prefix_group:
            self._cache_changes.update(dict.fromkeys(event.hashes, isinstance(event, Stored)))

    def _send_cache_changes(self) -> None:
        changes = self._cache_changes.items()
        stored = tuple(one for one, is_found in changes if is_found)
        self._send(wire.CacheChanges(stored, tuple(one for one, is_found in changes if not is_found)))
        self._cache_changes.clear()

    def _drain(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                self._handle(self._socket.recv(zmq.NOBLOCK))

    def _handle(self, data: bytes) -> None:
        self._num_handled += 1
        match self._codec.decode(data):
            case wire.AddRequest() as message:
                self._add(message)
            case message:
                self._calls.take(message)

    def _add(self, message: wire.AddRequest) -> None:
        """Queue a request, or reject it. An error here only affects this request."""
        arrays = [self._socket.recv(copy=False).buffer for _ in range(message.num_arrays)]  # they came with it
        try:
            self._core.add_request(self._codec.decode_request(message, *arrays))
        except (WorkerDied, InvariantBroken):
            raise
        except Exception as error:
            self._send(wire.RequestRefused(message.key, *why_refused(message.request_id, error)))

    def _look(self, steps_after_s: float | None) -> wire.LookReply:
        """Return what runs now, and the steps that ended after a time; they are noted for a while from then on."""
        steps = self._core.strip.after(steps_after_s) if steps_after_s is not None else ()
        return wire.LookReply(self._core.view(), steps, self._make_stats())

    def _load(self, lora: LoraRef) -> "Future[None]":
        """Begin to read an adapter; return what is done once it can be used, or cannot be."""
        reply = Future[None]()
        self._loading.append((lora, self._core.begin_load_adapter(lora), reply))
        self._end_loads()
        return reply

    def _end_loads(self) -> None:
        """Reply to the calls whose adapter has been read, or cannot be."""
        for load in [load for load in self._loading if load[1].done()]:
            self._loading.remove(load)
            lora, loaded, reply = load
            try:
                self._core.end_load_adapter(lora, loaded)
            except (WorkerDied, InvariantBroken):
                raise
            except PagodaError as error:
                reply.set_exception(RequestError(str(error), "lora_request"))
            except Exception as error:
                logger.exception("the adapter %s could not be loaded", lora.name)
                why = f"the adapter {lora.name!r} could not be loaded: {type(error).__name__}: {error}"
                reply.set_exception(RequestError(why, "lora_request"))
            else:
                reply.set_result(None)

    def _send(self, message: msgspec.Struct) -> None:
        self._socket.send(self._codec.encode(message))

    def _is_time_for_stats(self) -> bool:
        return time.monotonic() - self._stats_at >= STATS_INTERVAL_S

    def _make_stats(self) -> wire.EngineStats:
        self._stats_at = time.monotonic()
        read, dropped = self._core.adapter_counts()
        return wire.EngineStats(
            **dataclasses.asdict(self._core.make_stats()),
            num_steps=self._core.strip.num_steps,
            step_s=self._calls_s - self._core.idle_s,
            scheduler_s=self._core.scheduler_s,
            adapters_read=read,
            adapters_dropped=dropped,
            at_s=self._stats_at,
        )


class _EngineCalls(Calls):
    """The calls of the parent process."""

    def refuse(self, call: wire.Call, error: Exception) -> None:
        """Answer a call whose request is at fault; after any other error the engine cannot go on."""
        if not isinstance(error, RequestError):
            raise error
        super().refuse(call, error)


def main() -> None:
    """Read the EngineConfig from standard input, build the engine, and serve on the socket in the folder in argv.

    The number of this replica, from 0, follows the folder.
    """
    place = RendezvousDir(sys.argv[1])
    stdin = sys.stdin.buffer
    data = read_start(stdin)
    if data is None:
        place.remove()
        return
    at_end = contextlib.ExitStack()
    at_end.callback(place.remove)
    end_with_parent(stdin, at_end.close)
    socket = zmq.Context().socket(zmq.PAIR)
    socket.connect(place.address(SOCKET))
    codec = wire.Codec(wire.ToEngine)
    config, number = msgspec.msgpack.decode(data, type=EngineConfig), int(sys.argv[2])
    name = "engine" if config.server.data_parallel_size == 1 else f"engine-{number + 1}"
    configure_logging(name, config.server.logs.log_level, config.server.logs.log_format)
    try:
        # The process runs no other threads, so pinning is safe.
        recorder = open_recorder(place, config)
        with collecting_nothing():
            core = build_engine_core(
                take_share(config, number), pin_threads=True, on_death=_end_like, recorder=recorder, replica=number
            )
            keep_objects()
    except Exception as error:
        known = isinstance(error, PagodaError | OSError | MemoryError) or is_out_of_memory(error)
        if not known:
            logger.exception("the engine could not start")  # a bug: the parent only logs one line
        text = str(error) if isinstance(error, PagodaError) else f"{type(error).__name__}: {error}"
        socket.send(codec.encode(wire.StartFailed(text, isinstance(error, ConfigError | CapacityError))))
        socket.close(linger=1000)
        sys.exit(1)
    at_end.callback(core.flush)
    socket.send(codec.encode(wire.Ready(core.sizes)))
    EngineServer(core, socket, tells_cache=config.server.data_parallel_size > 1).run()


def _end_like(error: WorkerDied) -> None:
    """End this process as the rank has ended: a rank that was killed from outside says nothing about the requests."""
    if isinstance(error, RankDied) and error.code == -signal.SIGKILL:
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(1)
