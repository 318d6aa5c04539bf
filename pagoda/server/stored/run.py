"""StoredTurn: runs a turn of Responses, and keeps its events and what comes of it."""

import contextlib
import logging
from collections.abc import AsyncGenerator, Sequence

from msgspec.json import encode
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from pagoda.engine.clients.calls import AnyCalls
from pagoda.server.dialects.responses.events import OutputItem, ResponseWriter
from pagoda.server.errors import as_api_error, shortened
from pagoda.server.request_state import RequestState
from pagoda.server.respond import RunningTurn
from pagoda.server.sending import Framing, cancel_on_disconnect, run_sized
from pagoda.server.stored.service import StoreService, pack
from pagoda.server.stored.store import Item, StoredResponse

logger = logging.getLogger("pagoda.server")


class StoredTurn:
    """A turn of Responses that is stored, until it ends as completed, incomplete, failed or cancelled."""

    def __init__(self, owned: AnyCalls, running: RunningTurn[ResponseWriter]) -> None:
        self._owned = owned
        self._running = running
        self._writer = running.answer
        if self._writer.response.background:
            self._writer.kept = []
        self._key = ("", "")
        self._is_finished = False
        self._failure = b""
        self.framing = Framing(lambda error, request_id: self._failure, b"")

    def entry(self, owner: str, earlier: Sequence[Item], own: Sequence[Item]) -> StoredResponse:
        """Return what is stored of it before it begins. Takes time that grows with the request.

        earlier: items before its own.
        """
        response = self._writer.response
        conversation = "" if response.conversation is None else response.conversation.id
        self._key = (owner, response.id)
        return StoredResponse(
            owner=owner,
            id=response.id,
            body=encode(replace(response, status="queued") if response.background else response),
            items=pack([*earlier, *own]),
            own=list(own) if conversation else [],
            events=[] if response.background else None,
            conversation=conversation,
            is_background=response.background,
        )

    def close(self) -> None:
        """End it as cancelled, unless it has ended: then it never began, so there is little to encode."""
        try:
            if not self._is_finished:
                self._finish(*self._ending())
        finally:  # whatever becomes of the store, the engine's place is free again
            self._running.close()

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Yield the frames of its stream; in the background, each is stored before. Who asks for them must close the
        turn."""
        response, num_frames = self._writer.response, 0
        try:
            async with contextlib.aclosing(self._running.frames()) as frames:
                async for data in frames:
                    num_frames += 1
                    is_queued = response.background and num_frames == 2  # until now: the first comes at once
                    self._keep(encode(response) if is_queued else b"")
                    if response.status != "in_progress":
                        await self._end()
                    yield data
        except Exception as error:
            self._failure = self._writer.framing.error(shortened(as_api_error(error)), "")
            raise
        finally:
            if not self._is_finished:  # it has failed, its client has left, or the server ends
                await self._end()

    async def run(self, noted: RequestState) -> None:
        """Run it without a client. Who runs it must close the turn, also one that never began to run.

        noted: of its request, which gets what the access log shows of an error.
        """
        try:
            async for _ in self.frames():
                pass
        except Exception as error:
            known = as_api_error(error)
            noted.fail(known)
            if known.status == 500:
                logger.error("a response in the background ended with an error", exc_info=error)
        logger.info("%s has ended in the background: %s", self._key[1], self._writer.response.status)

    async def whole(self, http: Request) -> Response:
        """Return the whole answer; nothing is kept if there is none."""
        try:
            answer = await cancel_on_disconnect(http, self._running.whole())
            items = await run_sized(self._running.size_so_far, self._items)
        except BaseException:
            self._owned.tell(StoreService.drop, *self._key)
            raise
        self._finish(bytes(answer.body), items)
        return answer

    def _keep(self, body: bytes = b"") -> None:
        """Store the events that were made, if they are kept, and the answer as it is now if it is given."""
        if events := self._writer.kept:
            self._writer.kept = []
            self._owned.tell(StoreService.append, *self._key, events, body)

    async def _end(self) -> None:
        self._finish(*await run_sized(self._running.size_so_far, self._ending))

    def _ending(self) -> tuple[bytes, list[Item]]:
        """Return how it has ended, as cancelled unless it has: the answer, and its items for later turns."""
        if self._writer.response.status == "in_progress":
            self._running.cut()
        return encode(self._writer.response), self._items()

    def _items(self) -> list[Item]:
        return [(item.id, encode(_without_logprobs(item))) for item in self._writer.response.output]

    def _finish(self, body: bytes, items: list[Item]) -> None:
        """Store the end of its events, the answer and its items."""
        self._is_finished = True
        self._keep()
        self._owned.tell(StoreService.finish, *self._key, body, items)


def _without_logprobs(item: OutputItem) -> OutputItem:
    """Return an item as later turns read it: its log-probabilities, a thousand bytes a token, stay in the response."""
    if not item.content:
        return item
    return replace(item, content=[replace(part, logprobs=[]) if part.logprobs else part for part in item.content])
