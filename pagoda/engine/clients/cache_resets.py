"""CacheResets: empty the prefix cache of an engine process by messages."""

import asyncio
from collections.abc import Callable

from pagoda.engine import wire


class CacheResets:
    """Resets that wait for their reply. If the engine dies first they are done: its prefix cache is gone."""

    def __init__(self, send: Callable[[wire.ToEngine], None]) -> None:
        """send: to an engine that is up."""
        self._send = send
        self._next_call = 0
        self._waiting: dict[int, asyncio.Future[bool]] = {}  # by call id

    async def reset(self, preempt_running: bool) -> bool:
        """Return False if blocks are in use and may not be preempted."""
        self._next_call += 1
        reply: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting[self._next_call] = reply
        self._send(wire.ResetPrefixCache(self._next_call, preempt_running))
        return await reply

    def on_reply(self, reply: wire.ResetReply) -> None:
        waiting = self._waiting.pop(reply.call_id, None)
        if waiting is not None and not waiting.done():  # the caller may have been cancelled
            waiting.set_result(reply.succeeded)

    def end(self) -> None:
        """The engine has died."""
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result(True)
        self._waiting.clear()
