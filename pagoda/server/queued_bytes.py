"""QueuedBytes: limit the total size of all request bodies that the server holds at once."""

from collections.abc import Callable

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagoda.server.errors import error_response

RETRY_AFTER_S = 1


class QueuedBytes:
    """A layer of the app that counts body bytes from their arrival until the end of the response.

    max_bytes: requests that would exceed it get 429; 0: no limit. A request of any size is admitted if no other has a
    body.   on_refusal: called for each refusal.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, on_refusal: Callable[[], None]) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._on_refusal = on_refusal
        self.num_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        # Bytes only count when they arrive: a client could reserve room with a Content-Length and send nothing.
        length = next((v for k, v in scope["headers"] if k == b"content-length"), b"0")
        if length.isdigit() and self._is_too_much(int(length), own=0):
            self._on_refusal()
            return await error_response(429, self._message(), retry_after_s=RETRY_AFTER_S)(scope, receive, send)
        own = 0

        async def counted() -> Message:
            nonlocal own
            message = await receive()
            size = len(message.get("body", b""))
            if self._is_too_much(size, own):
                self._on_refusal()
                raise HTTPException(429, self._message(), {"Retry-After": str(RETRY_AFTER_S)})
            own += size
            self.num_bytes += size
            return message

        try:
            return await self._app(scope, counted, send)
        finally:
            self.num_bytes -= own

    def _is_too_much(self, size: int, own: int) -> bool:
        is_alone = self.num_bytes == own
        return bool(self._max_bytes and size) and not is_alone and self.num_bytes + size > self._max_bytes

    def _message(self) -> str:
        return f"the server is full: request bodies use {self.num_bytes} of {self._max_bytes} bytes"
