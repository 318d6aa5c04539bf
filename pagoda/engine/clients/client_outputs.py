"""What all clients share: the outputs of steps, and the replies that their calls wait for."""

import asyncio
import itertools
from typing import Generic, TypeVar

from pagoda.base.errors import PagodaError, fresh
from pagoda.core.scheduler_output import EngineCoreOutputs

T = TypeVar("T")


class ClientOutputs:
    """The part of an EngineCoreClient that all clients share."""

    def __init__(self) -> None:
        self._outputs: asyncio.Queue[EngineCoreOutputs | PagodaError] = asyncio.Queue()

    async def next_outputs(self) -> EngineCoreOutputs:
        """Return the next step's outputs, to a single consumer. Raises the error that ended the engine for good."""
        item = await self._outputs.get()
        if isinstance(item, PagodaError):
            raise item
        return item


class Replies(Generic[T]):
    """Replies that are waited for, by call id."""

    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[T]] = {}
        self._call_ids = itertools.count(1)

    def expect(self) -> "tuple[int, asyncio.Future[T]]":
        """Return the id for a call, and its reply."""
        call_id, reply = next(self._call_ids), asyncio.get_running_loop().create_future()
        self._waiting[call_id] = reply
        reply.add_done_callback(lambda _: self._waiting.pop(call_id))
        return call_id, reply

    def settle(self, call_id: int, reply: T) -> None:
        """Pass on the reply to a call, unless the caller has been cancelled."""
        waiting = self._waiting.get(call_id)
        if waiting is not None and not waiting.done():
            waiting.set_result(reply)

    def end(self, last: T | PagodaError) -> None:
        """Give all who wait the same reply, or an error: no other will come."""
        for call_id, waiting in self._waiting.items():
            if not isinstance(last, PagodaError):
                self.settle(call_id, last)
            elif not waiting.done():
                waiting.set_exception(fresh(last))
