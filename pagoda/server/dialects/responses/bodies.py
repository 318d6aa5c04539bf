"""The body of POST /v1/responses, and the items of conversations in that API."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from msgspec import Meta, Struct

from pagoda.base.errors import RequestError
from pagoda.base.request_limits import RequestLimits
from pagoda.base.structured_outputs import StructuredOutputsParams
from pagoda.server.body import Body, Flag, ModelBody, Seed, TokenCount, UnservedField, one_of
from pagoda.server.dialects.openai.body import CacheRetention
from pagoda.server.dialects.responses.tools import ResponsesTool, ResponsesToolChoice, is_hosted


class InputPart(Struct, frozen=True):
    """A part of a message, a thought or a tool's result.

    type: Which of the fields it has.
    text, refusal: What it says.
    image_url: Of an image: its address, or data.
    """

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None


class InputItem(Struct, frozen=True, kw_only=True):
    """A part of a conversation: a message, a thought, a call or its result. Items of earlier answers are among them.

    type: Which of the fields it has: message (if it has a role), reasoning, function_call, function_call_output,
        custom_tool_call, custom_tool_call_output, item_reference.
    id: Of the item.
    role: Of a message: user, assistant, system or developer.
    content: Of a message or a thought: a text, or parts.
    summary: Of a thought: parts.
    encrypted_content: Of a thought: as it was sent.
    call_id: What a call and its result have in common.
    name: Of a call: the tool.
    namespace: Of a call: where the tool is.
    arguments: Of a function's call: JSON.
    input: Of a custom tool's call: a text.
    output: Of a result: a text, or parts.
    """

    type: str | None = None
    id: str | None = None
    role: str | None = None
    content: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    encrypted_content: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[InputPart] | None = None

    @property
    def kind(self) -> str:
        """Its type, also if that is not given."""
        return self.type or ("message" if self.role is not None else "item_reference")


def check_ids(name: str, items: Sequence[InputItem]) -> None:
    """Raise RequestError if two items have the same id.   name: the field that they are in."""
    places: dict[str, int] = {}
    for index, item in enumerate(items):
        if item.id and item.kind != "item_reference" and (first := places.setdefault(item.id, index)) != index:
            where = f"{name}[{index}].id"
            raise RequestError(
                f"{where}: {item.id!r:.80} is the id of {name}[{first}], too; leave one of them out", where
            )


class ReasoningParam(Body, frozen=True):
    """How the model thinks.

    effort: How much: none, minimal, low, medium, high, or a word of its template.
    summary: With a value, thoughts are sent as summaries, else as texts; either has all of them.
    """

    effort: Annotated[str, Meta(max_length=64)] | None = None
    summary: Annotated[str, one_of("auto", "concise", "detailed", "none")] | None = None


class TextParam(Body, frozen=True):
    """The form of the texts.

    format: Of type text, json_object, or json_schema with a `schema`.
    verbosity: Has no effect.
    """

    format: dict[str, Any] | None = None
    verbosity: Annotated[str, Meta(max_length=64)] | None = None


MAX_ADDED = 100
"""Most items that are added to a stored conversation at a time."""


class ConversationParam(Body, frozen=True):
    """A stored conversation.

    id: Its id.
    """

    id: str


class ResponsesRequest(ModelBody, kw_only=True, frozen=True):
    """POST /v1/responses

    input: A text of the user, or the items of the conversation.
    instructions: The system prompt.
    max_output_tokens: Most tokens of the answer; if not given, as many as the model's context has left.
    stream: Send the answer as events, as it is generated.
    top_logprobs: Tell the log-probability of each token, and so many of the most likely ones.
    reasoning: How the model thinks.
    text: The form of the texts.
    max_tool_calls: Comes back in the answer: it is about hosted tools.
    parallel_tool_calls: False: at most one call.
    include: `message.output_text.logprobs` and `reasoning.encrypted_content` are known; others have no effect.
    truncation: Has no effect: what does not fit into the context is an error.
    store: Keep the response, so that it can be asked for and followed.
    background: Answer at once, and go on without the client.
    previous_response_id: A stored response, whose items come before the input.
    conversation: A stored conversation, or its id: its items come before the input, and those of this turn are added.
    user, safety_identifier: Come back in the answer.
    prompt_cache_key: Comes back in the answer; keep the prefix in the cache rather than others, for five minutes.
    prompt_cache_retention: The same; 24h: for a day.
    seed: Makes the output repeatable; not a field of OpenAI's.
    """

    unserved: ClassVar[Mapping[str, UnservedField]] = {
        "prompt": UnservedField("stored prompts"),
        "moderation": UnservedField("moderation"),
    }
    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: TokenCount | None = None
    stream: Flag = False
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=1000)] | None = None
    reasoning: ReasoningParam | None = None
    text: TextParam | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: Annotated[str, one_of("none", "auto", "required")] | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: TokenCount | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    truncation: Annotated[str, one_of("auto", "disabled")] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    store: Flag = True
    background: Flag = False
    previous_response_id: str | None = None
    conversation: str | ConversationParam | None = None
    prompt_cache_retention: CacheRetention | None = None
    seed: Seed | None = None

    def check(self, limits: RequestLimits) -> None:
        if self.background and not self.store:
            raise RequestError("background: needs store: true, as its answer is asked for later", "background")
        if self.previous_response_id is not None and self.conversation is not None:
            both = "previous_response_id and conversation: each says what comes before the input; send one of them"
            raise RequestError(both, "previous_response_id")
        names = ("model", "user", "safety_identifier", "prompt_cache_key", "previous_response_id")
        limits.check_names(**{name: getattr(self, name) for name in names}, conversation=self.conversation_id)
        items = () if isinstance(self.input, str) else self.input
        limits.check("messages", len(items), "input")
        check_ids("input", items)
        limits.check("tools", len(self.tools or ()), "tools")
        limits.check("tools", sum(len(one.tools or ()) for one in self.tools or ()), "tools")  # of namespaces
        if self.conversation is not None and len(items) > MAX_ADDED:
            raise RequestError(f"input: with a conversation, at most {MAX_ADDED} items are added at a time", "input")
        limits.check_values({"metadata": self.metadata})
        limits.check_values({"text": self.text and self.text.format}, "grammar_chars")

    def left_out(self) -> list[str]:
        return [f"tools.{tool.type}" for tool in self.tools or () if is_hosted(tool)]

    @property
    def conversation_id(self) -> str | None:
        return self.conversation.id if isinstance(self.conversation, ConversationParam) else self.conversation

    def includes(self, name: str) -> bool:
        return name in (self.include or ())

    @property
    def num_logprobs(self) -> int | None:
        """The log-probabilities per token, besides its own; None: none at all."""
        return self.top_logprobs or (0 if self.includes("message.output_text.logprobs") else None)

    @property
    def structure(self) -> StructuredOutputsParams | None:
        """The form of the text. Raises RequestError."""
        form = (self.text.format if self.text is not None else None) or {"type": "text"}
        match form:
            case {"type": "text"}:
                return None
            case {"type": "json_object"}:
                return StructuredOutputsParams(json_object=True, source="text.format")
            case {"type": "json_schema", "schema": dict() as schema}:
                return StructuredOutputsParams(json=schema, source="text.format")
        raise RequestError("text.format: expected type text, json_object, or json_schema and a schema", "text.format")
