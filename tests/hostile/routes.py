"""The routes that read JSON: a request each accepts, and every place in it where something else can stand."""

import itertools
from dataclasses import dataclass
from typing import Any

Path = tuple[str | int, ...]

_SAMPLING = (
    *("model", "frequency_penalty", "logit_bias", "n", "presence_penalty", "seed", "stop", "stream", "stream_options"),
    *("temperature", "top_p", "user", "top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids"),
    *("ignore_eos", "include_stop_str_in_output", "bad_words", "allowed_token_ids", "prompt_logprobs", "detokenize"),
    *("skip_special_tokens", "spaces_between_special_tokens", "truncate_prompt_tokens", "priority", "cache_salt"),
    *("request_id", "return_token_ids", "response_format", "structured_outputs", "return_timings", "max_tokens"),
    *("max_completion_tokens", "logprobs", "echo", "suffix", "best_of", "use_beam_search", "length_penalty"),
    *("add_special_tokens", "return_tokens_as_token_ids", "kv_transfer_params", "guided_json", "vllm_xargs"),
    *(
        "stop.0",
        "bad_words.0",
        "stop_token_ids.0",
        "allowed_token_ids.0",
        "logit_bias.5",
        "stream_options.include_usage",
    ),
    *("stream_options.continuous_usage_stats", "response_format.type", "response_format.json_schema", "no_such_field"),
)
_POOLING = (
    *("model", "user", "truncate_prompt_tokens", "priority", "cache_salt", "request_id", "add_special_tokens"),
    "no_such_field",
)
_CHAT = (
    *("messages", "messages.0", "messages.0.role", "messages.0.content", "messages.0.content.0", "messages.0.name"),
    *("messages.0.content.0.text", "messages.0.content.0.type", "messages.0.tool_calls", "messages.0.tool_call_id"),
    *("messages.0.tool_calls.0", "messages.0.tool_calls.0.function", "messages.0.tool_calls.0.function.arguments"),
    *("messages.0.tool_calls.0.id", "messages.0.reasoning_content", "messages.0.anything", "messages.1"),
    *("tools", "tools.0", "tools.0.type", "tools.0.function", "tools.0.function.name", "tools.0.function.description"),
    *("tools.0.function.parameters", "tools.0.function.strict", "tool_choice", "tool_choice.function"),
    *("tool_choice.function.name", "parallel_tool_calls", "chat_template", "chat_template_kwargs"),
    *("chat_template_kwargs.enable_thinking", "chat_template_kwargs.messages", "add_generation_prompt"),
    *("continue_final_message", "documents"),
)
_CHAT_ONLY = (
    *("top_logprobs", "include_reasoning", "metadata", "metadata.a", "store", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "reasoning_effort", "verbosity", "modalities", "audio", "functions", "function_call"),
    *("prediction", "web_search_options", "moderation"),
)


_INPUT = ("input", "input.0", "input.0.0", "messages", *_POOLING)
_CONVERSATION = ("input", "dimensions", "truncate_prompt_tokens", *_CHAT)
_PAIR = ("use_activation", "instruction", "chat_template", *_POOLING)


@dataclass(frozen=True, slots=True)
class Route:
    """body: accepted as it is, and cheap.   places: where its values, or values it could have, stand."""

    path: str
    body: dict[str, Any]
    places: tuple[str, ...]


_CHAT_BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "seed": 1}

ROUTES: tuple[Route, ...] = (
    Route("/v1/chat/completions", _CHAT_BODY, (*_CHAT, *_CHAT_ONLY, *_SAMPLING)),
    Route(
        "/v1/completions",
        {"prompt": "Hi", "max_tokens": 3, "seed": 1},
        ("prompt", "prompt.0", "prompt.0.0", "prompt.prompt_token_ids", "prompt_embeds", "prompt_embeds.0", *_SAMPLING),
    ),
    Route(
        "/tokenize",
        {"prompt": "Hi"},
        ("prompt", "prompt.0", "model", "add_special_tokens", "return_token_strs", "no_such_field", *_CHAT),
    ),
    Route(
        "/detokenize", {"tokens": [1, 2, 3]}, ("tokens", "tokens.0", "model", "skip_special_tokens", "no_such_field")
    ),
    Route(
        "/v1/embeddings",
        {"input": "Hi"},
        ("encoding_format", "dimensions", "normalize", "prompt_name", *_INPUT),
    ),
    Route("/v1/embeddings", {"messages": [{"role": "user", "content": "Hi"}]}, _CONVERSATION),
    Route(
        "/pooling",
        {"input": "Hi"},
        ("task", "encoding_format", "dimensions", "normalize", "use_activation", *_INPUT),
    ),
    Route("/pooling", {"input": "Hi", "task": "token_embed"}, ("task", "dimensions", "normalize", *_POOLING)),
    Route("/classify", {"input": "Hi"}, ("use_activation", *_INPUT)),
    Route(
        "/v1/score",
        {"text_1": "Hi", "text_2": ["a", "b"]},
        ("text_1", "text_1.0", "text_2", "text_2.0", "queries", "documents", "data_1", "data_2", *_PAIR),
    ),
    Route(
        "/v1/rerank",
        {"query": "Hi", "documents": ["a", {"text": "b"}]},
        ("query", "documents", "documents.0", "documents.1.text", "top_n", "return_documents", *_PAIR),
    ),
    Route("/abort_requests", {"request_ids": ["a"]}, ("request_ids", "request_ids.0", "no_such_field")),
    Route("/reset_prefix_cache", {}, ("reset_running_requests",)),
    Route(
        "/v1/load_lora_adapter",
        {"lora_name": "x", "lora_path": "x"},
        ("lora_name", "lora_path", "load_inplace", "base_model_name", "no_such_field"),
    ),
    Route("/v1/unload_lora_adapter", {"lora_name": "x"}, ("lora_name", "lora_int_id", "no_such_field")),
)

# Sent with the admin key, without which these read no body.
ADMIN_PATHS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")

# Routes of features still to come: whatever they are sent, it is 501, or what any route says of a bad body.
PLANNED: tuple[Route, ...] = tuple(
    Route(path, {"model": "smollm2-135m", "input": "Hi"}, ("model", "input", "messages", "no_such_field"))
    for path in (
        *("/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/v1/files", "/v1/batches"),
        *("/v1/audio/transcriptions", "/v1/audio/translations"),
    )
)

READ_ONLY = (
    *("/v1/models", "/v1/models/smollm2-135m", "/health", "/ping", "/version", "/load", "/metrics", "/tokenizer_info"),
    *("/docs", "/openapi.json", "/dashboard", "/trace"),
)


def put(body: dict[str, Any], place: str, value: Any) -> dict[str, Any]:
    """A copy of `body` with `value` at `place` ("messages.0.content"), making what is missing on the way."""
    copy = _copied(body)
    parts: list[str | int] = [int(part) if part.isdigit() else part for part in place.split(".")]
    if parts[0] == "logit_bias":
        parts = [str(part) for part in parts]
    here: Any = copy
    for part, following in itertools.pairwise(parts):
        inner = _get(here, part)
        wanted = list if isinstance(following, int) else dict
        if not isinstance(inner, wanted):
            inner = wanted()
            _set(here, part, inner)
        here = inner
    _set(here, parts[-1], value)
    return copy


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _copied(one) for name, one in value.items()}
    return [_copied(one) for one in value] if isinstance(value, list) else value


def _get(here: Any, part: str | int) -> Any:
    if isinstance(here, dict):
        return here.get(part)
    return here[part] if isinstance(part, int) and part < len(here) else None


def _set(here: Any, part: str | int, value: Any) -> None:
    if isinstance(here, list):
        assert isinstance(part, int)
        here += [0] * (part + 1 - len(here))
    here[part] = value
