"""Fields of OpenAI's and vLLM's APIs that are known but not supported.

Clients send many of them with a neutral value, which is accepted. Any other value is rejected with an explanation.
"""

from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta, Struct

from pagoda.base.errors import RequestError

Unserved = Annotated[Any, Meta(description="Not served: only a neutral value", extra_json_schema={"enum": [None]})]


class UnservedFields(Struct, kw_only=True, frozen=True):
    """Declared so that `check_unserved` sees their values; each has an entry in UNSERVED."""

    audio: Unserved = None
    ec_transfer_params: Unserved = None
    function_call: Unserved = None
    functions: Unserved = None
    guided_decoding_backend: Unserved = None
    kv_transfer_params: Unserved = None
    logits_processors: Unserved = None
    logprob_token_ids: Unserved = None
    media_io_kwargs: Unserved = None
    mm_processor_kwargs: Unserved = None
    modalities: Unserved = None
    moderation: Unserved = None
    prediction: Unserved = None
    repetition_detection: Unserved = None
    return_mm_kwargs: Unserved = None
    return_prompt_text: Unserved = None
    return_token_offsets: Unserved = None
    routed_experts_prompt_start: Unserved = None
    stream_interval: Unserved = None
    suffix: Unserved = None
    thinking_token_budget: Unserved = None
    truncation_side: Unserved = None
    verbosity: Unserved = None
    vllm_xargs: Unserved = None
    watermarking: Unserved = None
    web_search_options: Unserved = None


@dataclass(frozen=True, slots=True)
class UnservedField:
    """what: completes "this server does not support ...".   neutral: accepted values, in addition to NEUTRAL."""

    what: str
    neutral: tuple[Any, ...] = ()


NEUTRAL: tuple[Any, ...] = (None, False, [], "")
_TRANSFER = "disaggregated serving"
_MEDIA = "media in messages"

UNSERVED = {
    "audio": UnservedField("audio output"),
    "ec_transfer_params": UnservedField(_TRANSFER, ({},)),
    "function_call": UnservedField("the deprecated `function_call`; use `tool_choice`", ("none",)),
    "functions": UnservedField("the deprecated `functions`; use `tools`"),
    "guided_decoding_backend": UnservedField("grammar libraries other than llguidance", ("auto", "guidance")),
    "kv_transfer_params": UnservedField(_TRANSFER, ({},)),
    "logits_processors": UnservedField("logits processors of callers"),
    "logprob_token_ids": UnservedField("log-probabilities of chosen tokens; use `logprobs`"),
    "media_io_kwargs": UnservedField(_MEDIA, ({},)),
    "mm_processor_kwargs": UnservedField(_MEDIA, ({},)),
    "modalities": UnservedField("modalities other than text", (["text"], "text")),
    "moderation": UnservedField("moderation"),
    "prediction": UnservedField("predicted outputs"),
    "repetition_detection": UnservedField("repetition detection"),
    "return_mm_kwargs": UnservedField(_MEDIA, (True,)),
    "return_prompt_text": UnservedField("`return_prompt_text`; use `return_token_ids` and /detokenize"),
    "return_token_offsets": UnservedField("token offsets"),
    "routed_experts_prompt_start": UnservedField("reports of routed experts", (0,)),
    "stream_interval": UnservedField("`stream_interval`: every chunk is sent at once", (1,)),
    "suffix": UnservedField("`suffix` (fill in the middle)"),
    "thinking_token_budget": UnservedField("a budget for reasoning", (-1,)),
    "truncation_side": UnservedField("truncating prompts at their end", ("left",)),
    "verbosity": UnservedField("`verbosity`", ("medium",)),
    "vllm_xargs": UnservedField("`vllm_xargs`", ({},)),
    "watermarking": UnservedField("watermarks"),
    "web_search_options": UnservedField("web search"),
}


# Declared by CompletionRequest: Struct classes with fields cannot be combined.
CHAT_ONLY = {
    "add_generation_prompt": UnservedField("`add_generation_prompt`", (True,)),
    "chat_template": UnservedField("`chat_template`"),
    "chat_template_kwargs": UnservedField("`chat_template_kwargs`", ({},)),
    "continue_final_message": UnservedField("`continue_final_message`"),
    "documents": UnservedField("`documents`"),
    "include_reasoning": UnservedField("`include_reasoning`", (True,)),
    "messages": UnservedField("`messages`"),
    "metadata": UnservedField("`metadata`", ({},)),
    "parallel_tool_calls": UnservedField("`parallel_tool_calls`", (True,)),
    "reasoning_effort": UnservedField("`reasoning_effort`", ("none",)),
    "service_tier": UnservedField("`service_tier`", ("auto", "default")),
    "store": UnservedField("`store`"),
    "tool_choice": UnservedField("`tool_choice`", ("none", "auto")),
    "tools": UnservedField("`tools`"),
    "top_logprobs": UnservedField("`top_logprobs`; use `logprobs`"),
}


# Declared by ChatCompletionRequest, for the same reason.
TEXT_ONLY = {"best_of": UnservedField("`best_of` (use `n`)", (1,)), "prompt_embeds": UnservedField("`prompt_embeds`")}


def check_unserved(body: UnservedFields) -> None:
    """Raise RequestError for the first field that has a value other than a neutral one."""
    _check(body, UNSERVED, "")


def check_chat_only(body: Struct) -> None:
    """Like `check_unserved`, for a text completion's fields of chats."""
    _check(body, CHAT_ONLY, " with a text completion; it belongs to /v1/chat/completions")


def check_text_only(body: Struct) -> None:
    """Like `check_unserved`, for a chat completion's fields of text completions."""
    _check(body, TEXT_ONLY, " with a chat completion; it belongs to /v1/completions")


def _check(body: Struct, fields: dict[str, UnservedField], where: str) -> None:
    for name, field in fields.items():
        value = getattr(body, name)
        if value is None or value in NEUTRAL or value in field.neutral:
            continue
        raise RequestError(f"{name}: this server does not support {field.what}{where}", name)
