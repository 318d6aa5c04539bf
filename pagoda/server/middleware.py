"""What every HTTP request passes: request id, body size, API key, draining, access log.

Plain ASGI, so it adds no overhead to streams.
"""

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import logging
import re
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator
from typing import Any
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagoda.base.abbreviate import quoted, shorten
from pagoda.base.server_config import MAX_HELD_BODY_BYTES, MAX_UPLOAD_BYTES, ServerConfig
from pagoda.process.logs import FIELDS
from pagoda.server.admission import Refusal
from pagoda.server.errors import CLIENT_CLOSED, RETRY_AFTER_S, ErrorForm, error_body, error_response
from pagoda.server.request_starter import BATCH
from pagoda.server.request_state import ADMIN, Caller, RequestState, request_state
from pagoda.server.routing import HEALTH_PATHS, OPEN_PATHS
from pagoda.server.server_timing import HEADER, REQUEST_HEADER, ROUTED_HEADER, routed_because, server_timing

OPEN_WHILE_DRAINING = HEALTH_PATHS | {
    "/metrics",
    "/load",
    "/version",
    "/abort_requests",
    "/requests",
    "/dashboard/stream",
}
"""Routes for observing or shortening the drain. They do not hold it up."""


def _is_of_stored_work(method: str, path: str) -> bool:
    """Return whether a request asks for a response that may still run in the background, or ends it."""
    return path.startswith("/v1/responses/") and (method == "GET" or path.endswith("/cancel"))


class Drain:
    """Tracks the requests in progress, and cancels the remaining ones after the deadline.

    For one event loop; `begin` may be called from a signal handler.
    """

    def __init__(self) -> None:
        self.is_draining = False
        self.is_over = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_held(self) -> int:
        """How many requests are in progress."""
        return len(self._tasks)

    def begin(self) -> None:
        """Refuse new requests from now on. Idempotent."""
        self.is_draining = True

    def refuses(self, method: str, path: str) -> bool:
        return self.is_draining and not (path in OPEN_WHILE_DRAINING or _is_of_stored_work(method, path))

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Keep the server from shutting down while the block runs in the current task."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._idle.clear()
        try:
            yield
        finally:
            self._end(task)

    def run(self, work: Coroutine[Any, Any, object], on_end: Callable[[], object]) -> asyncio.Task[Any]:
        """Run what goes on without a client, as a request in progress.   on_end: called at its end, even if it never
        began to run."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        self._idle.clear()
        task.add_done_callback(lambda _: on_end())
        task.add_done_callback(self._end)
        return task

    def _end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not self._tasks:
            self._idle.set()

    async def wait_until_idle(self, timeout_s: float) -> bool:
        """Return True once no request is in progress, or False after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        return self._idle.is_set()

    def cancel_rest(self) -> None:
        """Cancel the tasks of requests still in progress, which see from `is_over` why."""
        self.is_over = True
        for task in self._tasks:
            task.cancel()


access_log = logging.getLogger("pagoda.access")

REQUEST_ID_HEADER = b"x-request-id"
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_GOOD_ID = re.compile(r"[\x21-\x7e]{1,128}")
_AUTHORITY = re.compile(r"https?://[^/?#]*", re.IGNORECASE)


class AccessLog:
    """Outermost layer of the app: gives every request an id, and logs a line when it has ended.

    Makes the RequestState. Its ignored_fields and warning become the headers x-ignored-fields and x-warning, and what
    is known of its generation when the answer begins becomes server-timing, for callers that ask for it.
    Of a path, a slash at its end is dropped, the address before it (`GET http://host/health`), and `prefix`, for a
    proxy that does not strip it.
    on_end: called with the scope, the method, the status and the seconds of every request.
    error_form: returns the form of the errors of the API that a request is for.
    """

    def __init__(
        self,
        app: ASGIApp,
        on_end: Callable[[Scope, str, int, float], None],
        error_form: Callable[[Scope], ErrorForm] = lambda _: error_body,
        prefix: str = "",
    ) -> None:
        self._app = app
        self._on_end = on_end
        self._error_form = error_form
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        began_s = time.perf_counter()
        given = next((v.decode("latin-1") for k, v in scope["headers"] if k == REQUEST_ID_HEADER), "")
        wants_timings = any(k == REQUEST_HEADER and v != b"0" for k, v in scope["headers"])
        scope = {**scope, "path": self._plain(scope["path"])}
        state = RequestState(given if _GOOD_ID.fullmatch(given) else uuid.uuid4().hex, self._error_form(scope))
        scope["state"] = state
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", ()), (REQUEST_ID_HEADER, state.request_id.encode())]
                for name, noted in ((b"x-ignored-fields", state.ignored_fields), (b"x-warning", state.warning)):
                    if noted:
                        headers.append((name, noted.encode()))
                if wants_timings and (timing := _timing(state)):
                    headers.append((HEADER, timing))
                if wants_timings and state.generation is not None and (routed := state.generation.routed):
                    headers.append((ROUTED_HEADER, routed_because(routed.values())))
                message = {**message, "headers": headers}
            await send(message)

        def end(_: object = None) -> None:
            ended_as = state.ended_as or status or CLIENT_CLOSED
            method = scope["method"] if scope["method"] in _METHODS else "other"
            duration_s = time.perf_counter() - began_s
            self._on_end(scope, method, ended_as, duration_s)
            _log(scope, state, method, ended_as, duration_s)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            if state.work is None:
                end()
            else:
                state.work.add_done_callback(end)

    def _plain(self, path: str) -> str:
        if address := _AUTHORITY.match(path):
            path = path[address.end() :]
        if f"{path}/".startswith(f"{self._prefix}/"):
            path = path.removeprefix(self._prefix)
        return path.rstrip("/") or "/"


UPLOADS = frozenset({"/v1/files"})
"""Paths of files that go to disk as they come."""
_FORM_BYTES = 2**20
"""Of a form around a file."""


class Gate:
    """Checks requests before their route runs, and limits the body while the route reads it.

    config.api_keys: if empty, every request passes. Keys are compared in constant time.
    config.admin_api_key: also accepted as an API key.
    config.server_limits.max_body_bytes: larger requests get 413. If all bodies that are held until their responses end
        exceed MAX_HELD_BODY_BYTES, further ones get 429; a body is admitted at any size if there is no other. Files of
    UPLOADS have a limit of their own, and are not held.
    drain: while the server drains, new requests get 503; so do unanswered ones at the drain's deadline.
    Sets of the RequestState: caller; hold, which counts bytes for a request as those of its body.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, drain: Drain) -> None:
        self._app = app
        self._drain = drain
        self._needs_key = bool(config.api_keys)
        admin = () if config.admin_api_key is None else ((ADMIN, config.admin_api_key),)
        named = (*admin, *((str(number), key) for number, key in enumerate(config.api_keys, 1)))
        self._callers = [(_digest(key), Caller(name, owner_name(key))) for name, key in named]
        self.max_body_bytes = config.server_limits.max_body_bytes
        self.held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        refusal = self._refusal(scope, request_state(scope))
        if refusal is not None:
            return await refusal(scope, receive, send)
        body = _Body(self, receive, self._most_bytes(scope), scope["path"] in UPLOADS)
        request_state(scope).hold = body.hold
        try:
            if scope["path"] in OPEN_WHILE_DRAINING:
                return await self._app(scope, body.receive, send)
            with self._drain.hold():
                return await self._run(scope, body.receive, send)
        finally:
            self.held_bytes -= body.num_bytes

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the route; respond with 503 if the drain's deadline passes before its response begins."""
        has_begun = False

        async def noting_send(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, noting_send)
        except asyncio.CancelledError:
            if not self._drain.is_over:
                raise
            request_state(scope).ended_as = 503
            if not has_begun:
                await _shutting_down()(scope, receive, send)

    def _refusal(self, scope: Scope, state: RequestState) -> ASGIApp | None:
        headers = scope["headers"]
        length = next((v for k, v in headers if k == b"content-length"), b"0")
        if length.isdigit() and int(length) > (most := self._most_bytes(scope)):
            return error_response(413, f"the body is larger than {most} bytes")
        if scope["path"] not in OPEN_PATHS and scope["method"] != "OPTIONS":
            state.caller = self._caller(headers)
            if self._needs_key and not state.caller.key:
                response = error_response(
                    401, "the API key is missing or wrong; send it as `Authorization: Bearer KEY` or `x-api-key: KEY`"
                )
                response.headers["WWW-Authenticate"] = "Bearer"
                return response
        return _shutting_down() if self._drain.refuses(scope["method"], scope["path"]) else None

    def _most_bytes(self, scope: Scope) -> int:
        return MAX_UPLOAD_BYTES + _FORM_BYTES if scope["path"] in UPLOADS else self.max_body_bytes

    def _caller(self, headers: list[tuple[bytes, bytes]]) -> Caller:
        """Return who sends a request; one without a key if it has none of this server's.

        All keys are compared even after a match, so that timing reveals nothing.
        """
        scheme, _, bearer = _value(headers, b"authorization").partition(b" ")
        given = (bearer if scheme.lower() == b"bearer" else b"", _value(headers, b"x-api-key"))
        digests = [hashlib.sha256(key.strip()).digest() for key in given if key]
        found = [who for known, who in self._callers if sum(hmac.compare_digest(given, known) for given in digests)]
        return found[0] if found else Caller()


class _Body:
    """Receives the body of one request, and limits its size, with and without a Content-Length."""

    def __init__(self, gate: Gate, receive: Receive, max_bytes: int, is_upload: bool) -> None:
        """is_upload: what was received is not held."""
        self._gate = gate
        self._receive = receive
        self._max_bytes = max_bytes
        self._is_upload = is_upload
        self._is_complete = False
        self._num_received = 0
        self.num_bytes = 0

    async def receive(self) -> Message:
        """Return the next message.

        Raises HTTPException for a body that is too large, or whose client left; Refusal if all bodies are too large.
        """
        message = await self._receive()
        if self._is_complete:
            return message
        if message["type"] == "http.disconnect":
            raise HTTPException(CLIENT_CLOSED, "the client closed its connection")
        size = len(message.get("body", b""))
        self._num_received += size
        if self._num_received > self._max_bytes:
            raise HTTPException(413, f"the body is larger than {self._max_bytes} bytes")
        if not self._is_upload:
            self.hold(size)
        self._is_complete = not message.get("more_body", False)
        return message

    def hold(self, num_bytes: int) -> None:
        """Count bytes that the request holds until it ends. Raises Refusal if all together hold too many."""
        self.num_bytes += num_bytes
        self._gate.held_bytes += num_bytes
        if self._gate.held_bytes > MAX_HELD_BODY_BYTES and self._gate.held_bytes > self.num_bytes:
            full = f"the server is full: it holds request bodies of {MAX_HELD_BODY_BYTES} bytes"
            raise Refusal("bodies", full)


def _value(headers: list[tuple[bytes, bytes]], name: bytes) -> bytes:
    return next((value for key, value in headers if key == name), b"")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def owner_name(key: str) -> str:
    """Return what the owner of an API key is called."""
    return _digest(key).hex()[:32]


def _shutting_down() -> ASGIApp:
    """Return a 503 response that closes the connection, so that the client connects to another server."""
    response = error_response(503, "the server is shutting down", retry_after_s=RETRY_AFTER_S)
    response.headers["Connection"] = "close"
    return response


def _timing(state: RequestState) -> bytes:
    """Return the header that says where the time went; b"" if nothing was generated."""
    generation = state.generation
    times = generation.times if generation is not None else None
    if generation is None or times is None or times.time_in_queue is None:
        return b""
    return server_timing(generation.figures, times.queue_reasons)


def _log(scope: Scope, state: RequestState, method: str, status: int, duration_s: float) -> None:
    is_quiet = status < 400 and (scope["path"] in _PROBED or BATCH in scope)  # a batch may have 100,000 lines
    level = logging.DEBUG if is_quiet else logging.INFO
    if not access_log.isEnabledFor(level):
        return
    fields = {
        "method": method,
        "path": scope["path"][:_LONGEST_PATH],
        "status": status,
        "duration_ms": round(duration_s * 1e3, 1),
        **({} if state.model is None else {"model": state.model}),
        **({} if state.audio_s is None else {"audio_s": state.audio_s}),
        **({} if state.generation is None else state.generation.log_fields),
        "request_id": state.request_id,
        "client": _address((scope.get("client") or ("",))[0]),
        "key": state.caller.key,
        "error": shorten(state.error, _LONGEST_REASON),
    }
    access_log.log(level, "%s", _line(fields), extra={FIELDS: fields})


_PROBED = HEALTH_PATHS | {"/metrics", "/load", "/requests"}
"""Paths that machines ask for again and again: a success is only logged with --log-level debug."""
_LONGEST_PATH = 200
_LONGEST_REASON = 200
_NOT_NAMED = ("method", "path", "status", "duration_ms")


def _line(fields: dict[str, Any]) -> str:
    """Return the line of the access log for people: `POST /v1/completions 200 in 12.3 ms, model=m, ...`.

    What callers have written is in quotes where it could look like fields.
    """
    path = quote(fields["path"], safe="/:")
    begin = f"{fields['method']} {path} {fields['status']} in {fields['duration_ms']} ms"
    named = (f"{name}={quoted(str(value))}" for name, value in fields.items() if name not in _NOT_NAMED and value != "")
    return ", ".join((begin, *named))


def _address(host: str) -> str:
    """Return a client's address as the log shows it: of what a proxy says, only what is one."""
    if not host:
        return ""
    try:
        return str(ipaddress.ip_address(host.partition("%")[0]))
    except ValueError:
        return "unknown"
