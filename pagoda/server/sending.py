"""How answers are sent: whole ones as JSON, streams as server-sent events, both only while the client is there."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagoda.server.errors import CLIENT_CLOSED, ApiError, ClientGone, as_api_error, error_body, shortened
from pagoda.server.request_state import RequestState, request_state

logger = logging.getLogger("pagoda.server")

T = TypeVar("T")
_encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"
_LISTS = ("choices", "data", "results", "embeddings")
INLINE_TOKENS = 256
"""With 20 log-probabilities each, this many tokens take about 5 ms to convert and encode."""


async def run_sized(num_tokens: int, work: Callable[[], T]) -> T:
    """Return the result of `work`, which takes time that grows with `num_tokens`: if they are many, use a thread."""
    return await on_thread(work) if num_tokens > INLINE_TOKENS else work()


async def on_thread(work: Callable[[], T]) -> T:
    """Return the result of `work`, run on a thread. If this is cancelled, wait for the thread before raising that.

    A thread goes on when its caller is cancelled, and would change what the caller then ends.
    """
    running = asyncio.get_running_loop().run_in_executor(None, work)
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait((running,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        running.exception()  # else asyncio logs that nobody asked for it
        raise cancelled
    return running.result()


def json_response(answer: Struct | bytes) -> Response:
    """Return a struct, or what was encoded before, as a JSON response.

    The entries of its lists are encoded one by one: encoding holds the GIL, and so would keep the event loop waiting
    even on a thread.
    """
    if isinstance(answer, Struct):
        for name in _LISTS:
            if len(entries := getattr(answer, name, ())) > 1:
                msgspec.structs.force_setattr(answer, name, [msgspec.Raw(_encode(entry)) for entry in entries])
        answer = _encode(answer)
    return Response(answer, media_type="application/json")


def event(answer: object, name: str | None = None) -> bytes:
    """Return a server-sent event with a struct as JSON.   name: of the event, if it has one."""
    data = b"data: %b\n\n" % _encode(answer)
    return data if name is None else f"event: {name}\n".encode() + data


@dataclass(frozen=True, slots=True)
class Framing:
    """How an API ends its streams.   error: from an error and the request's id, its event.   end: the last bytes.

    retells: the API repeats or seals a finished part (a thought, a text, a call), and the whole answer at its end.
    """

    error: Callable[[ApiError, str], bytes]
    end: bytes
    media_type: str = "text/event-stream"
    retells: bool = False


OPENAI_FRAMING = Framing(lambda error, request_id: event(error_body(error, request_id)), DONE)


def _nothing() -> None:
    pass


class EventStream(Response):
    """A stream of an API's frames: ready-made bytes from an async generator, then what ends a stream of the API.

    A disconnect closes the generator (its `finally` runs), even while nothing is being sent. `send` waits for a slow
    reader, which only delays its own stream. Errors are sent as an event, because the status has already been sent.
    on_end: called once at the end, even if the generator never started.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        on_end: Callable[[], None] = _nothing,
        framing: Framing = OPENAI_FRAMING,
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers=headers, media_type=framing.media_type)
        del self.headers["content-length"]
        self._events = events
        self._on_end = on_end
        self._framing = framing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await cancel_on_disconnect(Request(scope, receive), self._pump(request_state(scope), send))
        except ClientGone:
            request_state(scope).ended_as = CLIENT_CLOSED
        finally:
            await self._end()

    async def _pump(self, state: RequestState, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for data in self._events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except Exception as error:
            known = as_api_error(error)
            state.fail(known)
            if known.status == 500:  # other statuses are not failures of the server
                logger.error("a stream ended with an error", exc_info=error)
            frame = self._framing.error(shortened(known), state.request_id)
            await send({"type": "http.response.body", "body": frame, "more_body": True})
        # Ended before the client reads the end: it may then send another request with the same id.
        await self._end()
        await send({"type": "http.response.body", "body": self._framing.end, "more_body": False})

    async def _end(self) -> None:
        await self._events.aclose()
        on_end, self._on_end = self._on_end, _nothing
        on_end()


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. If the client disconnects first, cancel it and raise ClientGone."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_wait_until_gone(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
