"""Conversations: the messages and tools of requests, as chat templates get them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol

import msgspec
from msgspec import Struct

from pagoda.base.errors import RequestError
from pagoda.base.request_limits import RequestLimits
from pagoda.engine.answers.chat_answers import text_of_content
from pagoda.engine.images.source import take_images
from pagoda.engine.inputs.prompt_embeds import take_embeds
from pagoda.server.body import Body, Name, OrDefault, items_of, one_of
from pagoda.server.thinking import Thinking


class TemplateFields(Protocol):
    """What the bodies of OpenAI's API say about the template."""

    @property
    def chat_template(self) -> str | None: ...
    @property
    def chat_template_kwargs(self) -> dict[str, Any] | None: ...
    @property
    def add_generation_prompt(self) -> Any: ...
    @property
    def continue_final_message(self) -> bool: ...
    @property
    def add_special_tokens(self) -> bool | None: ...


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation, as the template gets it.

    tools: what may be called, as OpenAI's API writes them; none if nothing may.   is_forced: the answer is a call.
    input_grammars: by a tool's name: see `Tool.input_grammar`.
    only_tool: the one that must be called.   is_parallel: there may be several calls.
    chat_template: a text, or a name of one of the model's; None: the model's own.   template_kwargs: more variables.
    thinking: how much the model thinks first, where `template_kwargs` say nothing else.
    add_generation_prompt: end with the opening of the assistant's turn.
    continue_final_message: end inside the last message.   add_special_tokens: add those of the tokenizer, too.
    seals: what was sealed of earlier answers, as the client sends it back (Turn.seal).
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    input_grammars: Mapping[str, str] = field(default_factory=dict[str, str])
    is_forced: bool = False
    only_tool: str | None = None
    is_parallel: bool = True
    chat_template: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    thinking: Thinking = field(default_factory=Thinking)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    seals: Sequence[str] = ()

    @classmethod
    def of(cls, body: TemplateFields, messages: list[dict[str, Any]], **more: Any) -> "Conversation":
        """Return the conversation of a body.   more: fields that not all bodies have."""
        fields: dict[str, Any] = {
            "chat_template": body.chat_template,
            "template_kwargs": body.chat_template_kwargs or {},
            "add_generation_prompt": body.add_generation_prompt is not False,
            "continue_final_message": body.continue_final_message,
            "add_special_tokens": bool(body.add_special_tokens),
        }
        return cls(messages, **fields | more)

    @property
    def continued(self) -> str:
        """The text of the message that the answer continues; "" if it begins a new one."""
        return text_of_content(self.messages[-1].get("content")) if self.continue_final_message else ""


class ToolFunction(Body, kw_only=True, frozen=True):
    """A function that the model may call.

    name: What calls name.
    description: What it does, for the model to read.
    parameters: JSON schema of its arguments.
    strict: The arguments obey the schema by construction.
    """

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body, kw_only=True, frozen=True):
    """What the model may call.

    function: Which function.
    type: There is one kind.
    """

    function: ToolFunction
    type: OrDefault[Annotated[str, one_of("function")]] = "function"


Tools = Annotated[list[dict[str, Any]], items_of(Tool)]
"""Tools as sent, with every field, which is how chat templates get them; `check_chat` validates them as Tool."""


class ChatMessage(Struct, kw_only=True, frozen=True):
    """A message. Other fields go to the chat template.

    role: Who wrote it, by a name of the template: system, user, assistant, tool.
    content: A text, or a list of parts of type text, image_url or prompt_embeds.
    name: For the template.
    tool_calls: Of an assistant: the calls that it made.
    tool_call_id: Of a tool's answer: of the call.
    """

    role: Name
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


Messages = Annotated[list[dict[str, Any]], items_of(ChatMessage)]
"""Messages as sent, with every field; `check_chat` validates them as ChatMessage."""


class _Chat(Struct, frozen=True):
    messages: list[ChatMessage]
    tools: list[Tool]


def check_chat(
    limits: RequestLimits,
    messages: Messages,
    tools: list[dict[str, Any]] | None,
    template: str | None,
    template_kwargs: dict[str, Any] | None,
) -> None:
    """Check a conversation's sizes, then its types, and drop fields that are null: they are as if not given.

    Raises RequestError, msgspec.ValidationError.
    """
    limits.check_counts(messages, tools)
    limits.check_chat(take_images(take_embeds(messages)[0])[0], tools, template, template_kwargs)
    msgspec.convert({"messages": messages, "tools": tools or []}, _Chat)
    for index, message in enumerate(messages):
        named = {f"messages[{index}].{name}": message.get(name) for name in ("name", "tool_call_id")}
        limits.check_names(**named)
        for name in [name for name, value in message.items() if value is None]:
            del message[name]


def check_named(field: str, name: str | None, tools: list[dict[str, Any]]) -> None:
    """Raise RequestError if the tool that must be called is none of these.   field: that names it."""
    if name not in [tool["function"]["name"] for tool in tools]:
        raise RequestError(f"{field}: there is no tool {name!r:.80}", field)
