"""What all routes share, kept on the app and never global."""

import time
import uuid
from dataclasses import dataclass, field

from fastapi import Request

from pagoda.engine.process_client import ProcessClient
from pagoda.server.errors import ApiError
from pagoda.server.generation import Generator


@dataclass(slots=True)
class ServerState:
    """model_names: the first is the one we answer with.   tool_parser: name in TOOL_PARSERS, or None."""

    generator: Generator
    model_names: tuple[str, ...]
    max_model_len: int
    chat_template: str | None
    tool_parser: str | None
    engine: ProcessClient | None = None
    started_at: int = field(default_factory=lambda: int(time.time()))

    def check_model(self, name: str | None) -> None:
        """404 for a model we do not serve."""
        if name is not None and name not in self.model_names:
            raise ApiError(404, f"no model {name!r} here; this server has {', '.join(self.model_names)}", "model")

    def request_id(self, http: Request, asked: str | None, prefix: str) -> str:
        """The engine's id of this request: the body's, the header's, or a new one."""
        given = asked or http.headers.get("x-request-id")
        return f"{prefix}-{given or uuid.uuid4().hex}"


def state_of(http: Request) -> ServerState:
    return http.app.state.server  # type: ignore[no-any-return]
