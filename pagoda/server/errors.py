"""Error responses, in the format of the API that was called; OpenAI's, if that has none of its own."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagoda.base.abbreviate import shorten
from pagoda.base.errors import CapacityError, PagodaError, RequestError, WorkerDied
from pagoda.server.admission import Refusal

if TYPE_CHECKING:
    from pagoda.server.request_state import RequestState

_encode = msgspec.json.Encoder().encode

# A character takes up to six bytes of JSON ("\\u0000").
MAX_MESSAGE_CHARACTERS = 500
MAX_PARAM_CHARACTERS = 100

CLIENT_CLOSED = 499
"""The status of a request whose client has left, for the log and the metrics."""
RETRY_AFTER_S = 5
"""Retry-After: by then, this server may have been restarted, or a load balancer has switched to another."""
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class ErrorDetail(Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: int | str | None


class ErrorResponse(Struct, frozen=True):
    error: ErrorDetail


class ApiError(PagodaError):
    """An error response raised by a route."""

    def __init__(self, status: int, message: str, param: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class ClientGone(Exception):
    """The client closed its connection before the response. Only the access log shows it, as status 499."""


def error_type(status: int) -> str:
    """Return what OpenAI's API calls errors of a status."""
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "internal_server_error")


ErrorForm = Callable[[ApiError, str], msgspec.Struct]
"""Makes the body of an API's errors, of an error and the request's id."""


def error_body(error: ApiError, request_id: str) -> ErrorResponse:
    """Return an error in OpenAI's format."""
    return ErrorResponse(ErrorDetail(error.message, error_type(error.status), error.param, error.status))


class ErrorAnswer(Response):
    """An error in the format of the API that was called, whose message the access log shows, too."""

    media_type = "application/json"

    def __init__(self, error: ApiError, headers: dict[str, str]) -> None:
        super().__init__(b"", error.status, headers)
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state: RequestState = scope["state"]
        state.error = self._error.message
        self.body = _encode(state.error_form(shortened(self._error), state.request_id))
        self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def shortened(error: ApiError) -> ApiError:
    """Return an error that stays below 4 kB even if its message quotes the request."""
    param = error.param if error.param is None else shorten(error.param, MAX_PARAM_CHARACTERS)
    return ApiError(error.status, shorten(error.message, MAX_MESSAGE_CHARACTERS), param, error.retry_after_s)


def error_response(status: int, message: str, param: str | None = None, retry_after_s: int | None = None) -> Response:
    headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    return ErrorAnswer(ApiError(status, message, param), headers)


def as_api_error(error: Exception) -> ApiError:
    """Return the error response for an exception raised in a route."""
    match error:
        case ApiError():
            return error
        case ClientGone():
            return ApiError(CLIENT_CLOSED, "the client closed its connection")
        case Refusal():
            return ApiError(429, str(error), retry_after_s=error.retry_after_s)
        case RequestError():
            return ApiError(400, str(error), error.param)
        case CapacityError():
            return ApiError(400, str(error))
        case WorkerDied():
            return ApiError(503, str(error), retry_after_s=RETRY_AFTER_S)
        case _:
            return ApiError(500, f"internal error: {type(error).__name__}")


async def on_http_error(request: Request, error: HTTPException) -> Response:
    """Return the response for an HTTPException of the web framework or of a layer that limits bodies."""
    response = error_response(error.status_code, _in_words(request, error))
    for name, value in (error.headers or {}).items():
        response.headers[name] = value
    return response


def _in_words(request: Request, error: HTTPException) -> str:
    """Return a message: for unknown paths and methods, the framework's own only repeats the status line."""
    path = request.scope["path"]
    if error.status_code == 404:
        return f"there is no route {request.method} {path[:100]}; {_instead(request, path)}/docs lists them all"
    path = path[:100]
    if error.status_code == 405:
        allowed = ", ".join(sorted((error.headers or {}).get("Allow", "other methods").split(", ")))  # of a set
        if path in (route.path for route in request.app.routes):
            return f"{request.method} is not allowed on {path}; use {allowed}"
        # The last part was taken for an id, which it may not be: /v1/responses/compact.
        return f"there is no route {request.method} {path}, only {allowed}; /docs lists them all"
    return str(error.detail)


_ELSEWHERE = {
    "/v1/chat/completions": ("/api/chat", "/api/generate", "/v1/complete"),
    "/v1/completions": ("/completion", "/generate", "/infill"),
    "/v1/embeddings": ("/api/embed", "/api/embeddings", "/embedding", "/embed", "/v2/embed"),
    "/v1/models": ("/api/tags", "/api/show", "/api/ps", "/props", "/slots", "/info"),
    "/v1/audio/transcriptions": ("/inference",),
    "/version": ("/api/version",),
    "/v1/batches": ("/v1/messages/batches",),
    "/v1/files": ("/v1/uploads",),
    "`pagoda serve MODEL` with --chat-template and --override-generation-config": ("/api/create",),
}
"""What serves it here -> routes of other APIs and servers."""


def _instead(request: Request, path: str) -> str:
    """Return a hint at the route that answers what an unknown path asks for, or ""."""
    for known, others in _ELSEWHERE.items():
        if path in others:
            is_ollama = path.startswith("/api/") and known.startswith("/")
            return f"use {known}{', or start the server with --ollama' if is_ollama else ''}; "
    routes: list[str] = [route.path for route in request.app.routes]
    found = (
        f"/v1{path}"
        if f"/v1{path}" in routes
        else next((one for one in routes if one != "/" and path.endswith(one)), None)
    )
    return f"use {found}; " if found is not None else ""


async def on_known(request: Request, error: Exception) -> Response:
    """Return the response for an exception raised in a route."""
    if isinstance(error, Refusal):
        request.app.state.server.models.of(request.scope["state"].model).starter.metrics.on_refusal(error.reason)
    known = as_api_error(error)
    return error_response(known.status, known.message, known.param, known.retry_after_s)


HANDLERS: dict[Any, Any] = {
    HTTPException: on_http_error,
    # Exception: unexpected errors become a 500 in the same format; starlette logs their traceback.
    **dict.fromkeys((ApiError, ClientGone, Refusal, RequestError, CapacityError, WorkerDied, Exception), on_known),
}
"""Give every error of every route the format of its API."""
