"""Every JSON answer of the server, as a struct. Routes send these structs, and the OpenAPI page describes them.

A field whose default is UNSET is left out of the answer until it is set; the order of fields is the order on the wire.
"""

from collections.abc import Mapping
from typing import Any, Literal, cast

import msgspec
from msgspec import UNSET, Struct, UnsetType


class ErrorDetail(Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: int | str | None


class ErrorResponse(Struct, frozen=True):
    error: ErrorDetail


# ---- generated text


class PromptTokensDetails(Struct, frozen=True):
    cached_tokens: int


class Usage(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Timings(Struct):
    """Token counts and durations of a request; durations are missing until they are known."""

    id: str
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    preemptions: int | UnsetType = UNSET
    draft_tokens: int | UnsetType = UNSET
    accepted_draft_tokens: int | UnsetType = UNSET
    queue_ms: float | UnsetType = UNSET
    prefill_ms: float | UnsetType = UNSET
    decode_ms: float | UnsetType = UNSET


class PromptLogprob(Struct, frozen=True):
    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""Per prompt token: token id -> its log-probability; None for the first token."""


class CompletionLogprobs(Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionResponse(Struct, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    timings: Timings | UnsetType = UNSET


class CompletionChunk(Struct, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET


class TopLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    content: list[ChatLogprob]
    refusal: None = None


class FunctionCall(Struct, frozen=True):
    name: str
    arguments: str


class MessageToolCall(Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class DeltaToolCall(Struct, frozen=True, kw_only=True):
    index: int
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class AssistantMessage(Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[MessageToolCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class ChatChoice(Struct):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionResponse(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET


class ChatDelta(Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[DeltaToolCall] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET


# ---- tokens


class TokenizeResponse(Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class DetokenizeResponse(Struct, frozen=True):
    prompt: str


class TokenizerInfo(Struct, frozen=True, kw_only=True):
    """The tokenizer's settings. A tokenizer may have further fields NAME_token, with the text of a special token."""

    tokenizer_class: str
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: list[int]
    special_token_ids: list[int]
    max_model_len: int
    chat_template: str | None

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "TokenizerInfo":
        """Return the settings as a struct, which has a field for every special token."""
        more = [(name, str) for name in settings if name not in cls.__struct_fields__]
        kind = msgspec.defstruct(cls.__name__, more, bases=(cls,), frozen=True, kw_only=True)
        return cast("TokenizerInfo", kind(**settings))


# ---- operations


class VersionResponse(Struct, frozen=True):
    version: str


class LoadResponse(Struct, frozen=True):
    server_load: int
    live_tokens: int
    running: int
    waiting: int
    swapped: int
    kv_cache_usage: float
    free_blocks: int
    engine_restarts: int


class ModelCard(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class AbortResponse(Struct, frozen=True):
    aborted: list[str]


# ---- the OpenAPI page

ANSWERS: tuple[type[Struct], ...] = (
    ErrorResponse,
    CompletionResponse,
    CompletionChunk,
    ChatCompletionResponse,
    ChatCompletionChunk,
    TokenizeResponse,
    DetokenizeResponse,
    TokenizerInfo,
    VersionResponse,
    LoadResponse,
    ModelCard,
    ModelList,
    AbortResponse,
)
"""The answers that are not part of another one."""

_ERRORS = {
    400: "The request is not valid; `param` names the field",
    401: "The API key is missing or wrong",
    403: "The admin key is needed",
    404: "No such model",
    413: "The body is too large",
    429: "The server, or this key's share of it, is full; Retry-After says when to come again",
    500: "The engine failed on this request",
    503: "The engine is gone or the server is shutting down",
}
Responses = dict[int | str, dict[str, Any]]


def _json_content(kind: type[Struct]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}


ERRORS: Responses = {
    code: {"content": _json_content(ErrorResponse), "description": text} for code, text in _ERRORS.items()
}


CONFLICT: dict[str, Any] = {"content": _json_content(ErrorResponse), "description": "The state does not allow it now"}


def answers_with(kind: type[Struct], chunk: type[Struct] | None = None) -> Responses:
    """Return the responses of a route for its OpenAPI description.   chunk: an event of its stream, if it has one."""
    content = _json_content(kind)
    if chunk is None:
        return {200: {"content": content, "description": "The answer"}, **ERRORS}
    text = (
        f"With `stream`: server-sent events, each `data: ` and a {chunk.__name__} as JSON; the last is `data: [DONE]`. "
        "An error during the stream is an event with an ErrorResponse."
    )
    content["text/event-stream"] = {"schema": {"type": "string", "description": text}}
    return {200: {"content": content, "description": "The answer, whole or streamed"}, **ERRORS}
