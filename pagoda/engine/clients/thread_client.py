"""ThreadClient: run an engine core on a thread of this process, for AsyncEngine without a second process."""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from pagoda.base.errors import InvariantBroken, PagodaError, RequestError, WorkerDied
from pagoda.core.request import LoraRef, Request, RequestStatus
from pagoda.core.scheduler_output import EngineCoreOutputs
from pagoda.engine import wire
from pagoda.engine.clients.journal import JournalEntry, error_outputs
from pagoda.engine.engine_core import EngineCore

logger = logging.getLogger("pagoda.engine")

T = TypeVar("T")

_STATS_INTERVAL_S = 0.1
_Command = Callable[[EngineCore], None]


class ThreadClient:
    """An EngineCoreClient whose core runs on its own thread, which sleeps while there is no work.

    build: makes the core; called on that thread, so that loading a model does not block the event loop.
    """

    def __init__(self, build: Callable[[], EngineCore]) -> None:
        self._build = build
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._outputs: asyncio.Queue[EngineCoreOutputs | WorkerDied] = asyncio.Queue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stats = wire.EngineStats()
        self._stats_at_s = 0.0

    async def start(self) -> wire.EngineFacts:
        """Start the thread; return when requests can be served. Raises what `build` raises."""
        assert self._thread is None, "a client is started once"
        self._loop = asyncio.get_running_loop()
        ready: asyncio.Future[wire.EngineFacts] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="pagoda-engine", daemon=True)
        self._thread.start()
        return await ready

    def add_request(self, request: Request) -> None:
        self._commands.put(lambda core: self._add(core, request))

    def abort(self, request_ids: list[str]) -> None:
        self._commands.put(lambda core: core.abort(request_ids))

    def finish_sequence(self, request_id: str, sequence: int, status: RequestStatus) -> None:
        self._commands.put(lambda core: core.finish_sequence(request_id, sequence, status))

    async def next_outputs(self) -> EngineCoreOutputs:
        item = await self._outputs.get()
        if isinstance(item, WorkerDied):
            self._outputs.put_nowait(item)  # so that the next call raises it again
            raise item
        return item

    async def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[bool] = loop.create_future()

        def reset(core: EngineCore) -> None:
            done = core.reset_prefix_cache(preempt_running)
            loop.call_soon_threadsafe(_settle, reply, done)

        self._commands.put(reset)
        return await reply

    async def load_adapter(self, lora: LoraRef) -> None:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def load(core: EngineCore) -> None:
            try:
                core.load_adapter(lora)
            except RequestError as error:
                loop.call_soon_threadsafe(_fail, done, error)
            else:
                loop.call_soon_threadsafe(_settle, done, None)

        self._commands.put(load)
        await done

    def unload_adapter(self, lora: LoraRef) -> None:
        self._commands.put(lambda core: core.unload_adapter(lora))

    def stats(self) -> wire.EngineStats:
        return self._stats

    async def shutdown(self) -> None:
        """End the thread after its current step. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._commands.put(None)
            await asyncio.to_thread(thread.join)

    # ---- on the engine's thread

    def _run(self, ready: "asyncio.Future[wire.EngineFacts]") -> None:
        try:
            core = self._build()
        except BaseException as error:  # passed on to the caller of start()
            self._call_on_loop(_fail, ready, error)
            return
        self._call_on_loop(_settle, ready, core.facts)
        try:
            while self._run_commands(core):
                for outputs in core.step().values():
                    self._call_on_loop(self._outputs.put_nowait, outputs)
                if time.monotonic() - self._stats_at_s > _STATS_INTERVAL_S:
                    self._refresh_stats(core)
        except (WorkerDied, InvariantBroken) as error:
            died = error if isinstance(error, WorkerDied) else WorkerDied(f"internal error in the engine: {error}")
            self._call_on_loop(self._outputs.put_nowait, died)
        except Exception as error:
            self._call_on_loop(
                self._outputs.put_nowait, WorkerDied(f"the engine failed: {type(error).__name__}: {error}")
            )
            raise
        finally:
            core.shutdown()

    def _run_commands(self, core: EngineCore) -> bool:
        """Run all queued commands; wait for one if the core is idle. Return False to shut down."""
        while True:
            is_idle = not core.has_unfinished_requests()
            if is_idle:
                self._refresh_stats(core)
            try:
                command = self._commands.get(block=is_idle)
            except queue.Empty:
                return True
            if command is None:
                return False
            command(core)

    def _add(self, core: EngineCore, request: Request) -> None:
        status = RequestStatus.FINISHED_IGNORED
        try:
            core.add_request(request)
            return
        except (WorkerDied, InvariantBroken):
            raise
        except PagodaError as error:
            reason = str(error)
        except Exception as error:  # only this request fails: the core has removed it
            logger.exception("request %s could not be queued", request.request_id)
            reason = f"the engine could not queue this request: {type(error).__name__}: {error}"
            status = RequestStatus.FINISHED_ERROR
        entry = JournalEntry(request, [[] for _ in range(request.num_seqs)], set(range(request.num_seqs)))
        self._call_on_loop(self._outputs.put_nowait, error_outputs(entry, reason, status))

    def _refresh_stats(self, core: EngineCore) -> None:
        self._stats_at_s = time.monotonic()
        self._stats = wire.EngineStats.of(core.make_stats())

    def _call_on_loop(self, call: Callable[..., object], *args: object) -> None:
        """Run `call` on the event loop; do nothing if the loop is closed."""
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *args)


def _settle(future: "asyncio.Future[T]", result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: "asyncio.Future[Any]", error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
