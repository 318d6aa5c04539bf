"""Every JSON answer of the server, as a struct. Routes send these structs, and the OpenAPI page describes them.

A field whose default is UNSET is left out of the answer until it is set; the order of fields is the order on the wire.
"""

from collections.abc import Callable, Sequence
from typing import Generic, Literal, TypeVar

from msgspec import UNSET, Struct, UnsetType

from pagoda.base.outputs import Logprob


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


class CompletionTokensDetails(Struct, frozen=True):
    """reasoning_tokens: up to the end of the reasoning, its tags included."""

    reasoning_tokens: int


class Usage(Struct, frozen=True):
    """completion_tokens_details: of models whose chat template has reasoning."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


class RequestFigures(Struct):
    """Token counts and durations of a request; durations are missing until they are known.

    missed_tokens: of the prompt, not found in the prefix cache.
    lost_tokens, preempted_ms: what preemptions cost: tokens to compute again, and the wait to run again.
    scheduler_ms: that the scheduler took for the steps of all requests while this one waited or ran.
    """

    id: str
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    missed_tokens: int | UnsetType = UNSET
    preemptions: int | UnsetType = UNSET
    lost_tokens: int | UnsetType = UNSET
    preempted_ms: float | UnsetType = UNSET
    draft_tokens: int | UnsetType = UNSET
    accepted_draft_tokens: int | UnsetType = UNSET
    queue_ms: float | UnsetType = UNSET
    prefill_ms: float | UnsetType = UNSET
    decode_ms: float | UnsetType = UNSET
    scheduler_ms: float | UnsetType = UNSET


class Timings(RequestFigures, kw_only=True):
    """What `return_timings` returns: llama.cpp's fields of this name, and those of RequestFigures.

    cache_n, prompt_n: tokens of the prompt that were found in the prefix cache, and those that were not.
    queue_reasons: what it waited for before its first step -> milliseconds.
    received: seconds since the epoch.   predicted_n: generated tokens, of all outputs.
    draft_n, draft_n_accepted: only with speculative decoding.
    """

    received: float
    queue_reasons: dict[str, float]
    cache_n: int
    prompt_n: int
    prompt_ms: float | UnsetType = UNSET
    prompt_per_token_ms: float | UnsetType = UNSET
    prompt_per_second: float | UnsetType = UNSET
    predicted_n: int
    predicted_ms: float | UnsetType = UNSET
    predicted_per_token_ms: float | UnsetType = UNSET
    predicted_per_second: float | UnsetType = UNSET
    draft_n: int | UnsetType = UNSET
    draft_n_accepted: int | UnsetType = UNSET


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
    prompt_logprobs: PromptLogprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionResponse(Struct, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    service_tier: None = None
    system_fingerprint: None = None
    timings: Timings | UnsetType = UNSET


class CompletionChunk(Struct, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
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
    arguments: str
    name: str | UnsetType = UNSET


class MessageToolCall(Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class DeltaToolCall(Struct, frozen=True, kw_only=True):
    """A piece of a call; the first one has id, type and name, and the arguments of all make the call's."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionCall


class AssistantMessage(Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: list[MessageToolCall] | UnsetType = UNSET
    reasoning: str | None = None
    reasoning_content: str | None = None


class ChatChoice(Struct):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class ChatCompletionResponse(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: None = None
    system_fingerprint: None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    timings: Timings | UnsetType = UNSET


class ChatDelta(Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
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
    prompt_token_ids: list[int] | UnsetType = UNSET
    usage: Usage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET


# ---- tokens


class TokenizeResponse(Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


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


# ---- pooled prompts


class PoolingUsage(Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


D = TypeVar("D")


class PooledList(Struct, Generic[D], kw_only=True):
    """An answer with an entry for each input, or for each pair of texts."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[D]
    usage: PoolingUsage


class EmbeddingData(Struct, kw_only=True):
    """embedding: numbers, or with encoding_format base64, the bytes of little-endian float32."""

    index: int
    object: Literal["embedding"] = "embedding"
    embedding: list[float] | str


class EmbeddingResponse(PooledList[EmbeddingData], kw_only=True):
    pass


class PoolingData(Struct, kw_only=True):
    """data: numbers, one list of them per token, or the bytes of either as base64 of little-endian float32."""

    index: int
    object: Literal["pooling"] = "pooling"
    data: list[float | list[float]] | str


class PoolingResponse(PooledList[PoolingData], kw_only=True):
    pass


class ClassificationData(Struct, kw_only=True):
    """label: of the largest of `probs`."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassificationResponse(PooledList[ClassificationData], kw_only=True):
    pass


class ScoreData(Struct, kw_only=True):
    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreResponse(PooledList[ScoreData], kw_only=True):
    pass


class RankedDocument(Struct, frozen=True):
    text: str


class RerankResult(Struct, kw_only=True):
    """index: of the document in the request."""

    index: int
    document: RankedDocument | UnsetType = UNSET
    relevance_score: float


class RerankResponse(Struct, kw_only=True):
    """results: the most relevant document first."""

    id: str
    model: str
    usage: PoolingUsage
    results: list[RerankResult]


LogprobDicts = Sequence[dict[int, Logprob] | None]


def completion_logprobs(
    token_ids: Sequence[int],
    logprobs: LogprobDicts,
    num_top: int,
    offset: int,
    text_of: Callable[[int], str],
    as_ids: bool = False,
) -> tuple[CompletionLogprobs, int]:
    """Return the `logprobs` object of a text completion, and the text offset after it.

    offset: of the first token's text.   text_of: returns the text of a token without an entry (a prompt's first one).
    as_ids: write tokens as "token_id:ID"; offsets are still those of their texts.
    `top_logprobs` has each token itself, first, and then the most likely ones.
    """
    tokens: list[str] = []
    chosen: list[float | None] = []
    top: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for token_id, entry in zip(token_ids, logprobs, strict=False):
        text = _text(token_id, entry) if entry is not None else text_of(token_id)
        tokens.append(_id_text(token_id) if as_ids else text)
        offsets.append(offset)
        offset += len(text)
        if entry is None:
            chosen.append(None)
            top.append(None)
            continue
        own = _finite(entry[token_id].logprob)
        chosen.append(own)
        best = sorted(entry.items(), key=lambda item: item[1].rank or 0)[:num_top]
        top.append(
            {_shown(token_id, entry, as_ids): own}
            | {_shown(i, entry, as_ids): _finite(value.logprob) for i, value in best}
        )
    return CompletionLogprobs(tokens, chosen, top, offsets), offset


def chat_logprobs(token_ids: Sequence[int], logprobs: LogprobDicts, num_top: int, as_ids: bool = False) -> ChatLogprobs:
    """Return the `logprobs` object of a chat choice.

    num_top: -1 for all that there are.   as_ids: write tokens as "token_id:ID"; `bytes` is the text.
    """
    content: list[ChatLogprob] = []
    for token_id, entry in zip(token_ids, logprobs, strict=False):
        if entry is None:
            continue
        best = sorted(entry.items(), key=lambda item: item[1].rank or 0)[: None if num_top == -1 else num_top]
        top = [TopLogprob(*_chat_entry(candidate, entry, as_ids)) for candidate, _ in best]
        content.append(ChatLogprob(*_chat_entry(token_id, entry, as_ids), top))
    return ChatLogprobs(content)


def prompt_logprobs(logprobs: LogprobDicts) -> PromptLogprobs:
    """Return, per prompt token, token id -> its log-probability; None for the first."""
    return [
        None
        if entry is None
        else {str(i): PromptLogprob(_finite(v.logprob), v.rank, v.decoded_token) for i, v in entry.items()}
        for entry in logprobs
    ]


def _chat_entry(token_id: int, entry: dict[int, Logprob], as_ids: bool) -> tuple[str, float, list[int]]:
    """Return the token, log-probability and bytes of one candidate."""
    text = _text(token_id, entry)
    return _shown(token_id, entry, as_ids), _finite(entry[token_id].logprob), list(text.encode())


def _text(token_id: int, entry: dict[int, Logprob]) -> str:
    decoded = entry[token_id].decoded_token
    return decoded if decoded is not None else _id_text(token_id)


def _shown(token_id: int, entry: dict[int, Logprob], as_ids: bool) -> str:
    return _id_text(token_id) if as_ids else _text(token_id, entry)


def _id_text(token_id: int) -> str:
    return f"token_id:{token_id}"


def _finite(value: float) -> float:
    """Return the value with -inf replaced by -9999.0, as OpenAI does: JSON has no infinity."""
    return max(value, -9999.0)


# ---- what the server does


class SeenRequest(Struct, kw_only=True):
    """A request that has not ended, or that ended a short while ago.

    state: waiting, running, preempted or ended.   reason: why it waits, in words.
    computed_tokens: tokens of its first output, and of its prompt, that have their KV.   blocks: of the KV cache.
    """

    id: str
    state: str
    reason: str = ""
    prompt_tokens: int
    computed_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    blocks: int = 0
    age_s: float


class OtherRequests(Struct, frozen=True):
    """How many requests there are that the caller may not see."""

    running: int
    waiting: int


class RequestList(Struct, kw_only=True):
    """Requests of the caller, in the order of their arrival, then those that have ended, the last first.

    in_line: HTTP requests of all that wait to be admitted.
    """

    data: list[SeenRequest]
    others: OtherRequests
    in_line: int


class TimelineEntry(Struct, frozen=True):
    """at_ms: after the request's arrival."""

    at_ms: float
    what: str


class PrefixMiss(Struct, kw_only=True):
    """Where a prompt begins to differ from the earlier request, of the caller's, that begins most like it.

    position: of the first token that differs, from 0.   block: which has it, from 0.   like: the other request.
    token_id, token: there, and its text; like_token_id, like_token: those of the other request. Missing where that has
    no token.   what: why no more was cached, in words.
    """

    like: str
    position: int
    block: int
    token_id: int | UnsetType = UNSET
    token: str | UnsetType = UNSET
    like_token_id: int | UnsetType = UNSET
    like_token: str | UnsetType = UNSET
    what: str


class RequestTimeline(SeenRequest, kw_only=True):
    """prefix_miss: missing if all of the prompt was cached, or no earlier request that is known begins as it does."""

    timeline: list[TimelineEntry]
    prefix_miss: PrefixMiss | UnsetType = UNSET
