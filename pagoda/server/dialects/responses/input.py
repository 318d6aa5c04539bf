"""How the items of a conversation in OpenAI's Responses become messages for a chat template."""

import re
from collections.abc import Sequence
from typing import Any

from pagoda.base.errors import RequestError
from pagoda.base.request_limits import RequestLimits
from pagoda.engine.templates.chat_values import call_arguments
from pagoda.server.conversation import Conversation, check_chat
from pagoda.server.dialects.responses.bodies import InputItem, InputPart, ResponsesRequest, check_ids
from pagoda.server.dialects.responses.tools import ResponsesTools, arguments_of, chosen
from pagoda.server.dialects.transcript import Transcript
from pagoda.server.errors import ApiError
from pagoda.server.thinking import Thinking
from pagoda.server.turn import naming_fields

_OWN_NAMES = {
    "max_tokens": "max_output_tokens",
    "prompt": "input",
    "logprobs": "top_logprobs",
    "truncate_prompt_tokens": "",
}


_HOSTED = frozenset(
    f"{name}_{what}"
    for name in ("web_search", "file_search", "code_interpreter", "image_generation", "tool_search", "mcp")
    for what in ("call", "output", "list_tools", "approval_request", "approval_response")
)
"""Items about tools that others ran, which are left out like those tools."""


class ItemsTranscript(Transcript):
    """The messages of a conversation. Items of the assistant that follow each other are one message."""

    def __init__(self, tools: ResponsesTools) -> None:
        super().__init__()
        self.seals: list[str] = []
        self._tools = tools
        self._functions = tools.functions
        self._shown: list[dict[str, Any]] = []  # images of results, which wait for the next message of the user
        self._known: set[str | None] = set()  # ids of earlier items

    def add_earlier(self, name: str, items: Sequence[InputItem]) -> None:
        """Add items that are stored.   name: the field that says where."""
        for item in items:
            self._known.add(item.id)
            self._add_item(f"{name}[{item.id}]", item)

    def add_last(self, name: str, items: Sequence[InputItem]) -> None:
        """Add items of a field of the body, after which there are no others."""
        for index, item in enumerate(items):
            self._add_item(f"{name}[{index}]", item)
        self._add_shown(name)
        self.join_texts()

    def origin(self, param: str) -> str:
        """Return the caller's name of a field."""
        if found := re.match(r"tools\[(\d+)\]", param):
            name = self._functions[int(found[1])]["function"]["name"]
            return self._tools.named[name].place
        return _OWN_NAMES.get(param, super().origin(param))

    def conversation(self, body: ResponsesRequest) -> Conversation:
        """Return the conversation of a body whose items were added."""
        use = chosen(body.tool_choice, self._tools)
        self._functions = use["tools"]
        effort = body.reasoning.effort if body.reasoning is not None else None
        is_parallel = body.parallel_tool_calls is not False
        thinking = Thinking(effort=effort)
        return Conversation(self.messages, thinking=thinking, is_parallel=is_parallel, seals=self.seals, **use)

    def _add_item(self, place: str, item: InputItem) -> None:
        kind = item.kind
        if kind == "item_reference":  # to what came before, which the model has already
            if item.id is None or item.id not in self._known:
                raise ApiError(404, f"{place}.id: there is no item {item.id!r:.80}", f"{place}.id")
            return
        if not kind.endswith("call_output"):
            self._add_shown(place)
        match kind:
            case "message":
                self._add_message(place, item)
            case "reasoning":
                if item.encrypted_content is not None:
                    self.seals.append(item.encrypted_content)
                if text := _joined(item.content) or _joined(item.summary):
                    self._assistant(place).setdefault("reasoning_content", []).append(text)
            case "function_call":
                self._add_call(place, item, item.arguments)
            case "custom_tool_call":
                self._add_call(place, item, None if item.input is None else arguments_of(item.input))
            case "function_call_output" | "custom_tool_call_output":
                parts = _parts(item.output or "", f"{place}.output")
                text = "\n".join(part["text"] for part in parts if "text" in part)
                self.add(place, {"role": "tool", "tool_call_id": item.call_id or "", "content": text})
                self._shown += [part for part in parts if "text" not in part]
            case _ if kind not in _HOSTED:
                raise RequestError(f"{place}: this server does not support items of type {kind!r:.80}", place)

    def _add_shown(self, place: str) -> None:
        self.add_parts(place, self._shown)
        self._shown = []

    def _assistant(self, place: str) -> dict[str, Any]:
        """Return the message of the assistant that an item belongs to."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.add(place, {"role": "assistant", "content": []})
        return self.messages[-1]

    def _add_call(self, place: str, item: InputItem, arguments: str | None) -> None:
        if not item.name or arguments is None:
            raise RequestError(f"{place}: a call needs a name, and arguments or an input", place)
        if item.kind == "function_call":  # before it is stored, or its place is that of a message
            call_arguments(f"{place}.arguments", arguments)
        message = self._assistant(place)
        if not message.get("content"):
            message.pop("content", None)
        name = self._tools.find(item.name, item.namespace) or item.name
        call = {"id": item.call_id or "", "type": "function", "function": {"name": name, "arguments": arguments}}
        message.setdefault("tool_calls", []).append(call)

    def _add_message(self, place: str, item: InputItem) -> None:
        parts = _parts(item.content or "", f"{place}.content")
        match item.role:
            case "user":
                self.add_parts(place, parts or [{"type": "text", "text": ""}])
            case "assistant":
                content = self._assistant(place).setdefault("content", [])
                if text := _text(parts, place):
                    content.append(text)
            case "system" | "developer":
                self.add_system(place, _text(parts, place))
            case role:
                where = f"{place}.role"
                raise RequestError(f"{where}: expected user, assistant, system or developer, got {role!r:.80}", where)


def conversation_of(
    body: ResponsesRequest, tools: ResponsesTools, earlier: Sequence[InputItem] = ()
) -> tuple[Conversation, ItemsTranscript]:
    """Return the conversation of a body, and what knows its fields.   earlier: items before those of the body."""
    made, given = ItemsTranscript(tools), body.input
    if body.instructions:
        made.add_system("instructions", body.instructions)
    made.add_earlier("previous_response_id" if body.conversation is None else "conversation", earlier)
    if isinstance(given, str) or not given:
        made.add("input", {"role": "user", "content": given or ""})
        given = ()
    made.add_last("input", given)
    return made.conversation(body), made


def check_items(name: str, items: Sequence[InputItem], limits: RequestLimits) -> None:
    """Raise RequestError for items of a field that no response could read."""
    check_ids(name, items)
    made = ItemsTranscript(ResponsesTools(()))
    made.add_last(name, items)
    with naming_fields(made.origin):
        check_chat(limits, made.messages, None, None, None)


def _joined(content: str | Sequence[InputPart] | None) -> str:
    """Return the texts of a thought."""
    return content or "" if isinstance(content, str | None) else "".join(part.text or "" for part in content)


def _text(parts: Sequence[dict[str, Any]], place: str) -> str:
    for part in parts:
        if "text" not in part:
            raise RequestError(f"{place}.content: only messages of the user may have images", f"{place}.content")
    return "\n".join(part["text"] for part in parts)


def _parts(content: str | Sequence[InputPart], place: str) -> list[dict[str, Any]]:
    """Return content as parts of a message. Raises RequestError for other parts than texts and images."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    parts: list[dict[str, Any]] = []
    for at, part in enumerate(content):
        match part.type:
            case "input_text" | "output_text" | "text" | "summary_text" | "reasoning_text":
                parts.append({"type": "text", "text": part.text or ""})
            case "refusal":
                parts.append({"type": "text", "text": part.refusal or ""})
            case "input_image" if part.image_url is not None:
                parts.append({"type": "image_url", "image_url": {"url": part.image_url}})
            case kind:
                named = repr(kind)[:80] + (" without an image_url" if kind == "input_image" else "")
                where = f"{place}[{at}]"
                raise RequestError(f"{where}: this server does not support parts of type {named}", where)
    return parts
