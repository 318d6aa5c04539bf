"""The HTTP application, and the process that serves it."""

import asyncio
import functools
import logging
import math
import socket
import sys
from importlib.metadata import version
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from pagoda.base.config import ServerConfig
from pagoda.server import chat, completions, errors, operations, tokens
from pagoda.server.body import body_schemas
from pagoda.server.http_protocol import BoundedHttpProtocol
from pagoda.server.middleware import OPEN_PATHS, AccessLog, Gate
from pagoda.server.state import ServerState


def create_app(state: ServerState, config: ServerConfig) -> ASGIApp:
    """An ASGI app over a started engine. The caller owns engine and sockets.

    The layers lie around FastAPI's app, not in it, so that also what nobody expected (a 500) leaves through them.
    """
    app = FastAPI(
        title="pagoda", version=version("pagoda-llm"), description="OpenAI-compatible API of the pagoda engine"
    )
    app.state.server = state
    errors.install(app)
    for part in (chat, completions, tokens, operations):
        app.include_router(part.router)
    _describe(app, has_keys=bool(config.api_keys))
    layers: ASGIApp = Gate(app, config)
    if config.cors_origins:
        # Around the gate: a browser shows a page only answers that carry these headers, refusals included, and asks
        # for them (OPTIONS) without the key.
        layers = CORSMiddleware(
            layers,
            allow_origins=list(config.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    return AccessLog(layers)


def _describe(app: FastAPI, has_keys: bool) -> None:
    """Add to the OpenAPI page what the routes read themselves (their bodies) and what the gate asks for."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is not None:
            return app.openapi_schema
        schema = plain()
        schema["components"]["schemas"].update(body_schemas())
        if not has_keys:
            return schema
        schema["components"]["securitySchemes"] = {"api_key": {"type": "http", "scheme": "bearer"}}
        schema["security"] = [{"api_key": []}]
        for path in OPEN_PATHS:
            for operation in schema["paths"][path].values():
                operation["security"] = []
        return schema

    app.openapi = openapi  # type: ignore[method-assign]


class _Server(uvicorn.Server):
    """SIGTERM and Ctrl-C: new work is refused, streams go on until the deadline; a second signal ends at once."""

    def __init__(self, config: uvicorn.Config, state: ServerState, url: str) -> None:
        super().__init__(config)
        self._state = state
        self._url = url

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(
            f"pagoda {version('pagoda-llm')} ready at {self._url}  (docs at {self._url}/docs)",
            file=sys.stderr,
            flush=True,
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Not the parent's: it would raise the signal once more after the drain, and the engine would not be ended.
        self.drain()

    def drain(self) -> None:
        self._state.generator.is_draining = True
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True


async def serve(state: ServerState, config: ServerConfig, listener: socket.socket) -> None:
    """Answer on `listener` until told to end; returns when drained. Raises WorkerDied when no engine can be had."""
    if config.access_log:
        _log_plainly("pagoda.access", sys.stdout)
    host = f"[{config.host}]" if ":" in config.host else config.host
    url = f"{'https' if config.ssl_certfile else 'http'}://{host}:{listener.getsockname()[1]}"
    on_refusal = functools.partial(state.generator.metrics.on_refusal, "connections")
    server = _Server(
        uvicorn.Config(
            create_app(state, config),
            http=functools.partial(BoundedHttpProtocol, config, on_refusal),  # type: ignore[arg-type]
            ws="none",
            ssl_certfile=config.ssl_certfile,
            ssl_keyfile=config.ssl_keyfile,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=math.ceil(config.drain_timeout_s),
            server_header=False,
            lifespan="off",
        ),
        state,
        url,
    )
    watch = asyncio.create_task(_end_with_engine(server, state))
    try:
        await server.serve(sockets=[listener])
    finally:
        watch.cancel()
    if state.engine is not None and state.engine.died is not None:
        raise state.engine.died


async def _end_with_engine(server: _Server, state: ServerState) -> None:
    """A server without an engine is of no use: whoever supervises it should see it end, and start it again."""
    if state.engine is not None:
        await state.engine.wait_until_gone()
        server.drain()


def _log_plainly(name: str, stream: "object") -> None:
    """A logger whose lines are nothing but their message."""
    logger = logging.getLogger(name)
    handler = logging.StreamHandler(stream)  # type: ignore[type-var]
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
