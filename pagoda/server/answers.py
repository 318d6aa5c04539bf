"""The shapes of answers, for the OpenAPI page. Routes build them as plain dicts: a stream has no time for more."""

from typing import Any, Literal

from pydantic import BaseModel


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int] | None = None


class CompletionChoice(BaseModel):
    index: int
    text: str
    finish_reason: str | None
    stop_reason: int | str | None = None
    logprobs: dict[str, Any] | None = None
    prompt_logprobs: list[Any] | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionResponse(BaseModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class ChatChoice(BaseModel):
    index: int
    message: dict[str, Any]
    finish_reason: str | None
    stop_reason: int | str | None = None
    logprobs: dict[str, Any] | None = None
    token_ids: list[int] | None = None


class ChatCompletionResponse(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[Any] | None = None
    prompt_token_ids: list[int] | None = None


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: int | str | None = None


class ErrorResponse(BaseModel):
    error: ErrorDetail


_ERRORS = {
    400: "The request is not valid; `param` names the field",
    401: "The API key is missing or wrong",
    403: "The admin key is needed",
    404: "No such model",
    413: "The body is too large",
    429: "The server, or this key's share of it, is full; Retry-After says when to come again",
    500: "The engine failed on this request",
    501: "Not available yet",
    503: "The engine is gone or the server is shutting down",
}
Responses = dict[int | str, dict[str, Any]]
ERRORS: Responses = {code: {"model": ErrorResponse, "description": text} for code, text in _ERRORS.items()}


def described(chunk: str) -> Responses:
    """The responses of a route that may stream.   chunk: the `object` of a stream's events."""
    text = f"With `stream`: server-sent events, each `data: ` and a JSON object `{chunk}`; the last is `data: [DONE]`"
    stream = {"schema": {"type": "string", "description": text}}
    return {200: {"content": {"text/event-stream": stream}, "description": "The answer, whole or streamed"}, **ERRORS}
