"""ModelLoader: which models are loaded, within a memory budget, and who waits for one that is not.

Requests wait in `hold`. Models that are wanted stand in a line; the first is loaded as soon as there is room. To make
room, models that no request uses are unloaded, the one that was used longest ago first. If that is not enough, models
that requests use get no further ones, which wait, too, until they are idle and unloaded: else a model that always
has requests would keep the others out.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from typing import Any

from pagoda.base.abbreviate import human_bytes
from pagoda.base.errors import CapacityError, ConfigError, WorkerDied, fresh
from pagoda.engine.clients.process_client import ProcessClient
from pagoda.engine.wire import EngineSizes
from pagoda.server.admission import Refusal
from pagoda.server.errors import RETRY_AFTER_S, ApiError
from pagoda.server.model_engine import LoadState, ModelEngine, Waiter

logger = logging.getLogger("pagoda.server")

LOADS_AT_ONCE = 10
"""So many loads may follow one another without a pause."""
SECONDS_PER_LOAD = 6.0
"""In the long run, one load may begin in so many seconds."""


class LoadRate:
    """Limits how often models are loaded, for all callers together."""

    def __init__(self, at_once: int = LOADS_AT_ONCE, seconds_per_load: float = SECONDS_PER_LOAD) -> None:
        self._most, self._seconds_per_load = at_once, seconds_per_load
        self._level, self._at_s = float(at_once), time.monotonic()

    def pause_s(self) -> float:
        """Return how long to wait before a load may begin."""
        now_s = time.monotonic()
        self._level = min(self._most, self._level + (now_s - self._at_s) / self._seconds_per_load)
        self._at_s = now_s
        return max(0.0, (1 - self._level) * self._seconds_per_load)

    def count(self) -> None:
        """Count a load that begins."""
        self._level -= 1


class ModelLoader:
    """Loads and unloads the models of a server. For one event loop.

    budget: bytes that loaded models may take together.   wait_s: how long a request waits for a load to begin.
    """

    def __init__(
        self,
        engines: Sequence[ModelEngine],
        budget: float = math.inf,
        wait_s: float = 0.0,
        rate: LoadRate | None = None,
    ) -> None:
        self.engines = engines
        self.budget, self._wait_s, self._rate = budget, wait_s, rate or LoadRate()
        self._line: deque[ModelEngine] = deque()  # models that are wanted
        self._tasks: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    @property
    def taken(self) -> int:
        """The bytes of the models that are loaded, or about to be, or not gone yet."""
        return sum(one.num_bytes for one in self.engines if one.state.takes_memory)

    @property
    def can_unload(self) -> bool:
        """A model that is alone stays loaded."""
        return len(self.engines) > 1

    def start_first(self) -> None:
        """Load the models in their order, as far as there is room. `ModelEngine.started` has what comes of it."""
        for engine in self.engines:
            if self.taken + engine.num_bytes <= self.budget:
                engine.enter(LoadState.LOADING)
                engine.starting = asyncio.create_task(engine.client.start())
            elif isinstance(engine.client, ProcessClient):
                engine.client.is_stopped = True

    def begin(self) -> None:
        """Follow the models that are loaded from now on."""
        for engine in self.engines:
            if engine.starting is not None:
                self._on_loaded(engine, engine.starting.result())

    # ---- requests

    def try_to_hold(self, engine: ModelEngine, at_end: ExitStack) -> bool:
        """Keep a model loaded until `at_end` is closed. Return False if it is not, or takes no requests now."""
        if engine.takes_requests:
            engine.begin_use()
            at_end.callback(self._release, engine)
        return engine.takes_requests

    async def hold(self, engine: ModelEngine, at_end: ExitStack, key: str = "") -> None:
        """Wait until a model is loaded, and keep it so until `at_end` is closed.   key: of the caller.

        Raises Refusal if its load does not begin in time, ApiError (503) if it cannot be loaded, and the error of
        `end_waits`.
        """
        if self.try_to_hold(engine, at_end):
            return
        if self._is_closed:
            raise ApiError(503, "the server is shutting down", retry_after_s=RETRY_AFTER_S)
        waiter = Waiter(key)
        engine.waiters.append(waiter)
        self._want(engine)
        timer = asyncio.get_running_loop().call_later(self._wait_s, self._expire, engine, waiter)
        try:
            await asyncio.wait((waiter.turn,))
        except asyncio.CancelledError:
            if not waiter.turn.done():
                engine.waiters.remove(waiter)
                self._advance()
            elif waiter.turn.result() is None:
                self._release(engine)
            raise
        finally:
            timer.cancel()
        if (error := waiter.turn.result()) is not None:
            raise fresh(error)
        at_end.callback(self._release, engine)

    def _release(self, engine: ModelEngine) -> None:
        """End a use."""
        engine.end_use()
        if not engine.num_users:
            self._advance()

    def holder(self, engine: ModelEngine) -> Callable[[ExitStack, str], Coroutine[Any, Any, None] | None]:
        """Return what holds a model: it returns None if that is loaded, else what waits for it."""

        def hold(at_end: ExitStack, key: str) -> Coroutine[Any, Any, None] | None:
            return None if self.try_to_hold(engine, at_end) else self.hold(engine, at_end, key)

        return hold

    def end_waits(self, error: Exception, key: str | None = None) -> None:
        """End the wait of all requests with an error.   key: only of those of this key."""
        for engine in self.engines:
            engine.end_waits(error, key)
        self._advance()

    def _expire(self, engine: ModelEngine, waiter: Waiter) -> None:
        """End a wait for a load that has not begun."""
        if engine.state is LoadState.LOADING or waiter.turn.done():
            return
        engine.waiters.remove(waiter)
        waiter.turn.set_result(self._refusal(engine))
        self._advance()

    def _refusal(self, engine: ModelEngine) -> Refusal:
        in_use = [one.name for one in self.engines if one is not engine and one.num_users]
        why = f"next to those that requests use ({', '.join(in_use)})" if in_use else "now"
        text = f"{engine.name} takes {human_bytes(engine.num_bytes)} of the {human_bytes(int(self.budget))} for models"
        return Refusal("load", f"the model cannot be loaded {why}: {text}; try again", RETRY_AFTER_S)

    # ---- operators

    async def load(self, engine: ModelEngine) -> None:
        """Load a model, unless it is. Raises as `hold`."""
        with ExitStack() as at_end:
            await self.hold(engine, at_end)

    def unload_when_idle(self, engine: ModelEngine) -> None:
        """Unload a model once no request uses it, if there are others. One that comes before keeps it loaded."""
        if self.can_unload and engine.state is LoadState.LOADED:
            engine.goes_when_idle = True
            self._advance()

    # ---- loads

    def _want(self, engine: ModelEngine) -> None:
        if engine.state is LoadState.UNLOADED:
            engine.enter(LoadState.WAITING)
            self._line.append(engine)
        self._advance()

    def _advance(self) -> None:
        """Begin what can begin now."""
        if self._is_closed:
            return
        for engine in self.engines:
            engine.is_leaving = False
        while self._line:
            engine = self._line[0]
            if not engine.waiters:
                engine.enter(LoadState.UNLOADED)
            elif (pause_s := self._rate.pause_s()) > 0:
                if self._timer is not None:
                    self._timer.cancel()
                self._timer = asyncio.get_running_loop().call_later(pause_s, self._advance)
                break
            elif not self._make_room(engine):
                break
            else:
                self._rate.count()
                engine.enter(LoadState.LOADING)
                self._run(self._load(engine))
            self._line.popleft()
        for engine in self.engines:
            if engine.takes_requests:
                engine.admit_waiters()
            if engine.goes_when_idle and engine.is_idle:
                self._unload(engine)

    def _make_room(self, engine: ModelEngine) -> bool:
        """Return whether a model fits; otherwise, have others leave until it does."""
        missing = self.taken + engine.num_bytes - self.budget
        if missing <= 0:
            return True
        missing -= sum(one.num_bytes for one in self.engines if one.state is LoadState.UNLOADING)
        loaded = [one for one in self.engines if one.state is LoadState.LOADED]
        for victim in sorted(loaded, key=lambda one: (one.num_users > 0, one.last_used_s)):
            if missing <= 0:
                break
            missing -= victim.num_bytes
            victim.is_leaving = True
            if not victim.num_users:
                self._unload(victim)
        return False

    async def _load(self, engine: ModelEngine) -> None:
        logger.info("loading %s: %s of %s for models", engine.name, human_bytes(engine.num_bytes), self._budget_text)
        engine.starting = asyncio.create_task(engine.client.start())
        try:
            sizes = await asyncio.shield(engine.starting)
        except (ConfigError, CapacityError, WorkerDied) as error:
            await engine.stop()
            logger.error("%s could not be loaded: %s", engine.name, error)
            engine.note_failure(str(error))
            engine.end_waits(ApiError(503, f"{engine.name} could not be loaded: {error}", retry_after_s=RETRY_AFTER_S))
        else:
            self._on_loaded(engine, sizes)
            logger.info("%s is loaded after %.1f s", engine.name, engine.load_s)
        self._advance()

    def _on_loaded(self, engine: ModelEngine, sizes: EngineSizes) -> None:
        engine.note_loaded(sizes)
        engine.admit_waiters()  # before another model, which waits for room, could have it unloaded
        self._run(self._watch(engine))

    async def _watch(self, engine: ModelEngine) -> None:
        """Count a model as unloaded when its engine cannot be started any more: its next request tries again."""
        await engine.wait_until_dead()
        if self.can_unload and engine.state is LoadState.LOADED and engine.died is not None:
            engine.error = str(engine.died)
            engine.enter(LoadState.UNLOADING)
            await self._end(engine)

    def _unload(self, engine: ModelEngine) -> None:
        logger.info("unloading %s, which no request uses", engine.name)
        engine.enter(LoadState.UNLOADING)
        self._run(self._end(engine))

    async def _end(self, engine: ModelEngine) -> None:
        await engine.stop()
        self._on_unloaded(engine)

    def _on_unloaded(self, engine: ModelEngine) -> None:
        engine.goes_when_idle = False
        engine.enter(LoadState.UNLOADED)
        if engine.waiters:
            self._want(engine)
        else:
            self._advance()

    @property
    def _budget_text(self) -> str:
        return "any memory" if math.isinf(self.budget) else human_bytes(int(self.budget))

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def wait_until_dead(self) -> None:
        """Wait until no request to any model can be served any more. One of several is loaded again when it is asked
        for, so that these never are."""
        await (asyncio.Event().wait() if self.can_unload else self.engines[0].wait_until_dead())

    async def close(self) -> None:
        """End all engines."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        started = [one.starting for one in self.engines if one.starting is not None]
        for task in (*self._tasks, *started):
            task.cancel()
        await asyncio.gather(*self._tasks, *started, return_exceptions=True)
        await asyncio.gather(*(one.client.shutdown() for one in self.engines))
