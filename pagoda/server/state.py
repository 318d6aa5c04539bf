"""The state that all routes share, kept in app.state."""

import time
import uuid
from dataclasses import dataclass, field

from fastapi import Request

from pagoda.base.abbreviate import abbreviate, shorten
from pagoda.base.pooling import ModelTasks
from pagoda.base.request_limits import RequestLimits
from pagoda.engine.clients.process_client import ProcessClient
from pagoda.engine.inputs.adapters import Adapter
from pagoda.server.draining import Drain
from pagoda.server.errors import ApiError
from pagoda.server.generation import Generator
from pagoda.server.served_adapters import ServedAdapters
from pagoda.server.tool_parsers import parser_for_template


@dataclass(slots=True)
class ServerState:
    """The state that all routes share.

    adapters: LoRA adapters by name.
    model_names: the first is the default in responses.   chat_template: the model's own.
    tool_template: the model's template for requests with tools.   tool_parser: a name in TOOL_PARSERS, "none", "auto".
    trusts_templates: callers may send their own chat templates.   request_limits: bounds of one body's content.
    """

    generator: Generator
    adapters: ServedAdapters
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

    @property
    def tasks(self) -> ModelTasks:
        """What the model can be asked for."""
        return self.generator.llm.input_processor.limits.tasks

    def adapter_of(self, name: str | None) -> Adapter | None:
        """Return the adapter that requests for this model use, or None for the model itself.

        Raises ApiError (404) for a model that is not served.
        """
        if name is None or name in self.model_names:
            return None
        served = self.adapters.by_name.get(name)
        if served is None:
            known = ", ".join((*self.model_names, *self.adapters.by_name))
            raise ApiError(404, f"unknown model {abbreviate(name)}; this server has {shorten(known)}", "model")
        return served.lora

    def check_admin(self, http: Request) -> None:
        """Raise ApiError (403) if the server has an admin key and the caller did not send it."""
        if self.has_admin_key and not http.scope["state"]["is_admin"]:
            raise ApiError(403, "this affects all users of the server: use the admin key (--admin-api-key)")

    def check_template(self, template: str | None) -> None:
        """Raise ApiError (400) for a caller's template if those are not trusted: the sandbox does not prevent loops."""
        if template is not None and not self.trusts_templates:
            hint = "start the server with --trust-request-chat-template to allow templates in requests"
            raise ApiError(400, f"chat_template: this server only uses the model's own; {hint}", "chat_template")

    def tool_parser_for(self, template: str | None) -> str | None:
        """Return the name of the parser for the output of this template, or None for plain text."""
        if self.tool_parser == "auto":
            return parser_for_template(template)
        return None if self.tool_parser == "none" else self.tool_parser

    def request_id(self, http: Request, asked: str | None, prefix: str, num_prompts: int) -> str:
        """Return the id of this request and its response: from the body, or else the access log's.

        Several requests may have the same X-Request-Id header: while one is running, others get a suffix.
        """
        if asked is not None:
            return f"{prefix}-{asked}"
        request_id = f"{prefix}-{http.scope['state']['request_id']}"
        is_free = self.generator.is_free(http.scope["state"]["key"], request_id, num_prompts)
        return request_id if is_free else f"{request_id}-{uuid.uuid4().hex[:8]}"


def state_of(http: Request) -> ServerState:
    return http.app.state.server  # type: ignore[no-any-return]
