"""ThreadClient: an engine core on a thread of this process, for one event loop."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from pagoda.base.errors import InvariantBroken, UsageError, WorkerDied
from pagoda.core.request import LoraRef, Request, RequestStatus
from pagoda.core.stats import SchedulerStats
from pagoda.engine.clients.client_outputs import ClientOutputs
from pagoda.engine.clients.journal import error_outputs
from pagoda.engine.engine_core import why_refused
from pagoda.engine.engine_thread import EngineThread
from pagoda.engine.text_engine import TextEngine

T = TypeVar("T")


class ThreadClient(ClientOutputs):
    """An EngineCoreClient over an EngineThread."""

    def __init__(self, build: Callable[[], TextEngine], name: str) -> None:
        """Begin to build the engine on its thread.   name: what errors call the object that the caller uses."""
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[TextEngine] = self._loop.create_future()
        put = self._put = partial(_call_on, self._loop, self._outputs.put_nowait)

        def step(engine: TextEngine) -> None:
            for outputs in engine.core.step().values():
                put(outputs)

        self.thread = EngineThread(build, partial(_settle, self._loop, self._ready), step, put, name)

    async def start(self) -> TextEngine:
        """Wait for the engine; return it. Raises what `build` raises."""
        return await self._ready

    def add_request(self, request: Request) -> None:
        self.thread.post(lambda engine: engine.core.add_request(request), partial(self._on_added, request))

    def _on_added(self, request: Request, _: object, error: BaseException | None) -> None:
        """Finish a request that was refused. If the engine has ended, that ends all requests: nothing is to do here."""
        if error is None or isinstance(error, WorkerDied | InvariantBroken | UsageError):
            return
        self._put(error_outputs(request, *why_refused(request.request_id, error)))

    def abort(self, handles: Sequence[int]) -> None:
        keys = [(0, handle) for handle in handles]
        self._post(lambda engine: engine.core.abort(keys))

    def finish_sequence(self, handle: int, sequence: int, status: RequestStatus) -> None:
        self._post(lambda engine: engine.core.finish_sequence((0, handle), sequence, status))

    async def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        return await self._call(lambda engine: engine.core.reset_prefix_cache(preempt_running))

    async def load_adapter(self, lora: LoraRef) -> None:
        loaded = await self._call(lambda engine: engine.core.begin_load_adapter(lora))
        await asyncio.gather(asyncio.wrap_future(loaded), return_exceptions=True)
        await self._call(lambda engine: engine.core.end_load_adapter(lora, loaded))

    def unload_adapter(self, lora: LoraRef) -> None:
        self._post(lambda engine: engine.core.unload_adapter(lora))

    async def begin_trace(self) -> Callable[[], Awaitable[dict[str, Any]]]:
        """Record what the engine does from now on (see TextEngine.begin_trace)."""
        end = await self._call(lambda engine: engine.begin_trace())
        return lambda: self._call(lambda _: end())

    async def stats(self) -> SchedulerStats:
        """Return the gauges and counters of this moment."""
        return await self._call(lambda engine: engine.core.make_stats())

    async def shutdown(self) -> None:
        """End the engine after the step in progress, and wait until its memory is released. Idempotent."""
        self.thread.stop()
        await asyncio.to_thread(self.thread.join)

    def _post(self, run: Callable[[TextEngine], object]) -> None:
        self.thread.post(run, lambda *_: None)

    async def _call(self, run: Callable[[TextEngine], T]) -> T:
        """Run a command between two steps. Raises its errors, and the engine's."""
        done: asyncio.Future[T] = self._loop.create_future()
        self.thread.post(run, partial(_settle, self._loop, done))
        return await done


def _settle(
    loop: asyncio.AbstractEventLoop, future: "asyncio.Future[Any]", result: object, error: BaseException | None
) -> None:
    """Settle a future of an event loop from another thread."""

    def settle() -> None:
        if future.done():  # its waiter may have been cancelled
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    _call_on(loop, settle)


def _call_on(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *args: object) -> None:
    """Run `call` on an event loop; do nothing if the loop is closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call, *args)
