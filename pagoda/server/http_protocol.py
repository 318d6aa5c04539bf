"""HTTP/1.1 with size and time limits, which uvicorn and its parser do not have."""

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from pagoda.base.server_config import ServerConfig
from pagoda.server.errors import error_body, error_response

REFUSAL_WAIT_S = 1.0
LINGER_S = 1.0
MAX_PIPELINED = 16
_SLICE_BYTES = 4096  # holds about 200 of the smallest requests


class _LingeringTransport:
    """The transport of a request's cycle; its `close` gives the client time to read the response."""

    def __init__(self, protocol: "BoundedHttpProtocol") -> None:
        self._transport = protocol.transport
        self.write = self._transport.write
        self.is_closing = self._transport.is_closing
        self.close = protocol.linger


class _Flow(FlowControl):
    """Flow control that does not resume reading while bytes that have been read wait for the parser."""

    def __init__(self, transport: asyncio.Transport, waiting: bytearray) -> None:
        super().__init__(transport)
        self._waiting = waiting

    def resume_reading(self) -> None:
        if not self._waiting:
            super().resume_reading()


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. Its own error responses are in OpenAI's format, and close the connection.

    server_limits.max_header_bytes: a request head may exceed this by at most one read; then 431.
        The same limit holds for bytes between the parts of a chunked body and for its trailers, which are dropped: 400.
        A body that continues after its response is read up to max_body_bytes, then the connection closes.
    server_timeouts.header_timeout_s: time for a request's head to arrive, from the start of the connection, or from
        when uvicorn would close an idle one. Then 408, or just a close if nothing was received. A client still sending
        its body that long after the response is also disconnected. There is no timeout while responding.
    server_limits.max_connections: further connections get 503 in response to their first bytes (so that the client
        reads it), and are closed after REFUSAL_WAIT_S if they send none. Each calls on_refusal.

    Invalid HTTP and an end of input within a request get 400, unless the response to that request has begun. If invalid
    bytes follow a complete request, only that request is answered; then the connection is closed.
    While MAX_PIPELINED requests wait for their turn, no further ones are parsed or read.
    An end of input after a complete request counts as a disconnect: the two cannot be distinguished.
    """

    def __init__(self, settings: ServerConfig, on_refusal: Callable[[], None], *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limits, self._timeouts = settings.server_limits, settings.server_timeouts
        self._on_refusal = on_refusal
        self._is_refused = False
        self._ignores_input = False  # the connection closes after the last response
        self._is_lingering = False
        self._is_resuming = False  # ignore the parser's callbacks: they repeat a head already seen
        self._in_head = False
        self._head_bytes = 0
        self._in_body = False
        self._num_body_bytes = 0  # of all requests
        self._framing_bytes = 0  # since the last byte of the body
        self._surplus_bytes = 0  # of a body, after its response
        self._unparsed = bytearray()
        self._deadline: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None  # `cycle` is the last one parsed

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport, self._unparsed)
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
        self._unparsed.clear()
        running = self._running
        if running is not None and not running.response_complete:  # its route stops, though others wait behind it
            running.disconnected = True
            running.message_event.set()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        if not self._is_resuming:
            self._in_head, self._head_bytes = True, 0
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._is_resuming:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head and not self._is_resuming:  # not a trailer
            super().on_header(name, value)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_headers_complete(self) -> None:
        if self._is_resuming:
            return
        self._in_head, self._in_body = False, True
        self._framing_bytes = self._surplus_bytes = 0
        self._stop_clock()
        super().on_headers_complete()
        if self.cycle is not None:
            self.cycle.transport = _LingeringTransport(self)  # type: ignore[assignment]

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():  # otherwise its body has not been parsed yet
            self._in_body = False
            super().on_message_complete()

    def linger(self) -> None:
        """Close once the client has closed, or after LINGER_S.

        Closing while input is unread would reset the connection, and the client would lose the response.
        """
        transport = self.transport
        if transport.is_closing() or self._is_lingering:
            return
        if not transport.can_write_eof():  # TLS has no half-closed connections
            transport.close()
            return
        self._ignores_input = self._is_lingering = True
        self._unparsed.clear()
        transport.write_eof()
        self.flow.resume_reading()
        self._stop_clock()
        self._deadline = self.loop.call_later(LINGER_S, transport.close)

    def on_response_complete(self) -> None:
        if self._is_lingering:
            self.server_state.total_requests += 1
            return
        super().on_response_complete()
        if not self._is_answering():
            self._expect_head(self.timeout_keep_alive)
        if self._unparsed:
            self.loop.call_soon(self._parse)

    def data_received(self, data: bytes) -> None:
        if self._ignores_input:
            return None
        if self._is_refused:
            many = f"the server already has {self._limits.max_connections} connections"
            return self._refuse(503, many, "retry-after: 1\r\n")
        self._unparsed += data
        self._parse()
        return None

    def _parse(self) -> None:
        """Parse what has been read, until enough requests wait; the next response continues this."""
        start = 0
        while start < len(self._unparsed) and len(self.pipeline) < MAX_PIPELINED and not self._ignores_input:
            self._parse_slice(bytes(self._unparsed[start : start + _SLICE_BYTES]))
            start += _SLICE_BYTES
        if self._ignores_input or self.transport.is_closing():
            self._unparsed.clear()
            return
        was_waiting = bool(self._unparsed)
        del self._unparsed[:start]
        if self._unparsed:
            self.flow.pause_reading()
        elif was_waiting and not self.pipeline and self.cycle is not None and not self.cycle.body:
            self.flow.resume_reading()

    def _parse_slice(self, data: bytes) -> None:
        was_in_head, was_in_body, num_body_bytes = self._in_head, self._in_body, self._num_body_bytes
        self._feed(data)
        if self._ignores_input:
            return
        if was_in_head and self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > self._limits.max_header_bytes:
                self._refuse(431, f"the headers are larger than {self._limits.max_header_bytes} bytes")
        elif was_in_body and self._in_body:
            self._check_body(len(data), self._num_body_bytes > num_body_bytes)

    def _check_body(self, num_bytes: int, has_body: bool) -> None:
        if self.cycle.response_complete:
            self._surplus_bytes += num_bytes
        self._framing_bytes = 0 if has_body else self._framing_bytes + num_bytes
        limit = self._limits.max_header_bytes
        if (
            self.cycle.response_complete
            and max(self._surplus_bytes - self._limits.max_body_bytes, self._framing_bytes - limit) > 0
        ):
            self.linger()
        elif self._framing_bytes > limit:
            self._refuse_bytes(f"the body has more than {limit} bytes of chunk extensions or trailers in a row")

    def _feed(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            while data and not self._ignores_input:
                try:
                    self.parser.feed_data(data)
                    return
                except httptools.HttpParserUpgrade as offer:
                    data = data[int(offer.args[0]) :]
                    self._decline_upgrade()
        except httptools.HttpParserError:
            self._refuse_bytes("the request is not valid HTTP/1.1")

    def _decline_upgrade(self) -> None:
        """Continue with HTTP/1.1. The parser has stopped before the request's body: a new one parses the rest."""
        self.parser = httptools.HttpRequestParser(self)
        framing = [(k, v) for k, v in self.headers if k in (b"content-length", b"transfer-encoding")]
        head = b"".join(b"%b: %b\r\n" % header for header in framing)
        self._is_resuming = True
        self.parser.feed_data(b"POST / HTTP/1.1\r\n" + head + b"\r\n")
        self._is_resuming = False

    def eof_received(self) -> None:
        """Respond to an incomplete request. The transport closes after this returns."""
        in_body = self.cycle is not None and self.cycle.more_body
        if (self._in_head or in_body) and not self._ignores_input:
            self._refuse_bytes("the connection ended within the request")

    def _refuse_bytes(self, message: str) -> None:
        """Respond with 400 to the invalid bytes, after the responses to the requests before them."""
        self._ignores_input = True
        cycle = self.cycle
        if cycle is None or (cycle.response_complete and not cycle.more_body):
            self._refuse(400, message)
        elif not cycle.more_body:  # the request is complete, the invalid bytes follow it
            cycle.keep_alive = False
        elif self.pipeline and self.pipeline[0][0] is cycle:  # still queued after other requests
            cycle.keep_alive = False
            self.pipeline[0] = (cycle, error_response(400, message))  # type: ignore[assignment, arg-type]
        elif cycle.response_started:
            self.transport.close()
        else:
            self._write(400, message)
            self.linger()
            cycle.disconnected = True  # the route reading the body gets a disconnect
            cycle.message_event.set()

    def _expect_head(self, idle_s: float) -> None:
        self._stop_clock()
        if self._timeouts.header_timeout_s:
            self._deadline = self.loop.call_later(idle_s + self._timeouts.header_timeout_s, self._give_up)

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        if self._in_head:
            self._refuse(408, f"the headers were not complete after {self._timeouts.header_timeout_s:g} s")
        else:
            self.linger()

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, status: int, message: str, more: str = "") -> None:
        """Respond and close; only close if another response is in progress."""
        if self.transport.is_closing() or self._is_lingering:
            return
        self._in_head = False
        if self._is_answering():
            self.transport.close()
        else:
            self._write(status, message, more)
            self.linger()

    def _write(self, status: int, message: str, more: str = "") -> None:
        body = msgspec.json.encode(error_body(status, message))
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n{more}"
        self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
