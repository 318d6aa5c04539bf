"""The HTTP API's request bodies, in OpenAI's shape with the engine's sampling parameters as extra fields.

Pydantic stops here: routes hand on SamplingParams and plain values. A field that is not named here is refused, so
nothing a caller asks for is dropped in silence; `UNSUPPORTED` names OpenAI's fields we know and cannot serve, to say
so in words. Answers are built as plain dicts by the routes, and described in answers.py for the OpenAPI page.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pagoda.base.errors import RequestError
from pagoda.base.sampling_params import SamplingParams

Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
ShortText = Annotated[str, Field(max_length=256)]
RequestId = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[\x21-\x7e]+$")]

UNSUPPORTED = {
    "audio": "audio output",
    "modalities": "modalities other than text",
    "functions": "the deprecated `functions`; use `tools`",
    "function_call": "the deprecated `function_call`; use `tool_choice`",
    "prediction": "predicted outputs",
    "web_search_options": "web search",
    "suffix": "`suffix` (fill in the middle)",
    "best_of": "`best_of`; use `n`",
    "moderation": "moderation",
}


class Body(BaseModel):
    """A request body: unknown fields are errors."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _name_the_unsupported(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for name, what in UNSUPPORTED.items():
                if data.get(name) is not None and name not in cls.model_fields:
                    raise ValueError(f"{name}: this server does not support {what}")
            return {k: v for k, v in data.items() if v is not None or k not in UNSUPPORTED or k in cls.model_fields}
        return data


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: dict[str, Any] | None = None


class SamplingBody(Body):
    """What chat and text completions share."""

    model: str | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    n: int | None = Field(default=None, ge=1, le=128)
    presence_penalty: float | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    stream: bool | None = False
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
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    bad_words: list[str] | None = None
    allowed_token_ids: list[TokenId] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=1000)] | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    priority: Int32 = 0
    cache_salt: ShortText | None = None
    request_id: RequestId | None = None
    return_token_ids: bool = False
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    return_timings: bool = False

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
        )

    @property
    def wants_structure(self) -> bool:
        """A grammar or schema was asked for."""
        shaped = self.response_format is not None and self.response_format.type != "text"
        return shaped or self.structured_outputs is not None


def _token_bias(bias: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token): value for token, value in bias.items()}
    except ValueError:
        raise RequestError("logit_bias: keys are token ids, written as numbers", "logit_bias") from None


class ToolFunction(Body):
    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"] = "function"
    function: ToolFunction


class NamedTool(Body):
    type: Literal["function"] = "function"
    function: dict[str, str]


class ChatMessage(BaseModel):
    """A message; content may be text or a list of text parts. Fields a template may read are kept."""

    model_config = ConfigDict(extra="allow")

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class ChatCompletionRequest(SamplingBody):
    """POST /v1/chat/completions"""

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=1000)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    echo: bool = False
    include_reasoning: bool = True
    # accepted because they ask nothing of the answer
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    reasoning_effort: str | None = None

    @model_validator(mode="after")
    def _check_together(self) -> "ChatCompletionRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: needs logprobs to be true")
        if (
            self.continue_final_message
            and self.add_generation_prompt
            and "add_generation_prompt" in self.model_fields_set
        ):
            raise ValueError("continue_final_message: cannot go with add_generation_prompt")
        if self.tool_choice is not None and self.tool_choice != "none" and not self.tools:
            raise ValueError("tool_choice: needs tools")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: needs stream to be true")
        return self


class CompletionRequest(SamplingBody):
    """POST /v1/completions"""

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = 16
    logprobs: Annotated[int, Field(ge=0, le=1000)] | None = None
    echo: bool = False
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_together(self) -> "CompletionRequest":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: needs stream to be true")
        if self.prompt in ("", []):
            raise ValueError("prompt: is empty")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: 0 is of use only with echo")
        return self

    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list, in order."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]


class TokenizeRequest(Body):
    """POST /tokenize: `prompt`, or `messages` through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None

    @model_validator(mode="after")
    def _check_together(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: give either prompt or messages")
        return self


class DetokenizeRequest(Body):
    """POST /detokenize"""

    model: str | None = None
    tokens: list[TokenId]


class AbortRequest(Body):
    """POST /abort_requests"""

    request_ids: list[str] = Field(min_length=1)
