"""Peers: the processes that serve one port before one engine, as one of them sees them."""

import asyncio

from pagoda.engine.clients.calls import Calls, Services


class Peers:
    """A process that serves HTTP alone."""

    async def wait_until_ending(self) -> None:
        """Wait until all processes drain together. One that is alone gets the signal itself."""
        await asyncio.Event().wait()

    async def drained(self) -> None:
        """Tell that this process has no request any more, and wait until the others have none."""


class RemotePeers(Peers):
    """One of several processes: what they share is asked for at their parent.

    calls: of functions of the parent; set before anything else is used.
    """

    calls: Calls

    def __init__(self) -> None:
        self._ending = asyncio.Event()

    @property
    def services(self) -> Services:
        """What the parent may call."""
        return {"drain": self._ending.set}

    async def wait_until_ending(self) -> None:
        await self._ending.wait()

    async def drained(self) -> None:
        await self.calls.call("drained")
