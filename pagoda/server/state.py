"""What all routes share, kept on the app and never global."""

import time
import uuid
from dataclasses import dataclass, field

from fastapi import Request

from pagoda.base.abbreviate import abbreviate
from pagoda.base.request_limits import RequestLimits
from pagoda.engine.process_client import ProcessClient
from pagoda.server.draining import Drain
from pagoda.server.errors import ApiError
from pagoda.server.generation import Generator
from pagoda.server.tool_parsers import parser_for_template


@dataclass(slots=True)
class ServerState:
    """model_names: the first is the one we answer with.   chat_template: the model's own.

    tool_template: the one it uses with tools.   tool_parser: a name in TOOL_PARSERS, "none", or "auto".
    trusts_templates: callers may send chat templates of their own.   request_limits: what one body may hold.
    """

    generator: Generator
    model_names: tuple[str, ...]
    max_model_len: int
    chat_template: str | None
    tool_template: str | None
    tool_parser: str
    trusts_templates: bool = False
    has_admin_key: bool = False
    request_limits: RequestLimits = field(default_factory=RequestLimits)
    engine: ProcessClient | None = None
    drain: Drain = field(default_factory=Drain)
    started_at: int = field(default_factory=lambda: int(time.time()))

    def check_model(self, name: str | None) -> None:
        """404 for a model we do not serve."""
        if name is not None and name not in self.model_names:
            known = ", ".join(self.model_names)
            raise ApiError(404, f"no model {abbreviate(name)} here; this server has {known}", "model")

    def check_admin(self, http: Request) -> None:
        """403 for a caller without the admin key, where the server has one."""
        if self.has_admin_key and not http.scope["state"]["is_admin"]:
            raise ApiError(403, "this operates the server for all its users: send the admin key (--admin-api-key)")

    def check_template(self, template: str | None) -> None:
        """400 for a template of the caller's where those are not trusted: the sandbox cannot keep one from looping."""
        if template is not None and not self.trusts_templates:
            hint = "start the server with --trust-request-chat-template to render those of callers"
            raise ApiError(400, f"chat_template: only the model's own is rendered here; {hint}", "chat_template")

    def tool_parser_for(self, template: str | None) -> str | None:
        """The parser of what a model says under this template; None: its text is all there is."""
        if self.tool_parser == "auto":
            return parser_for_template(template)
        return None if self.tool_parser == "none" else self.tool_parser

    def request_id(self, http: Request, asked: str | None, prefix: str) -> str:
        """The id of this request and its answer: the one the body asks for, else the one in the access log.

        Several requests may carry the same X-Request-Id header: while one runs, others get a suffix.
        """
        if asked is not None:
            return f"{prefix}-{asked}"
        request_id = f"{prefix}-{http.scope['state']['request_id']}"
        is_live = self.generator.is_live(http.scope["state"]["key"], request_id)
        return f"{request_id}-{uuid.uuid4().hex[:8]}" if is_live else request_id


def state_of(http: Request) -> ServerState:
    return http.app.state.server  # type: ignore[no-any-return]
