"""ClientServer: the engine of this process for clients in other processes, each over a connection of its own.

A connection is a client: it gets an index that no other had, and when it ends, as it does when its process is killed,
the engine aborts the requests that it leaves behind. A message is a frame, as in wire.py, or several for a request with
large arrays; in front of each frame stand its bytes.
"""

import asyncio
import dataclasses
import itertools
import logging
import struct

import msgspec

from pagoda.base.errors import RequestError, WorkerDied
from pagoda.core.scheduler_output import EngineCoreOutputs
from pagoda.engine import wire
from pagoda.engine.clients.process_client import ProcessClient

logger = logging.getLogger("pagoda.engine")

_LENGTH = struct.Struct("<Q")


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Return the next frame. Raises EOFError or ConnectionError if the other end has closed the connection or died."""
    (num_bytes,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return await reader.readexactly(num_bytes)


def write_frames(writer: asyncio.StreamWriter, *frames: bytes | memoryview) -> None:
    """Send frames without waiting. What does not fit into the socket is kept: admission bounds it."""
    for frame in frames:
        writer.write(_LENGTH.pack(len(frame)))
        writer.write(frame)


class ClientServer:
    """Serves a ProcessClient that has started to clients in other processes."""

    def __init__(self, engine: ProcessClient, sizes: wire.EngineSizes) -> None:
        """sizes: of the engine."""
        self._engine, self._sizes = engine, sizes
        self._indices = itertools.count(1)  # 0 is the ProcessClient itself
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self, path: str) -> None:
        """Listen on a Unix socket at `path`, whose folder only this user can enter."""
        self._server = await asyncio.start_unix_server(self._accept, path)

    async def close(self) -> None:
        """End all connections; the clients get WorkerDied. Idempotent."""
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(_Connection(self._engine, next(self._indices), reader, writer).serve(self._sizes))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)


class _Connection:
    """One client."""

    def __init__(
        self, engine: ProcessClient, index: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._engine, self._index = engine, index
        self._reader, self._writer = reader, writer
        self._codec = wire.Codec(wire.FromClient)
        self._calls: set[asyncio.Task[None]] = set()

    async def serve(self, sizes: wire.EngineSizes) -> None:
        """Pass on the client's messages until it has gone; then abort its requests."""
        engine = self._engine
        engine.connect(self._index, self._pass_on)
        try:
            self._send(wire.Connected(self._index, sizes))
            if engine.died is not None:
                self._pass_on(engine.died)
            while True:
                await self._handle(self._codec.decode(await read_frame(self._reader)))
        except (EOFError, ConnectionError):
            logger.info("client %d has left", self._index)
        except Exception:  # only its own requests end
            logger.exception("client %d sent what cannot be read: its connection ends", self._index)
        finally:
            engine.disconnect(self._index)
            for call in self._calls:
                call.cancel()
            self._writer.close()

    async def _handle(self, message: wire.FromClient) -> None:
        engine, index = self._engine, self._index
        match message:
            case wire.AddRequest():
                arrays = [memoryview(await read_frame(self._reader)) for _ in range(message.num_arrays)]
                request = self._codec.decode_request(message, *arrays)
                engine.add_request(dataclasses.replace(request, client_index=index))
            case wire.AbortRequests(keys):
                engine.abort([handle for _, handle in keys], index)
            case wire.FinishSequence((_, handle), sequence, status):
                engine.finish_sequence(handle, sequence, status, index)
            case wire.UnloadAdapter(lora):
                engine.unload_adapter(lora)
            case wire.ResetPrefixCache() | wire.LoadAdapter():
                call = asyncio.create_task(self._reply_to(message))
                self._calls.add(call)
                call.add_done_callback(self._calls.discard)

    async def _reply_to(self, message: wire.ResetPrefixCache | wire.LoadAdapter) -> None:
        error: RequestError | WorkerDied | None = None
        succeeded = False
        try:
            if isinstance(message, wire.ResetPrefixCache):
                succeeded = await self._engine.reset_prefix_cache(message.preempt_running)
            else:
                await self._engine.load_adapter(message.lora)
        except (RequestError, WorkerDied) as raised:
            error = raised
        if isinstance(message, wire.ResetPrefixCache):
            self._send(wire.ResetReply(message.call_id, succeeded))  # if the engine has died, EngineEnded says so
        else:
            has_died = isinstance(error, WorkerDied)
            self._send(wire.AdapterReply(message.call_id, None if error is None else str(error), has_died))

    def _pass_on(self, item: EngineCoreOutputs | WorkerDied) -> None:
        is_end = isinstance(item, WorkerDied)
        self._send(wire.EngineEnded(str(item)) if is_end else wire.StepOutputs(self._index, item))

    def _send(self, message: msgspec.Struct) -> None:
        write_frames(self._writer, self._codec.encode(message))
