"""ModelEngine: the settings of one served model, the way to the process that runs it, and whether it is loaded."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from pagoda.base.config import EngineConfig
from pagoda.base.errors import PagodaError
from pagoda.engine.async_engine import AsyncEngine
from pagoda.engine.clients.remote_client import EngineClient, RemoteClient
from pagoda.engine.wire import EngineSizes
from pagoda.metrics.prometheus import LoadMetrics


class LoadState(Enum):
    UNLOADED = "unloaded"
    WAITING = "waiting"  # for room
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"

    @property
    def takes_memory(self) -> bool:
        return self in (LoadState.LOADING, LoadState.LOADED, LoadState.UNLOADING)


class Waiter:
    """A request that waits for a model.   key: of its caller.   turn: None once it holds the model, or the error."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.turn: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()


@dataclass(slots=True, eq=False)
class ModelEngine:
    """A model and its engine. ModelLoader changes it.

    num_bytes: that it takes, about.   planned: the sizes that it is expected to have.
    starting: what starts the engine, or has started it.   on_sizes: called with its sizes when it is loaded again.
    state, since_s: and since when, by time.monotonic.   num_users: requests that use it.
    is_leaving: it gets no further requests, so that it can be unloaded.
    goes_when_idle: it is unloaded when no request uses it.
    loads: what is counted of them.   load_s: how long the last one took.   error: why it failed.
    """

    config: EngineConfig
    client: EngineClient
    num_bytes: int = 0
    planned: EngineSizes | None = None
    starting: asyncio.Task[EngineSizes] | None = None
    on_sizes: Callable[[EngineSizes], object] = lambda _: None
    llm: AsyncEngine | None = None
    state: LoadState = LoadState.UNLOADED
    since_s: float = field(default_factory=time.monotonic)
    last_used_s: float = 0.0
    num_users: int = 0
    is_leaving: bool = False
    goes_when_idle: bool = False
    loads: LoadMetrics = field(default_factory=LoadMetrics)
    load_s: float = 0.0
    error: str = ""
    waiters: deque[Waiter] = field(default_factory=deque[Waiter])

    @property
    def name(self) -> str:
        return self.config.model.names[0]

    async def sizes(self) -> EngineSizes:
        """Return the sizes of the engine, once it has started if it is about to. Raises what its start raises."""
        if self.starting is not None:
            return await asyncio.shield(self.starting)
        assert self.planned is not None
        return self.planned

    @property
    def takes_requests(self) -> bool:
        return self.state is LoadState.LOADED and not self.is_leaving

    @property
    def is_idle(self) -> bool:
        return self.state is LoadState.LOADED and not self.num_users

    @property
    def died(self) -> PagodaError | None:
        """Why its engine serves no request any more, None while it can."""
        return self.client.died or (self.llm.died if self.llm is not None else None)

    async def wait_until_dead(self) -> None:
        """Wait until its engine cannot be started any more, or its outputs not be read; or it has been shut down."""
        ends = [asyncio.create_task(self.client.wait_until_gone())]
        if self.llm is not None:
            ends.append(asyncio.create_task(self.llm.wait_until_dead()))
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in ends:
                task.cancel()

    async def stop(self) -> None:
        """End its process; it can be started again."""
        assert not isinstance(self.client, RemoteClient), "of several models, this process has the engines"
        await self.client.stop()

    def enter(self, state: LoadState) -> None:
        self.state, self.since_s = state, time.monotonic()
        self.loads.memory_bytes = self.num_bytes if state.takes_memory else 0

    def note_loaded(self, sizes: EngineSizes) -> None:
        """It is ready for requests."""
        self.load_s, self.error = time.monotonic() - self.since_s, ""
        self.loads.on_loaded(self.load_s)
        self.last_used_s = time.monotonic()
        self.enter(LoadState.LOADED)
        self.on_sizes(sizes)

    def note_failure(self, error: str) -> None:
        """It could not be loaded."""
        self.error = error
        self.loads.on_failure()
        self.enter(LoadState.UNLOADED)

    def begin_use(self) -> None:
        self.num_users += 1
        self.goes_when_idle = False
        self.last_used_s = time.monotonic()

    def end_use(self) -> None:
        self.num_users -= 1
        self.last_used_s = time.monotonic()

    def admit_waiters(self) -> None:
        """Let all that wait hold the model."""
        while self.waiters:
            self.begin_use()
            self.waiters.popleft().turn.set_result(None)

    def end_waits(self, error: Exception, key: str | None = None) -> None:
        """End the wait of requests with an error.   key: only of those of this key."""
        for waiter in [one for one in self.waiters if key in (None, one.key)]:
            self.waiters.remove(waiter)
            waiter.turn.set_result(error)
