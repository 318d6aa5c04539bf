"""The HTTP application, and the process that serves it."""

import asyncio
import contextlib
import functools
import logging
import signal
import socket
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from types import FrameType

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Scope

from pagoda.base.errors import RequestError
from pagoda.base.server_config import ServerConfig
from pagoda.process.allocator import keep_objects
from pagoda.server import discovery, embeddings, errors, live, operations, scores, tokens, transcription
from pagoda.server.batches import files, routes
from pagoda.server.batches.worker import BatchWorker
from pagoda.server.dialects import infill
from pagoda.server.dialects.messages import dialect as messages
from pagoda.server.dialects.ollama import dialect as ollama
from pagoda.server.dialects.ollama import models as ollama_models
from pagoda.server.dialects.ollama import names as ollama_names
from pagoda.server.dialects.openai import chat, completions
from pagoda.server.errors import RETRY_AFTER_S, ApiError, ErrorForm, error_body
from pagoda.server.middleware import AccessLog, Gate
from pagoda.server.pages.files import PAGE_ROUTES
from pagoda.server.pages.rules import PageRules
from pagoda.server.request_state import request_state
from pagoda.server.routing import Endpoint, Router, describe_api, docs_page
from pagoda.server.sending import json_response
from pagoda.server.state import ServerState, state_of
from pagoda.server.stored import conversations, responses
from pagoda.server.tracing import TRACE, write_trace


def create_app(state: ServerState, config: ServerConfig) -> ASGIApp:
    """Create the ASGI app of a started engine. The caller owns the engine and the sockets.

    The middleware wraps the routes' app from outside, so that responses to unexpected errors (500) pass through it too.
    """
    app = create_api(has_keys=bool(config.api_keys), has_ollama=config.ollama)
    app.state.server = state
    layers: ASGIApp = Gate(app, config, state.drain)
    if config.cors_origins:
        # Outside the gate: browsers hide responses without these headers from a page, including error responses, and
        # send preflight requests (OPTIONS) without the key.
        layers = CORSMiddleware(
            layers,
            allow_origins=list(config.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After", "X-Ignored-Fields", "X-Warning", "Server-Timing"],
        )
    layers = PageRules(layers, config)

    def on_end(scope: Scope, method: str, status: int, duration_s: float) -> None:
        known = request_state(scope)
        state.model.starter.metrics.on_http(method, known.route or "none", status)
        if known.generation is not None:
            known.generation.metrics.on_turn(known.route, status)
        if state.telemetry is not None and method == "POST" and scope["path"] in _MODEL_PATHS:
            state.telemetry.on_end(scope, status, duration_s)

    return AccessLog(layers, on_end, _error_form_of(config.ollama), prefix=config.root_path.rstrip("/"))


def _error_form_of(has_ollama: bool) -> Callable[[Scope], ErrorForm]:
    """Return what finds the form of a request's errors: that of its path's API, else that of the caller's client.

    has_ollama: the server has the routes of Ollama's API.
    """
    forms = {one.path: one.error_form for one in served_endpoints(has_ollama) if one.error_form is not error_body}
    known = {one.path for one in served_endpoints(has_ollama)}

    def error_form(scope: Scope) -> ErrorForm:
        path = scope["path"]
        if has_ollama and path.startswith("/api/") and path not in known:
            return ollama.ollama_error
        return forms.get(path) or (messages.message_error if messages.is_client(scope) else error_body)

    return error_form


logger = logging.getLogger("pagoda.server")

router = Router()
_INVOKED = {
    "messages": chat.create_chat_completion,
    "prompt": completions.create_completion,
    "input": embeddings.create_embedding,
    "text_1": scores.create_score,
    "query": scores.create_ranking,
}


@router.post("/invocations")
async def invoke(http: Request) -> Response:
    """What SageMaker calls: the body is that of another route, whose answer it gets.

    One with `messages` is that of /v1/chat/completions (of /v1/embeddings, if the model generates no text), with
    `prompt` of /v1/completions, with `input` of /v1/embeddings, with `text_1` of /score, with `query` of /rerank.
    """
    state = state_of(http)
    asked = await state.bodies.find_field(http, tuple(_INVOKED))
    if asked is None:
        raise RequestError(f"the body has none of {', '.join(_INVOKED)}, which say what is asked for")
    pools = asked == "messages" and not state.model.tasks.generates
    return await (embeddings.create_embedding if pools else _INVOKED[asked])(http)


_OLLAMA_ROUTERS = (ollama.router, ollama_models.router, ollama_names.router)
_MODEL_ROUTERS = (
    *(chat.router, completions.router, infill.router, messages.router, responses.router, *_OLLAMA_ROUTERS),
    *(embeddings.router, scores.router, transcription.router, router),
)
"""Of routes that ask something of the model."""
_ROUTERS = (
    *_MODEL_ROUTERS,
    responses.stored_router,
    conversations.router,
    files.router,
    routes.router,
    live.router,
    operations.router,
    discovery.router,
    tokens.router,
)
_OF_OLLAMA = frozenset(endpoint.path for one in _OLLAMA_ROUTERS for endpoint in one.endpoints)
_MODEL_PATHS = frozenset(endpoint.path for one in _MODEL_ROUTERS for endpoint in one.endpoints)
ENDPOINTS = tuple(endpoint for one in _ROUTERS for endpoint in one.endpoints)


def served_endpoints(has_ollama: bool) -> Sequence[Endpoint]:
    """Return the routes of a server.   has_ollama: with those of Ollama's API."""
    return [one for one in ENDPOINTS if has_ollama or one.path not in _OF_OLLAMA]


def create_api(has_keys: bool, has_ollama: bool) -> Starlette:
    """Return the routes, their errors and the OpenAPI page. No engine is needed until a route is called."""
    endpoints = served_endpoints(has_ollama)

    @functools.cache
    def described() -> tuple[bytes, str]:
        """Return the description as JSON and as a page: made when one is first asked for, not at each start."""
        api = describe_api(endpoints, has_keys)
        return msgspec.json.encode(api), docs_page(api)

    async def openapi(http: Request) -> Response:
        return json_response((await asyncio.to_thread(described))[0])

    async def docs(http: Request) -> Response:
        return HTMLResponse((await asyncio.to_thread(described))[1])

    pages = [Route("/openapi.json", openapi), Route("/docs", docs), live.STREAM, TRACE, *PAGE_ROUTES]
    app = Starlette(routes=[*(endpoint.route() for endpoint in endpoints), *pages], exception_handlers=errors.HANDLERS)
    app.router.redirect_slashes = False  # AccessLog drops a slash at the end
    return app


MAX_HEADER_BYTES = 64 * 2**10
KEEP_ALIVE_S = 75
"""How long an idle connection stays open: longer than the 60 s for which most proxies keep theirs."""
LAST_ANSWERS_S = 1.0
"""How long clients have, after the drain's deadline, to read that their requests were aborted."""


class _Server(uvicorn.Server):
    """Drains on SIGTERM and Ctrl-C before uvicorn shuts down (which would close the listener first).

    A second signal ends the process at once; the engine process notices that and exits, too.
    """

    def __init__(
        self, config: uvicorn.Config, state: ServerState, on_ready: Callable[[], object], drain_timeout_s: float
    ) -> None:
        super().__init__(config)
        self._state = state
        self._on_ready = on_ready
        self._drain_timeout_s = drain_timeout_s
        self._draining: asyncio.Task[None] | None = None
        self._others: dict[socket.socket, asyncio.Server] = {}  # of other processes
        self._accepting = asyncio.Lock()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self._state.peers.accept_from = self.accept_from
        self._on_ready()

    async def accept_from(self, listeners: Sequence[socket.socket]) -> None:
        """Accept connections from these sockets, next to its own, and from no others any more."""
        async with self._accepting:
            for listener in self._others.keys() - set(listeners):
                self._others.pop(listener).close()
            for listener in listeners:
                if listener not in self._others:
                    own = self.servers
                    await super().startup([listener.dup()])
                    (self._others[listener],), self.servers = self.servers, own

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn's own handler would raise the signal again after the drain, before the engine is shut down.
        # With the default handlers, the next signal ends the process at once, even if Python code hangs.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        if self._state.drain.is_draining:
            self.force_exit = self.should_exit = True
        self._state.drain.begin()
        self._loop.call_soon_threadsafe(self.drain)

    def drain(self) -> None:
        """Finish running requests, then exit. Idempotent."""
        self._state.drain.begin()
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain_then_exit())

    async def _drain_then_exit(self) -> None:
        await end_requests(self._state, self._drain_timeout_s)
        await self._state.peers.drained()
        await self.accept_from(())
        logger.info("drained: the server ends")
        self.should_exit = True


async def end_requests(state: ServerState, timeout_s: float) -> None:
    """Refuse new requests from now on, and return when those in progress have ended: after `timeout_s` with a 503."""
    drain = state.drain
    drain.begin()
    logger.info("shutting down: new requests get 503, %d in progress may take another %g s", drain.num_held, timeout_s)
    if await drain.wait_until_idle(timeout_s):
        return
    logger.warning("%d requests did not end in time and are aborted", drain.num_held)
    text = "the server is shutting down; the request was aborted before it was complete"
    error = ApiError(503, text, retry_after_s=RETRY_AFTER_S)
    state.admission.end_line(error)  # first: they would be admitted in place of those that end
    state.models.end_waits(error)
    for model in state.models.all:
        model.llm.fail_running(error)
    if not await drain.wait_until_idle(LAST_ANSWERS_S):
        # The remaining ones are streams whose clients do not read, and requests that have not started to run.
        drain.cancel_rest()
        await drain.wait_until_idle(LAST_ANSWERS_S)


@contextlib.asynccontextmanager
async def running_app(state: ServerState, config: ServerConfig) -> AsyncGenerator[ASGIApp]:
    """Yield the ASGI app of started engines, next to which batches run and a trace is written until the block ends.

    The caller ends the requests in progress before that (`end_requests`).
    """
    logging.getLogger("pagoda.access").disabled = not config.logs.access_log
    app = create_app(state, config)
    worker = BatchWorker(
        *(app, state.owned, config, state.drain, state.models.of),
        died=lambda: state.models.died,
        read_counts=state.admission.read_counts,
    )
    batches = asyncio.create_task(worker.run())
    file = config.logs.trace
    trace = asyncio.create_task(write_trace(state, Path(file).expanduser())) if file is not None else None
    keep_objects()
    try:
        yield app
    finally:
        batches.cancel()
        await asyncio.gather(batches, return_exceptions=True)
        if trace is not None:
            state.drain.begin()  # also where no signal ended the server
            await trace
        for model in state.models.all:
            model.llm.text.close()
        if state.telemetry is not None:
            await asyncio.to_thread(state.telemetry.close)
        await asyncio.to_thread(state.peers.close)


async def serve(
    state: ServerState, config: ServerConfig, listener: socket.socket, on_ready: Callable[[], object]
) -> None:
    """Serve on `listener` until a signal; return when drained. Raises WorkerDied if the engine cannot be restarted.

    on_ready: called once clients are served.
    """
    limit = config.server_limits.max_connections
    async with running_app(state, config) as app:
        server = _Server(
            uvicorn.Config(
                app,
                http="h11",  # uvicorn's httptools loses the body of a request that offers `Upgrade: h2c`
                ws="none",
                forwarded_allow_ips=config.trusted_proxies,
                h11_max_incomplete_event_size=MAX_HEADER_BYTES,
                limit_concurrency=limit + 1 if limit else None,  # uvicorn refuses from this number on
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=1,
                ssl_certfile=config.tls.ssl_certfile,
                ssl_keyfile=config.tls.ssl_keyfile,
                log_config=None,
                log_level="error",  # its warnings are about what a client did wrong, once per request
                access_log=False,
                server_header=False,
                lifespan="off",
            ),
            state,
            on_ready,
            config.server_timeouts.drain_timeout_s,
        )
        watch = asyncio.create_task(_end_with_engine(server, state))
        try:
            await server.serve(sockets=[listener])
        finally:
            watch.cancel()
    if (error := state.models.died) is not None:
        raise error


async def _end_with_engine(server: _Server, state: ServerState) -> None:
    """Drain and exit if no request can be served any more, so that a process manager restarts the server.

    That is so if the engine cannot be restarted, if its outputs can no longer be processed, or if the processes around
    one engine end together.
    """
    loader = state.models.loader
    assert loader is not None, "a server has engines"
    ends = [
        asyncio.create_task(loader.wait_until_dead()),
        asyncio.create_task(state.peers.wait_until_ending()),
    ]
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        server.drain()
    finally:
        for task in ends:
            task.cancel()
