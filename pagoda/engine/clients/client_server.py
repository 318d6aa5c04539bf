"""ClientServer: the engine of this process for clients in other processes, each over a connection of its own.

A connection is a client: it gets an index that no other had, and when it ends, as it does when its process is killed,
the engine aborts the requests that it leaves behind. A message is a frame, as in wire.py, or several for a request with
large arrays; in front of each frame stand its bytes.

What the processes share besides the engine is asked for by name (see calls.py):

    def admit(client_index: int, num_tokens: int) -> bool: ...
    server = ClientServer(engine, starting, {"admit": admit}, on_left=release_what_it_had)

    client = RemoteClient(path)
    client.calls.offer({"drop_adapter": drop_adapter})
    if await client.calls.call("admit", 17, returns=bool): ...

    found = await server.ask("drop_adapter", "name", timeout_s=1.0)  # of all clients, by their index
"""

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import struct
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from pagoda.base.abbreviate import shown_id
from pagoda.base.errors import PagodaError, WorkerDied
from pagoda.core.events import Events
from pagoda.core.request import Request
from pagoda.core.scheduler_output import EngineCoreOutputs
from pagoda.engine import wire
from pagoda.engine.clients.calls import Calls, Services
from pagoda.engine.clients.journal import error_outputs
from pagoda.engine.clients.replicas import EngineOwner

logger = logging.getLogger("pagoda.engine")

REPORT_S = 0.1
"""Interval at which clients get what has changed about the engine."""
MAX_UNREAD_BYTES = 64 * 2**20
"""A client that leaves more unread does not run any more, or can never catch up: its connection ends."""

_NO_TOKENS = np.empty(0, np.int32)
_LENGTH = struct.Struct("<Q")


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Return the next frame. Raises EOFError or ConnectionError if the other end has closed the connection or died."""
    (num_bytes,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return await reader.readexactly(num_bytes)


def write_frames(writer: asyncio.StreamWriter, message: bytes | memoryview, *arrays: bytes | memoryview) -> None:
    """Send a message, and the arrays that follow it, without waiting. What does not fit into the socket is kept."""
    writer.write(b"".join((_LENGTH.pack(len(message)), message)))  # at once: each write may be a system call
    for array in arrays:
        writer.write(_LENGTH.pack(len(array)))
        writer.write(array)


class ClientServer:
    """Serves the engines of this process to clients in other processes."""

    def __init__(
        self,
        engine: EngineOwner,
        sizes: Awaitable[wire.EngineSizes],
        services: Services | None = None,
        on_left: Callable[[int], object] = lambda _: None,
    ) -> None:
        """sizes: of the engine, once it has started, as a task or a future.

        services: that clients may call; each gets the index of the client first.   on_left: called with the index of a
        client that has gone.
        """
        self._engine, self._sizes, self._on_left = engine, asyncio.ensure_future(sizes), on_left
        self._services = services or {}
        self._indices = itertools.count(1)  # 0 is the ProcessClient itself
        self._connections: dict[int, _Connection] = {}  # by client
        self._listening: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._step_tokens: list[int] = []  # since the last report
        self._server: asyncio.Server | None = None

    @property
    def clients(self) -> Collection[int]:
        """The indices of those that are connected."""
        return self._connections.keys()

    async def start(self, path: str) -> None:
        """Listen on a Unix socket at `path`, whose folder only this user can enter. The engine may start later."""
        self._engine.on_step = self._step_tokens.append
        self._server = await asyncio.start_unix_server(self._accept, path)
        self._run(self._report())

    async def close(self) -> None:
        """End all connections; the clients get WorkerDied. Idempotent."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def ask(self, name: str, *arguments: object, timeout_s: float, returns: Any = Any) -> dict[int, Any]:
        """Call a function of all clients; return what they answer, by their index.

        Those that fail, go, or take longer than `timeout_s` are left out.
        """
        asked = {
            index: asyncio.ensure_future(connection.calls.call(name, *arguments, returns=returns))
            for index, connection in self._connections.items()
        }
        if asked:
            await asyncio.wait(asked.values(), timeout=timeout_s)
        answers: dict[int, Any] = {}
        for index, answer in asked.items():
            if not answer.done():
                answer.cancel()
            elif (error := answer.exception()) is None:
                answers[index] = answer.result()
            elif index in self._connections:  # else it has gone
                logger.warning("client %d did not answer %r: %s", index, name, error)
        return answers

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._run(self._serve(next(self._indices), reader, writer))

    def _run(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, index: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one client, once the engine has started, until it has gone; then abort its requests."""
        with contextlib.closing(writer):
            try:
                sizes = await asyncio.shield(self._sizes)
            except PagodaError:  # who started the engine says it
                return
            services = {name: partial(service, index) for name, service in self._services.items()}
            services |= {"listen": partial(self._listen, index), **_services_of(self._engine, index)}
            connection = self._connections[index] = _Connection(self._engine, index, reader, writer, services)
            self._engine.sinks.connect(index, connection.pass_on)
            try:
                connection.send(wire.Connected(index, sizes))
                connection.send(self._report_of(()))
                if self._engine.died is not None:
                    connection.pass_on(self._engine.died)
                await connection.serve()
            except (EOFError, ConnectionError):
                logger.info("client %d has left", index)
            except Exception:  # only its own requests end
                logger.exception("client %d sent what cannot be read: its connection ends", index)
            finally:
                self._listen(index, begins=False)
                del self._connections[index]
                self._engine.sinks.disconnect(index)
                self._engine.abort_all(index)
                connection.calls.end(WorkerDied(f"client {index} has left"))
                self._on_left(index)

    def _listen(self, index: int, begins: bool) -> None:
        """Pass on the events of all clients to this one from now on, or no longer."""
        (self._listening.add if begins else self._listening.discard)(index)
        self._engine.on_events = self._pass_on_events if self._listening else None

    def _pass_on_events(self, events: Events) -> None:
        for index in self._listening:
            self._connections[index].send(wire.AllEvents(events))

    async def _report(self) -> None:
        """Tell all clients of the engine when that has changed."""
        last = self._report_of(())
        while True:
            await asyncio.sleep(REPORT_S)
            report = self._report_of(tuple(self._step_tokens))
            self._step_tokens.clear()
            if report != last:
                last = report
                for connection in self._connections.values():
                    connection.send(report)

    def _report_of(self, step_tokens: tuple[int, ...]) -> wire.EngineReport:
        engine = self._engine
        return wire.EngineReport(engine.is_up, engine.is_stuck, engine.num_deaths, engine.stats(), step_tokens)


def _services_of(engine: EngineOwner, index: int) -> Services:
    """Return the calls of an EngineCoreClient that carry no request, for the client `index`."""
    return {
        "abort": partial(engine.abort, client_index=index),
        "finish_sequence": partial(engine.finish_sequence, client_index=index),
        "reset_prefix_cache": engine.reset_prefix_cache,
        "load_adapter": engine.load_adapter,
        "unload_adapter": engine.unload_adapter,
        "look": engine.look,
        "restart": engine.restart,
    }


class _Connection:
    """One client."""

    def __init__(
        self,
        engine: EngineOwner,
        index: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        services: Services,
    ) -> None:
        self._engine, self._index = engine, index
        self._reader, self._writer = reader, writer
        self._codec = wire.Codec(wire.FromClient)
        self.calls = Calls(self.send, services)

    async def serve(self) -> None:
        """Pass on the client's messages. Raises EOFError or ConnectionError when it has gone."""
        while True:
            await self._handle(self._codec.decode(await read_frame(self._reader)))

    async def _handle(self, message: wire.FromClient) -> None:
        match message:
            case wire.AddRequest():
                arrays = [memoryview(await read_frame(self._reader)) for _ in range(message.num_arrays)]
                self._add(message, arrays)
            case wire.Call() | wire.Reply():
                self.calls.take(message)

    def _add(self, message: wire.AddRequest, arrays: Sequence[memoryview]) -> None:
        """Add a request; one that cannot be read ends with an error, and no other does."""
        try:
            request = self._codec.decode_request(message, *arrays)
        except Exception as error:
            logger.exception("request %s cannot be read", shown_id(message.request_id))
            reason = f"the request cannot be read: {type(error).__name__}: {error}"
            unread = Request(message.request_id, _NO_TOKENS, client_index=self._index, handle=message.key[1])
            self.pass_on(error_outputs(unread, reason, live=range(message.num_seqs)))
        else:
            self._engine.add_request(dataclasses.replace(request, client_index=self._index))

    def pass_on(self, item: EngineCoreOutputs | WorkerDied) -> None:
        """Pass on what the steps bring to this client, or the error that ended the engine for good."""
        if isinstance(item, WorkerDied):
            self.send(wire.EngineEnded(str(item)))
        else:  # a client that has its last token finds it counted in the metrics
            self.send(wire.StepOutputs({self._index: item}, stats=self._engine.stats() if item.ends else None))

    def send(self, message: msgspec.Struct) -> None:
        """Send a message, unless the client reads no more."""
        transport = self._writer.transport
        if transport.is_closing():
            return
        write_frames(self._writer, self._codec.encode(message))
        if (num_bytes := transport.get_write_buffer_size()) > MAX_UNREAD_BYTES:
            logger.error("client %d has not read %d bytes: its connection ends", self._index, num_bytes)
            transport.abort()
