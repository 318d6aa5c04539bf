"""RemoteClient: an engine that another process has, over a connection to its ClientServer."""

import asyncio
import logging
from collections.abc import Callable, Sequence

import msgspec

from pagoda.base.errors import WorkerDied
from pagoda.core.events import Events
from pagoda.core.request import LoraRef, Request, RequestStatus
from pagoda.engine import wire
from pagoda.engine.clients.calls import Calls
from pagoda.engine.clients.client_outputs import ClientOutputs
from pagoda.engine.clients.client_server import read_frame, write_frames
from pagoda.engine.clients.journal import error_outputs
from pagoda.engine.clients.replicas import EngineOwner

logger = logging.getLogger("pagoda.engine")

_ENDED = "the process that has the engine has ended"


class RemoteClient(ClientOutputs):
    """An EngineCoreClient without a journal: the other process has that, and restarts the engine if it dies.

    It knows of the engine what a ProcessClient does, a moment later.
    index: of this client, once it has started.   calls: of functions of the other process, and of those that this one
    offers it; see ClientServer.
    """

    def __init__(self, path: str) -> None:
        """path: the Unix socket of the ClientServer."""
        super().__init__()
        self._path = path
        self._codec = wire.Codec(wire.FromServer)
        self._report = wire.EngineReport(False, False, 0, wire.EngineStats())
        self._reading: asyncio.Task[None] | None = None
        self._gone = asyncio.Event()
        self._on_events: Callable[[Events], object] | None = None
        self.index = 0
        self.calls = Calls(self._send)
        self.died: WorkerDied | None = None
        """Set once no engine can be started any more, or the other process has ended."""
        self.on_step: Callable[[int], object] = lambda _: None
        """Called with the number of tokens of each step, of any client."""

    async def start(self) -> wire.EngineSizes:
        """Connect, and wait until the engine has started; return its sizes.

        Raises OSError if nothing listens at the path, WorkerDied if the other process ends before it has an engine.
        """
        reader, self._writer = await asyncio.open_unix_connection(self._path)
        try:
            greeting: wire.Connected = self._codec.decode(await read_frame(reader))
        except (EOFError, ConnectionError):
            self._end(_ENDED)
            raise WorkerDied(_ENDED) from None
        self.index = greeting.client_index
        self._reading = asyncio.create_task(self._read(reader))
        return greeting.sizes

    # ---- what AsyncEngine calls

    def add_request(self, request: Request) -> None:
        try:
            frames = self._codec.encode_request(request)
        except (UnicodeEncodeError, OverflowError) as error:
            reason = f"the request cannot be encoded: {error}"
            self._outputs.put_nowait(error_outputs(request, reason, RequestStatus.FINISHED_IGNORED))
        else:
            write_frames(self._writer, *frames)

    def abort(self, handles: Sequence[int]) -> None:
        self.calls.post("abort", handles)

    def finish_sequence(self, handle: int, sequence: int, status: RequestStatus) -> None:
        self.calls.post("finish_sequence", handle, sequence, status)

    async def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        return await self.calls.call("reset_prefix_cache", preempt_running, returns=bool)

    async def load_adapter(self, lora: LoraRef) -> None:
        await self.calls.call("load_adapter", lora)

    def unload_adapter(self, lora: LoraRef) -> None:
        self.calls.post("unload_adapter", lora)

    async def look(self, steps_after_s: float | None = None) -> wire.LookReply | None:
        """Return what the engine does now, and its steps that ended after a time; None while it is down."""
        return await self.calls.call("look", steps_after_s, returns=wire.LookReply | None)

    async def restart(self, source: wire.WeightsSource | None = None) -> None:
        """Restart the engines, one after the other, without an error to any request.   source: of new weights."""
        await self.calls.call("restart", source)

    async def shutdown(self) -> None:
        """Close the connection; the engine goes on without this client. Idempotent."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
            self._writer.close()
        self._gone.set()

    # ---- state for operators

    def stats(self) -> wire.EngineStats:
        return self._report.stats

    @property
    def num_deaths(self) -> int:
        return self._report.num_deaths

    @property
    def is_up(self) -> bool:
        """Whether the engine process has reported ready and is running."""
        return self.died is None and self._report.is_up

    @property
    def is_stuck(self) -> bool:
        """Whether the engine has work and has made no progress for longer than its steps can explain."""
        return self._report.is_stuck

    async def wait_until_gone(self) -> None:
        """Wait until no engine can be started any more (see `died`), or until after `shutdown`."""
        await self._gone.wait()

    @property
    def on_events(self) -> Callable[[Events], object] | None:
        """What is called with the events of the requests of all clients, those of one after those of the other."""
        return self._on_events

    @on_events.setter
    def on_events(self, listener: Callable[[Events], object] | None) -> None:
        self._on_events = listener
        self.calls.post("listen", listener is not None)

    # ---- the connection

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                self._take(self._codec.decode(await read_frame(reader)))
        except (EOFError, ConnectionError):
            self._end(_ENDED)
        except Exception as error:  # if this task ended silently, callers would wait forever
            logger.exception("a message of the process that has the engine could not be read")
            self._end(f"internal error in the client: {type(error).__name__}: {error}")
        finally:
            self.calls.end(self.died or WorkerDied("this client has been shut down"))

    def _take(self, message: wire.FromServer) -> None:
        match message:
            case wire.StepOutputs(outputs, _, stats):
                if stats is not None:
                    self._report = msgspec.structs.replace(self._report, stats=stats)
                self._outputs.put_nowait(outputs[self.index])
            case wire.EngineReport(step_tokens=step_tokens):
                self._report = message
                for count in step_tokens:
                    self.on_step(count)
            case wire.AllEvents(events):
                if self._on_events is not None:
                    self._on_events(events)
            case wire.Call() | wire.Reply():
                self.calls.take(message)
            case wire.EngineEnded(text):
                self._end(text)
            case wire.Connected():
                raise AssertionError(f"a second greeting: {message}")

    def _end(self, message: str) -> None:
        if self.died is None:
            self.died = WorkerDied(message)
            self._outputs.put_nowait(self.died)
            self._gone.set()

    def _send(self, message: msgspec.Struct) -> None:
        write_frames(self._writer, self._codec.encode(message))


EngineClient = EngineOwner | RemoteClient
"""What a server is built on."""
