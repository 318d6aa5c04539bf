"""The HTTP application, and the process that serves it."""

import asyncio
import logging
import sys
from importlib.metadata import version
from types import FrameType

import uvicorn
from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from pagoda.base.config import ServerConfig
from pagoda.server import chat, completions, errors, operations, tokens
from pagoda.server.middleware import Gate
from pagoda.server.state import ServerState


def create_app(state: ServerState, config: ServerConfig) -> FastAPI:
    """An ASGI app over a started engine. The caller owns engine and sockets."""
    app = FastAPI(
        title="pagoda", version=version("pagoda-llm"), description="OpenAI-compatible API of the pagoda engine"
    )
    app.state.server = state
    errors.install(app)
    for part in (chat, completions, tokens, operations):
        app.include_router(part.router)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(config.cors_origins), allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(
        Gate, api_keys=config.api_keys, max_body_bytes=config.max_body_bytes, max_header_bytes=config.max_header_bytes
    )
    return app


class _Server(uvicorn.Server):
    """SIGTERM and Ctrl-C: new work is refused, streams go on until the deadline; a second signal ends at once."""

    def __init__(self, config: uvicorn.Config, state: ServerState) -> None:
        super().__init__(config)
        self._state = state

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._state.generator.is_draining = True
        if self.should_exit:
            self.force_exit = True
        super().handle_exit(sig, frame)


async def serve(state: ServerState, config: ServerConfig) -> None:
    """Listen until told to end; returns when drained."""
    if config.access_log:
        _log_plainly("pagoda.access", sys.stdout)
    server = _Server(
        uvicorn.Config(
            create_app(state, config),
            host=config.host,
            port=config.port,
            ssl_certfile=config.ssl_certfile,
            ssl_keyfile=config.ssl_keyfile,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=round(config.drain_timeout_s),
            h11_max_incomplete_event_size=config.max_header_bytes,
            server_header=False,
            lifespan="off",
        ),
        state,
    )
    scheme = "https" if config.ssl_certfile else "http"
    announce = asyncio.create_task(_announce(server, f"{scheme}://{config.host}:{config.port}"))
    try:
        await server.serve()
    finally:
        announce.cancel()


async def _announce(server: uvicorn.Server, url: str) -> None:
    while not server.started:
        await asyncio.sleep(0.01)
    print(f"pagoda {version('pagoda-llm')} ready at {url}  (docs at {url}/docs)", file=sys.stderr, flush=True)


def _log_plainly(name: str, stream: "object") -> None:
    """A logger whose lines are nothing but their message."""
    logger = logging.getLogger(name)
    handler = logging.StreamHandler(stream)  # type: ignore[type-var]
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
