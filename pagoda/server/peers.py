"""Peers: the processes that serve one port before one engine, as one of them sees them."""

import asyncio
import inspect
import secrets
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from pagoda.base.server_config import ServerConfig
from pagoda.engine.clients.calls import AnyCalls, Calls, OwnCalls, Services, answer_of
from pagoda.metrics.counts import ModelCounts
from pagoda.server.admission import Admission
from pagoda.server.errors import ApiError
from pagoda.server.owned import Owned
from pagoda.server.remote_admission import AnyAdmission, RemoteAdmission
from pagoda.server.served_adapters import AdapterChange

if TYPE_CHECKING:
    from pagoda.server.served_models import ServedModels

P = ParamSpec("P")
T = TypeVar("T")

CALL_S = 2.0
"""A process that does not answer for so long is left out."""
LOAD_S = 600.0
"""So long it may take to load an adapter."""


class Peers:
    """A process that serves HTTP alone: all is its own.

    own: the models of this process; set before anything else is used.
    calls: of functions of what all processes have once, see Owned.
    accept_from: set when the process serves; accepts connections from these sockets, next to its own, and from no
    others any more.
    """

    own: "ServedModels"
    calls: AnyCalls
    accept_from: Callable[[Sequence[socket.socket]], Awaitable[None]] | None = None

    def __init__(self, salt_secret: bytes = b"") -> None:
        """salt_secret: of the processes together, so that prefixes are found whichever starts the request."""
        self.salt_secret = salt_secret or secrets.token_bytes(16)
        self._owned: Owned | None = None

    def make_admission(self, config: ServerConfig) -> AnyAdmission:
        """Return what admits the requests of this process."""
        return Admission(config.server_limits, config.server_timeouts.queue_timeout_s)

    def open(self, config: ServerConfig) -> None:
        """Open what all processes have once. Raises ConfigError for a file that cannot be used."""
        self._owned = Owned(config)
        self.calls = OwnCalls(self._owned.services)

    def close(self) -> None:
        """Close what `open` has opened."""
        if self._owned is not None:
            self._owned.close()

    async def ask(
        self, method: Callable[Concatenate["ServedModels", P], T | Awaitable[T]], *args: P.args, **kw: P.kwargs
    ) -> list[T]:
        """Call a method of the models of all processes; return what those answer that do."""
        answer: Any = method(self.own, *args, **kw)
        return [await answer if inspect.isawaitable(answer) else answer]

    async def read_counts(self) -> ModelCounts:
        """Return what all processes have counted of each model, those that have ended included."""
        return self.own.counts()

    async def change_adapter(self, change: AdapterChange) -> None:
        """Load or unload an adapter in all processes. Raises ApiError, the first one."""
        if (failure := await self.own.change_adapter(change)) is not None:
            raise ApiError(*failure)

    async def wait_until_ending(self) -> None:
        """Wait until all processes drain together. One that is alone gets the signal itself."""
        await asyncio.Event().wait()

    async def drained(self) -> None:
        """Tell that this process has no request any more, and wait until the others have none."""


class RemotePeers(Peers):
    """One of several processes: the others, and what they share, are asked for at their parent.

    calls: of functions of the parent; set before anything else is used.
    """

    calls: Calls

    def __init__(self, salt_secret: bytes, listeners: Sequence[socket.socket]) -> None:
        """listeners: the sockets of all processes, by their numbers."""
        super().__init__(salt_secret)
        self._listeners = listeners
        self._ending = asyncio.Event()

    def make_admission(self, config: ServerConfig) -> AnyAdmission:
        return RemoteAdmission(self.calls)

    def open(self, config: ServerConfig) -> None:
        """The parent has it."""

    @property
    def services(self) -> Services:
        """What the parent may call."""
        own = self.own
        asked = (own.counts, own.oldest, own.requests, own.details, own.most_alike, own.abort, own.change_adapter)
        return {"drain": self._ending.set, "accept_for": self._accept_for, **{one.__name__: one for one in asked}}

    async def _accept_for(self, numbers: list[int]) -> None:
        """Accept connections in place of these processes, and of no others any more."""
        if self.accept_from is not None:
            await self.accept_from([self._listeners[number - 1] for number in numbers])

    async def ask(
        self, method: Callable[Concatenate["ServedModels", P], T | Awaitable[T]], *args: P.args, **kw: P.kwargs
    ) -> list[T]:
        answer: Any = answer_of(method)
        return await self.calls.call("ask_all", method.__name__, list(args), returns=list[answer])

    async def read_counts(self) -> ModelCounts:
        total: ModelCounts = await self.calls.call("counts", returns=ModelCounts)
        return {name: {**counts, **total.get(name, {})} for name, counts in self.own.counts().items()}

    async def change_adapter(self, change: AdapterChange) -> None:
        await self.calls.call("change_adapter", change)

    async def wait_until_ending(self) -> None:
        await self._ending.wait()

    async def drained(self) -> None:
        await self.calls.call("drained")
