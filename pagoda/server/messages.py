"""Conversations in request bodies: messages and tools, with their checks."""

from typing import Annotated, Any

import msgspec
from msgspec import Struct

from pagoda.base.request_limits import RequestLimits
from pagoda.server.fields import Body, Name, one_of


class ToolFunction(Body, kw_only=True, frozen=True):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body, kw_only=True, frozen=True):
    function: ToolFunction
    type: Annotated[str, one_of("function")] = "function"

    def as_dict(self) -> dict[str, Any]:
        """Return the tool for chat templates: its fields that are not None, `type` first."""
        fields = ((name, getattr(self.function, name)) for name in self.function.__struct_fields__)
        return {"type": self.type, "function": {name: value for name, value in fields if value is not None}}


class NamedTool(Body, kw_only=True, frozen=True):
    function: dict[str, str]
    type: Annotated[str, one_of("function")] = "function"


class ChatMessage(Struct, kw_only=True, frozen=True):
    """A message; content is a string or a list of text parts. Other fields are kept for the chat template."""

    role: Name
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


Messages = list[dict[str, Any]]
"""Messages as sent, with every field; `check_messages` validates them as ChatMessage."""
DESCRIBED_MESSAGES = {"items": {"$ref": "#/components/schemas/ChatMessage"}}


def check_messages(messages: Messages) -> None:
    """Raise msgspec.ValidationError, with a path below `messages`, for a message that is not a ChatMessage."""
    msgspec.convert(messages, list[ChatMessage])


def check_chat(
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


def without_nulls(messages: Messages) -> Messages:
    """Return messages for a chat template: without the fields that are null."""
    return [{name: value for name, value in message.items() if value is not None} for message in messages]
