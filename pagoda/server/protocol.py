"""The HTTP API's request bodies, in OpenAI's format with the engine's sampling parameters as extra fields.

msgspec checks the types of single values while decoding, and stops at the first error (body.py). `check` does what
types cannot: it checks fields against each other, and counts and sizes against RequestLimits. Undeclared fields are
rejected, so that nothing a caller asks for is silently ignored; unserved.py declares the fields of OpenAI and vLLM that
are not supported, to say so. answers.py declares the answers.
"""

import functools
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from pagoda.base.errors import RequestError
from pagoda.base.request_limits import RequestLimits
from pagoda.base.sampling_params import SamplingParams
from pagoda.server.structure import structure_of
from pagoda.server.unserved import Unserved, UnservedFields, check_chat_only, check_unserved

Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Name = Annotated[str, Meta(min_length=1, max_length=64)]
RequestId = Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^[\x21-\x7e]+$")]
TokenCount = Annotated[int, Meta(ge=1, le=2**31 - 1)]
PromptOnlyCount = Annotated[int, Meta(ge=0, le=2**31 - 1)]
NumLogprobs = Annotated[int, Meta(ge=0, le=1000)]

if TYPE_CHECKING:
    Flag = bool
    Priority = int
else:
    # null means the default: Body replaces it, so that readers never see None.
    Flag = bool | None
    Priority = Int32 | None


class Body(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A request body: unknown fields are errors, null is the same as not given."""

    def __post_init__(self) -> None:
        for name, default in _defaults(type(self)):
            if getattr(self, name) is None:
                msgspec.structs.force_setattr(self, name, default)

    def check(self, limits: RequestLimits) -> None:
        """Raise RequestError for fields that contradict each other, and for counts and sizes beyond `limits`."""


@functools.cache
def _defaults(kind: type[Body]) -> tuple[tuple[str, Any], ...]:
    """Return the fields whose default is not None, with that default."""
    fields = ((field.name, field.default) for field in msgspec.structs.fields(kind))
    none = (None, UNSET, msgspec.NODEFAULT)
    return tuple((name, value) for name, value in fields if not any(value is one for one in none))


class StreamOptions(Body, kw_only=True, frozen=True):
    include_usage: Flag = False
    continuous_usage_stats: Flag = False


class ResponseFormat(Body, kw_only=True, frozen=True):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


class SamplingBody(Body, UnservedFields, kw_only=True, frozen=True):
    """The fields common to chat and text completions."""

    model: str | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    presence_penalty: float | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    stream: Flag = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    user: str | None = None
    # the engine's own
    top_k: Int32 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Int32 | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: Flag = False
    include_stop_str_in_output: Flag = False
    bad_words: list[str] | None = None
    allowed_token_ids: list[TokenId] | None = None
    prompt_logprobs: NumLogprobs | None = None
    skip_special_tokens: Flag = True
    spaces_between_special_tokens: Flag = True
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    priority: Priority = 0
    cache_salt: str | None = None
    request_id: RequestId | None = None
    return_token_ids: Flag = False
    return_tokens_as_token_ids: Flag = False
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    return_timings: Flag = False
    # accepted because it does not affect the response
    session_id: str | None = None

    def check(self, limits: RequestLimits) -> None:
        check_unserved(self)
        limits.check_lists(self)
        limits.check_names(model=self.model, user=self.user, session_id=self.session_id, cache_salt=self.cache_salt)
        limits.check_values(
            {
                "response_format": self._schema,
                "structured_outputs": self.structured_outputs,
                "guided_json": self.guided_json,
            }
        )
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options: needs stream to be true", "stream_options")

    @property
    def _schema(self) -> Any:
        given = self.response_format
        return [given.json_schema, given.structures] if given is not None else None

    @property
    def asked_tokens(self) -> tuple[str, int | None]:
        """The longest answer asked for, and the name of the field that says so."""
        raise NotImplementedError

    def sampling_params(
        self, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
    ) -> SamplingParams:
        """The engine's parameters. Raises RequestError for values out of range."""
        given = {
            "n": self.n,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "seed": self.seed,
            "min_tokens": self.min_tokens,
            "stop": self.stop,
            "stop_token_ids": self.stop_token_ids,
            "bad_words": self.bad_words,
            "logit_bias": None if self.logit_bias is None else _token_bias(self.logit_bias),
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
        }
        return SamplingParams(
            **{name: value for name, value in given.items() if value is not None},
            max_tokens=max_tokens,
            ignore_eos=self.ignore_eos,
            include_stop_str_in_output=self.include_stop_str_in_output,
            allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            skip_special_tokens=self.skip_special_tokens,
            spaces_between_special_tokens=self.spaces_between_special_tokens,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            structured_outputs=structure_of(self),
        )


def _token_bias(bias: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token): value for token, value in bias.items()}
    except ValueError:
        raise RequestError("logit_bias: keys must be token ids", "logit_bias") from None


class ToolFunction(Body, kw_only=True, frozen=True):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body, kw_only=True, frozen=True):
    function: ToolFunction
    type: Literal["function"] = "function"

    def as_dict(self) -> dict[str, Any]:
        """Return the tool for chat templates: its fields that are not None, `type` first."""
        fields = ((name, getattr(self.function, name)) for name in self.function.__struct_fields__)
        return {"type": self.type, "function": {name: value for name, value in fields if value is not None}}


class NamedTool(Body, kw_only=True, frozen=True):
    function: dict[str, str]
    type: Literal["function"] = "function"


class ChatMessage(Struct, kw_only=True, frozen=True):
    """A message; content is a string or a list of text parts. Other fields are kept for the chat template."""

    role: Name
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


Messages = list[dict[str, Any]]
"""Messages as sent, with every field; `check_messages` validates them as ChatMessage."""
_DESCRIBED = {"items": {"$ref": "#/components/schemas/ChatMessage"}}


def check_messages(messages: Messages) -> None:
    """Raise msgspec.ValidationError, with a path below `messages`, for a message that is not a ChatMessage."""
    msgspec.convert(messages, list[ChatMessage])


def _check_chat(
    limits: RequestLimits,
    messages: Messages,
    tools: list[Tool] | None,
    template: str | None,
    template_kwargs: dict[str, Any] | None,
) -> None:
    """Check a conversation's sizes, then its types."""
    schemas = [tool.function.parameters for tool in tools or ()]
    limits.check_chat(messages, schemas, template, template_kwargs)
    check_messages(messages)
    for index, message in enumerate(messages):
        named = {f"messages[{index}].{name}": message.get(name) for name in ("name", "tool_call_id")}
        limits.check_names(**named)


def _without_nulls(messages: Messages) -> Messages:
    return [{name: value for name, value in message.items() if value is not None} for message in messages]


class ChatCompletionRequest(SamplingBody, kw_only=True, frozen=True):
    """POST /v1/chat/completions"""

    messages: Annotated[Messages, Meta(min_length=1, extra_json_schema=_DESCRIBED)]
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    logprobs: Flag = False
    top_logprobs: NumLogprobs | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | UnsetType | None = UNSET
    continue_final_message: Flag = False
    echo: Flag = False
    include_reasoning: Flag = True
    # accepted because they do not affect the response
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    # for the chat template
    reasoning_effort: str | None = None
    documents: list[dict[str, Any]] | None = None
    add_special_tokens: Flag = False

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        limits.check_lists_of_prompts(self, 1)
        _check_chat(limits, self.messages, self.tools, self.chat_template, self.chat_template_kwargs)
        limits.check_values(
            {"metadata": self.metadata, "prompt_cache_options": self.prompt_cache_options, "documents": self.documents}
        )
        limits.check_names(
            safety_identifier=self.safety_identifier,
            prompt_cache_key=self.prompt_cache_key,
            prompt_cache_retention=self.prompt_cache_retention,
            reasoning_effort=self.reasoning_effort,
        )
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs: needs logprobs to be true", "top_logprobs")
        if self.continue_final_message and self.add_generation_prompt is True:
            raise RequestError("continue_final_message: excludes add_generation_prompt", "continue_final_message")
        if self.tool_choice is not None and self.tool_choice != "none" and not self.tools:
            raise RequestError("tool_choice: needs tools", "tool_choice")

    @property
    def opens_answer(self) -> bool:
        """The rendered prompt ends with the opening of the assistant's turn."""
        return self.add_generation_prompt is not False and not self.continue_final_message

    def rendered_messages(self) -> Messages:
        """The messages for a chat template: without the fields that are null."""
        return _without_nulls(self.messages)

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Variables for the chat template other than messages and tools."""
        given = {"reasoning_effort": self.reasoning_effort, "documents": self.documents or None}
        return {name: value for name, value in given.items() if value is not None} | (self.chat_template_kwargs or {})

    @property
    def asked_tokens(self) -> tuple[str, int | None]:
        """The longest answer asked for, and the name of the field that says so."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens


class CompletionRequest(SamplingBody, kw_only=True, frozen=True):
    """POST /v1/completions"""

    prompt: str | list[str | TokenId | list[TokenId]]
    max_tokens: PromptOnlyCount | UnsetType | None = UNSET
    max_completion_tokens: PromptOnlyCount | None = None
    logprobs: NumLogprobs | bool | None = None
    echo: Flag = False
    add_special_tokens: Flag = True
    # fields of chats that clients also send here, with neutral values: see CHAT_ONLY
    add_generation_prompt: Unserved = None
    chat_template: Unserved = None
    chat_template_kwargs: Unserved = None
    continue_final_message: Unserved = None
    documents: Unserved = None
    include_reasoning: Unserved = None
    messages: Unserved = None
    metadata: Unserved = None
    parallel_tool_calls: Unserved = None
    reasoning_effort: Unserved = None
    service_tier: Unserved = None
    store: Unserved = None
    tool_choice: Unserved = None
    tools: Unserved = None
    top_logprobs: Unserved = None

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        check_chat_only(self)
        num_prompts = len(self.prompts())
        limits.check("prompts", num_prompts, "prompt")
        limits.check("outputs", num_prompts * (self.n or 1), "prompt")
        limits.check_lists_of_prompts(self, num_prompts)
        if self.truncate_prompt_tokens is not None:
            num_chars = sum(len(prompt) for prompt in self.prompts() if isinstance(prompt, str))
            limits.check("tokenized_chars", num_chars, "prompt")
        if not self.prompt:
            raise RequestError("prompt: is empty", "prompt")
        _check_alike(self.prompt)
        field, asked = self.asked_tokens
        if asked == 0 and not self.echo:
            raise RequestError(f"{field}: 0 is only allowed with echo", field)
        if self.logprobs is True:
            raise RequestError("logprobs: expected an integer >= 0, got true", "logprobs")

    @property
    def asked_tokens(self) -> tuple[str, int | None]:
        """The longest answer asked for, and the name of the field that says so."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", 16 if isinstance(self.max_tokens, UnsetType) else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Number of log-probabilities per token; None for null and false."""
        return None if self.logprobs is None or self.logprobs is False else int(self.logprobs)

    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list, in order."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return self.prompt  # type: ignore[return-value]


_PROMPT_KINDS: dict[type, str] = {str: "a string", int: "a token id", list: "a list of token ids"}


def _check_alike(prompt: str | list[Any]) -> None:
    """Raise RequestError, naming the first entry of a list of prompts that is of another type than the one before."""
    if isinstance(prompt, str) or len(set(map(type, prompt))) <= 1:
        return
    first = type(prompt[0])
    at = next(index for index, entry in enumerate(prompt) if type(entry) is not first)
    said = f"expected {_PROMPT_KINDS[first]}, as in prompt[0], got {_PROMPT_KINDS[type(prompt[at])]}"
    raise RequestError(f"prompt[{at}]: {said}", f"prompt[{at}]")


class TokenizeRequest(Body, kw_only=True, frozen=True):
    """POST /tokenize: `prompt`, or `messages` through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Messages, Meta(extra_json_schema=_DESCRIBED)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: Flag = True
    continue_final_message: Flag = False
    return_token_strs: Flag = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None

    def check(self, limits: RequestLimits) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("prompt: give either prompt or messages", "prompt")
        limits.check_names(model=self.model)
        limits.check("tokenized_chars", len(self.prompt or ""), "prompt")
        _check_chat(limits, self.messages or [], self.tools, self.chat_template, self.chat_template_kwargs)

    @property
    def opens_answer(self) -> bool:
        """The rendered prompt ends with the opening of the assistant's turn."""
        return self.add_generation_prompt and not self.continue_final_message

    def rendered_messages(self) -> Messages:
        """The messages for a chat template: without the fields that are null."""
        return _without_nulls(self.messages or [])


class DetokenizeRequest(Body, kw_only=True, frozen=True):
    """POST /detokenize"""

    model: str | None = None
    tokens: list[TokenId]

    def check(self, limits: RequestLimits) -> None:
        limits.check_names(model=self.model)


class AbortRequest(Body, kw_only=True, frozen=True):
    """POST /abort_requests. Without ids: all requests (of the caller, unless it has the admin key)."""

    request_ids: list[str] | None = None


REQUEST_BODIES = (ChatCompletionRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest, AbortRequest)
