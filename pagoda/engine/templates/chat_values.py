"""The values that a chat template is rendered with: messages and tools, validated and in the form templates expect."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, cast

from pagoda.base.abbreviate import abbreviate
from pagoda.base.errors import RequestError

Message = Mapping[str, Any]
"""One turn: role, content (a string, or a list of {"type": "text", "text": ...} parts), and template-specific keys."""


class ContentForm(Enum):
    """How a template reads the content of messages."""

    TEXT = "text"  # as one string
    PARTS = "parts"  # as a string, or as a list of parts: {"type": "text", "text": ...} and {"type": "image"}
    ONLY_PARTS = "only parts"


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a template reads messages with tool calls.

    without_content: what stands for a content that is empty: nothing, {"content": ""} or {"content": None}.
    as_text: arguments are a string with JSON, not an object.
    """

    without_content: Mapping[str, str | None] = field(default_factory=dict[str, str | None])
    as_text: bool = False


DEFAULT_CALLS = CallForm()
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
"""Templates read the reasoning of earlier turns under any of these names; clients send what they were given."""


def map_parts(messages: Sequence[Any], change: Callable[[str, Any], Any]) -> Sequence[Any]:
    """Return the messages with `change(name, part)` in place of each part of their contents, which errors call `name`.

    Messages of an unexpected form stay as they are.
    """
    changed: list[Any] = list(messages)
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list | tuple):
            parts = [change(f"messages[{index}].content[{at}]", part) for at, part in enumerate(content)]
            changed[index] = {**message, "content": parts}
    return changed


def with_known_roles(messages: Sequence[Any], template: str) -> Sequence[Any]:
    """Return the messages of a developer as those of the system, unless a template, a text, knows developers.

    OpenAI's clients send them, and most templates would leave them out.
    """
    if "'developer'" in template or '"developer"' in template:
        return messages
    return [
        {**one, "role": "system"} if isinstance(one, Mapping) and one.get("role") == "developer" else one
        for one in messages
    ]


def with_joined_systems(turns: Sequence[dict[str, Any]]) -> tuple[list[int], list[dict[str, Any]]]:
    """Return turns with those of the system that follow each other as one, and the place of the first of each.

    Between their texts is an empty line.
    """
    places, joined = list[int](), list[dict[str, Any]]()
    for index, turn in enumerate(turns):
        if not (joined and turn["role"] == joined[-1]["role"] == "system"):
            places.append(index)
            joined.append(turn)
            continue
        texts: list[Any] = [one.get("content") or "" for one in (joined[-1], turn)]
        if all(isinstance(text, str) for text in texts):
            content: Any = "\n\n".join(texts)
        else:
            content = [part for text in texts for part in _parts_of(text)]
        joined[-1] = {**joined[-1], "content": content}
    return places, joined


def _parts_of(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def template_values(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    continue_final_message: bool,
    template_kwargs: Mapping[str, Any] | None,
    form: ContentForm = ContentForm.TEXT,
    calls: CallForm = DEFAULT_CALLS,
) -> dict[str, Any]:
    """Return the variables that transformers' `apply_chat_template` defines, validated and normalised.

    Raises RequestError.
    """
    turns = [normal_message(index, message, form, calls) for index, message in enumerate(messages)]
    if not turns:
        raise RequestError("messages is empty: a chat needs at least one", "messages")
    if continue_final_message and add_generation_prompt:
        raise RequestError(
            "add_generation_prompt and continue_final_message are mutually exclusive", "continue_final_message"
        )
    if continue_final_message:
        turns[-1]["content"] = _with_cut_mark(turns[-1].get("content") or "")
    return {
        "documents": None,
        **(template_kwargs or {}),
        "messages": turns,
        "tools": list(tools) if tools else None,
        "add_generation_prompt": add_generation_prompt,
    }


def _with_cut_mark(content: str | list[dict[str, str]]) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content + _CUT_MARK
    if content and content[-1]["type"] == "text":
        return [*content[:-1], {"type": "text", "text": content[-1]["text"] + _CUT_MARK}]
    return [*content, {"type": "text", "text": _CUT_MARK}]


def normal_message(
    index: int, message: Message, form: ContentForm = ContentForm.TEXT, calls: CallForm = DEFAULT_CALLS
) -> dict[str, Any]:
    """Return the message without keys that are None, and with the content and calls that its template reads.

    Raises RequestError if it is malformed.
    """
    if not isinstance(message, Mapping):
        raise RequestError(f"messages[{index}] is {type(message).__name__}, expected an object with a role", "messages")
    if not isinstance(message.get("role"), str):
        raise RequestError(f"messages[{index}] has no role", "messages")
    normal = {name: value for name, value in message.items() if value is not None}
    reasoning = next((normal[name] for name in _REASONING_NAMES if name in normal), None)
    if reasoning is not None:
        normal = {**dict.fromkeys(_REASONING_NAMES, reasoning), **normal}
    if normal.get("tool_calls"):
        normal["tool_calls"] = _normal_calls(f"messages[{index}].tool_calls", normal["tool_calls"], calls)
        if not normal.get("content"):
            normal |= calls.without_content
    elif "content" not in normal and (reasoning is not None or isinstance(normal.get("refusal"), str)):
        normal["content"] = normal.get("refusal", "")  # OpenAI's form of a refusal
    content = normal.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = _content_of_parts(f"messages[{index}].content", content, form)
    if content is None and not normal.get("tool_calls"):
        raise RequestError(f"messages[{index}] has no content", "messages")
    if content is not None and not isinstance(content, str | list):
        raise RequestError(f"messages[{index}].content is {type(content).__name__}, expected a string", "messages")
    if form is ContentForm.ONLY_PARTS and not isinstance(content, list):
        content = [{"type": "text", "text": content or ""}]
    return normal if content is None else {**normal, "content": content}


def _normal_calls(where: str, calls: Any, form: CallForm) -> list[Any]:
    """Return tool calls as their template reads them: arguments may come as JSON strings or objects."""
    if not isinstance(calls, list | tuple):
        raise RequestError(f"{where} is {type(calls).__name__}, expected a list", where)
    normal: list[Any] = []
    for index, call in enumerate(cast("Sequence[Any]", calls)):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(f"{where}[{index}] has no function with a name", f"{where}[{index}].function")
        arguments = call_arguments(f"{where}[{index}].function.arguments", function.get("arguments"))
        written: Any = json.dumps(arguments, ensure_ascii=False) if form.as_text else arguments
        normal.append({**call, "function": {**function, "arguments": written}})
    return normal


def call_arguments(where: str, given: Any) -> dict[str, Any]:
    """Return the arguments of a call as an object; none, and JSON's null, are an empty one. Raises RequestError."""
    arguments = given
    if isinstance(given, str):
        try:
            arguments = json.loads(given) if given.strip() else {}
        except (ValueError, RecursionError):
            arguments = given
    if arguments is not None and not isinstance(arguments, Mapping):
        why = f"expected a JSON object, or a string with one (got {abbreviate(given)})"
        raise RequestError(f"{where}: {why}", where)
    return dict(arguments or {})


def _content_of_parts(where: str, parts: Sequence[Any], form: ContentForm) -> str | list[dict[str, str]]:
    if form is ContentForm.TEXT:
        return "\n".join(_part_text(f"{where}[{at}]", part) for at, part in enumerate(parts))
    return [
        {"type": "image"}
        if isinstance(part, Mapping) and part.get("type") == "image"
        else {"type": "text", "text": _part_text(f"{where}[{at}]", part, "text and images")}
        for at, part in enumerate(parts)
    ]


def _part_text(where: str, part: Any, takes: str = "text only") -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind not in ("text", "refusal"):
        raise RequestError(f"{where} is a part of type {abbreviate(kind)}; this model takes {takes}", where)
    if not isinstance(part.get(kind), str):
        raise RequestError(f"{where}.{kind}: expected a string", f"{where}.{kind}")
    return part[kind]


_CUT_MARK = (
    "\uf8ff{cut}\uf8ff "  # private-use characters, not used in messages; the last space shows if content is trimmed
)


def cut_at_mark(text: str) -> str:
    """Return the text before the mark, trimmed if the template trims content (the mark kept it from doing so)."""
    before, mark, after = text.rpartition(_CUT_MARK.rstrip())
    if not mark:
        raise RequestError("continue_final_message: the chat template leaves out the last message", "messages")
    return before if after.startswith(" ") else before.rstrip()
