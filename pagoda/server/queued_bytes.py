"""QueuedBytes: limit the total size of all request bodies that the server holds at once."""

from collections import Counter
from collections.abc import Callable

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagoda.server.errors import error_response

RETRY_AFTER_S = 1


class QueuedBytes:
    """A layer of the app that counts body bytes from their arrival until the end of the response.

    max_bytes: requests that would exceed it get 429; 0: no limit. A request of any size is admitted if no other has a
    body.   num_keys: how many API keys share the server. If several, each may use half of max_bytes, so that one
    cannot keep the others out; a key's only body may be larger.   on_refusal: called for each refusal.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, num_keys: int, on_refusal: Callable[[], None]) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_bytes_per_key = max_bytes // 2 if num_keys > 1 else max_bytes
        self._on_refusal = on_refusal
        self.num_bytes = 0
        self._of_key: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        key: str = scope["state"]["key"]
        # Bytes only count when they arrive: a client could reserve room with a Content-Length and send nothing.
        length = next((v for k, v in scope["headers"] if k == b"content-length"), b"0")
        said = self._refusal(int(length), key, own=0) if length.isdigit() else None
        if said is not None:
            self._on_refusal()
            return await error_response(429, said, retry_after_s=RETRY_AFTER_S)(scope, receive, send)
        own = 0

        async def counted() -> Message:
            nonlocal own
            message = await receive()
            size = len(message.get("body", b""))
            said = self._refusal(size, key, own)
            if said is not None:
                self._on_refusal()
                raise HTTPException(429, said, {"Retry-After": str(RETRY_AFTER_S)})
            own += size
            self._add(size, key)
            return message

        try:
            return await self._app(scope, counted, send)
        finally:
            self._add(-own, key)

    def _add(self, size: int, key: str) -> None:
        self.num_bytes += size
        self._of_key[key] += size
        if not self._of_key[key]:
            del self._of_key[key]

    def _refusal(self, size: int, key: str, own: int) -> str | None:
        """Return why `size` more bytes of this key do not fit now, or None.   own: bytes of the same request."""
        if not (self._max_bytes and size):
            return None
        if self.num_bytes > own and self.num_bytes + size > self._max_bytes:
            return f"the server is full: request bodies use {self.num_bytes} of {self._max_bytes} bytes"
        of_key, most = self._of_key[key], self._max_bytes_per_key
        if of_key > own and of_key + size > most:
            return f"request bodies of this API key use {of_key} bytes of {most}, half of what the server holds"
        return None
