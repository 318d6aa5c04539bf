"""The HTTP/1.1 protocol with an end to heads and to connections: its parser knows no size, uvicorn no time."""

import asyncio
import json
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pagoda.base.config import ServerConfig
from pagoda.server.errors import error_body

REFUSAL_WAIT_S = 1.0


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. What it refuses itself is answered in OpenAI's shape, and closed.

    limits.max_header_bytes: a request head may take so much and one read more; then 431.
    limits.header_timeout_s: seconds until a request's head is complete, from the begin of the connection, or from where
    uvicorn would end an idle one. Then 408; who has sent nothing is just closed. So is who still sends a body, so long
    after its answer. While an answer is being written no such clock runs: that connection is somebody's.
    limits.max_connections: one that would be more hears 503 as soon as it speaks, so that its client reads it, and has
    REFUSAL_WAIT_S to do so. on_refusal is told of it.
    """

    def __init__(self, limits: ServerConfig, on_refusal: Callable[[], None], *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limits = limits
        self._on_refusal = on_refusal
        self._is_refused = False
        self._in_head = False
        self._head_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        limit = self._limits.max_connections
        if limit and len(self.connections) > limit:
            self.connections.discard(self)
            self._is_refused = True
            self._on_refusal()
            self._deadline = self.loop.call_later(REFUSAL_WAIT_S, transport.close)
        else:
            self._expect_head(0.0)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._in_head, self._head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_clock()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._is_answering():
            self._expect_head(self.timeout_keep_alive)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            many = f"the server has {self._limits.max_connections} connections already"
            return self._refuse(503, many, "retry-after: 1\r\n")
        had_begun = self._in_head
        super().data_received(data)
        if had_begun and self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > self._limits.max_header_bytes:
                self._refuse(431, f"the headers are larger than {self._limits.max_header_bytes} bytes")
        return None

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _expect_head(self, idle_s: float) -> None:
        self._stop_clock()
        if self._limits.header_timeout_s:
            self._deadline = self.loop.call_later(idle_s + self._limits.header_timeout_s, self._give_up)

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        if self._in_head:
            self._refuse(408, f"the headers were not complete after {self._limits.header_timeout_s:g} s")
        else:
            self.transport.close()

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, status: int, message: str, more: str = "") -> None:
        """Answer and close; in the middle of another answer, only close."""
        if self.transport.is_closing():
            return
        self._in_head = False
        if not self._is_answering():
            body = json.dumps(error_body(status, message)).encode()
            head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n{more}"
            self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        self.transport.close()
