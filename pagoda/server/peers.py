"""Peers: the processes that serve one port before one engine, as one of them sees them."""

import asyncio
import inspect
import secrets
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from pagoda.base.server_config import ServerConfig
from pagoda.engine.clients.calls import AnyCalls, Calls, OwnCalls, Services
from pagoda.metrics.counts import ModelCounts
from pagoda.server.admission import Admission
from pagoda.server.owned import Owned
from pagoda.server.remote_admission import AnyAdmission, RemoteAdmission
from pagoda.server.served_adapters import AdapterChange, Failure

CALL_S = 2.0
"""A process that does not answer for so long is left out."""
LOAD_S = 600.0
"""So long it may take to load an adapter."""


class Peers:
    """A process that serves HTTP alone: all is its own.

    own: functions that are called in each process; set before anything else is used.
    calls: of functions of what all processes have once, see Owned.
    accept_from: set when the process serves; accepts connections from these sockets, next to its own, and from no
    others any more.
    """

    own: Services
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

    async def ask(self, name: str, *arguments: object, returns: Any = Any) -> list[Any]:
        """Call a function of `own` in all processes; return what those answer that do.

        returns: the type of an answer.
        """
        answer = self.own[name](*arguments)
        return [await answer if inspect.isawaitable(answer) else answer]

    async def read_counts(self) -> ModelCounts:
        """Return what all processes have counted of each model, those that have ended included."""
        return self.own["counts"]()

    async def change_adapter(self, change: AdapterChange) -> Failure | None:
        """Load or unload an adapter in all processes. Return the first error."""
        return await self.own["change_adapter"](change)

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
        return {"drain": self._ending.set, "accept_for": self._accept_for, **self.own}

    async def _accept_for(self, numbers: list[int]) -> None:
        """Accept connections in place of these processes, and of no others any more."""
        if self.accept_from is not None:
            await self.accept_from([self._listeners[number - 1] for number in numbers])

    async def ask(self, name: str, *arguments: object, returns: Any = Any) -> list[Any]:
        return await self.calls.call("ask_all", name, list(arguments), returns=list[returns])

    async def read_counts(self) -> ModelCounts:
        total: ModelCounts = await self.calls.call("counts", returns=ModelCounts)
        return {name: {**counts, **total.get(name, {})} for name, counts in self.own["counts"]().items()}

    async def change_adapter(self, change: AdapterChange) -> Failure | None:
        return await self.calls.call("change_adapter", change, returns=Failure | None)

    async def wait_until_ending(self) -> None:
        await self._ending.wait()

    async def drained(self) -> None:
        await self.calls.call("drained")
