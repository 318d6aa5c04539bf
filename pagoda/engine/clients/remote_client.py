"""RemoteClient: an engine that another process has, over a connection to its ClientServer."""

import asyncio
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Self

from pagoda.base.errors import RequestError, WorkerDied, fresh
from pagoda.core.request import LoraRef, Request, RequestStatus
from pagoda.core.scheduler_output import EngineCoreOutputs
from pagoda.engine import wire
from pagoda.engine.clients.client_server import read_frame, write_frames
from pagoda.engine.clients.journal import error_outputs

_Reply = wire.ResetReply | wire.AdapterReply


class RemoteClient:
    """An EngineCoreClient without a journal: the other process has that, and restarts the engine if it dies.

    index: of this client.   sizes: of the engine.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, greeting: wire.Connected) -> None:
        """greeting: the first message on the connection; see `connect`."""
        self.index, self.sizes = greeting.client_index, greeting.sizes
        self._reader, self._writer = reader, writer
        self._codec = wire.Codec(wire.FromServer)
        self._outputs: asyncio.Queue[EngineCoreOutputs | WorkerDied] = asyncio.Queue()
        self._replies: dict[int, asyncio.Future[_Reply]] = {}  # that calls wait for, by call id
        self._call_ids = itertools.count(1)
        self._died: WorkerDied | None = None
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def connect(cls, path: str) -> Self:
        """Connect to the ClientServer on the Unix socket at `path`. Raises OSError if there is none."""
        reader, writer = await asyncio.open_unix_connection(path)
        return cls(reader, writer, wire.Codec(wire.FromServer).decode(await read_frame(reader)))

    def add_request(self, request: Request) -> None:
        try:
            frames = self._codec.encode_request(dataclasses.replace(request, client_index=self.index))
        except (UnicodeEncodeError, OverflowError) as error:
            reason = f"the request cannot be encoded: {error}"
            self._outputs.put_nowait(error_outputs(request, reason, RequestStatus.FINISHED_IGNORED))
        else:
            write_frames(self._writer, *frames)

    def abort(self, handles: Sequence[int]) -> None:
        self._send(wire.AbortRequests(tuple((self.index, handle) for handle in handles)))

    def finish_sequence(self, handle: int, sequence: int, status: RequestStatus) -> None:
        self._send(wire.FinishSequence((self.index, handle), sequence, status))

    async def next_outputs(self) -> EngineCoreOutputs:
        item = await self._outputs.get()
        if isinstance(item, WorkerDied):
            raise item
        return item

    async def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        reply = await self._call(partial(wire.ResetPrefixCache, preempt_running=preempt_running))
        return isinstance(reply, wire.ResetReply) and reply.succeeded

    async def load_adapter(self, lora: LoraRef) -> None:
        reply = await self._call(partial(wire.LoadAdapter, lora=lora))
        if isinstance(reply, wire.AdapterReply) and reply.error is not None:
            raise WorkerDied(reply.error) if reply.has_died else RequestError(reply.error, "lora_request")

    def unload_adapter(self, lora: LoraRef) -> None:
        self._send(wire.UnloadAdapter(lora))

    async def shutdown(self) -> None:
        """Close the connection; the engine goes on without this client. Idempotent."""
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self._writer.close()

    async def _read(self) -> None:
        try:
            while True:
                match self._codec.decode(await read_frame(self._reader)):
                    case wire.StepOutputs(_, outputs):
                        self._outputs.put_nowait(outputs)
                    case wire.ResetReply() | wire.AdapterReply() as reply:
                        done = self._replies.pop(reply.call_id)
                        if not done.done():  # the caller may have been cancelled
                            done.set_result(reply)
                    case wire.EngineEnded(message):
                        self._end(message)
                    case message:
                        raise AssertionError(f"no such message: {message}")
        except (EOFError, ConnectionError):
            self._end("the process that has the engine has ended")

    def _end(self, message: str) -> None:
        if self._died is None:
            self._died = WorkerDied(message)
            self._outputs.put_nowait(self._died)
            for done in self._replies.values():
                if not done.done():
                    done.set_exception(fresh(self._died))

    def _send(self, message: wire.ToEngine) -> None:
        write_frames(self._writer, self._codec.encode(message))

    async def _call(self, message: Callable[[int], wire.ToEngine]) -> _Reply:
        """Send the message that `message` returns for a call id; wait for the reply. Raises WorkerDied."""
        if self._died is not None:
            raise fresh(self._died)
        call_id = next(self._call_ids)
        reply = self._replies[call_id] = asyncio.get_running_loop().create_future()
        self._send(message(call_id))
        return await reply
