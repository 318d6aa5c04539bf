"""Tools for a model whose chat template does not support them, as text in its messages.

Calls are written as Hermes and Qwen write them, which the parser "hermes" reads.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pagoda.engine.templates.chat_values import Message, normal_message

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def lacks_tools(template: str) -> bool:
    """Return whether a chat template does not support tools."""
    return "tools" not in template


def with_generic_tools(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, template: str
) -> Sequence[Message]:
    """Return messages with the tools described in the first of them, and calls and results as text.

    template: the text of one that lacks tools. Messages of an unexpected form are left for the template to refuse.
    """
    has_calls = any(
        isinstance(one, Mapping) and (one.get("tool_calls") or one.get("role") == "tool") for one in messages
    )
    if has_calls and "tool_calls" not in template:
        messages = _without_calls(messages)
    if not tools:
        return messages
    return _with_first(messages, _describe(tools), "system" in template and "System role not supported" not in template)


def _describe(tools: Sequence[Mapping[str, Any]]) -> str:
    lines = [json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools]
    return "\n".join(
        [
            "You may call these functions. Each line is one, with the JSON schema of its parameters:",
            *lines,
            "",
            "To call a function, write its name and arguments as JSON in tags, and nothing else:",
            OPEN,
            '{"name": "<function name>", "arguments": {<arguments>}}',
            CLOSE,
            "The result comes back in <tool_response> tags.",
        ]
    )


def _with_first(messages: Sequence[Message], text: str, has_system: bool) -> list[Message]:
    """Put a text into the system message, or, where there can be none, in front of the first message."""
    first = messages[0] if messages else None
    role = first.get("role") if isinstance(first, Mapping) else None
    content = first.get("content") if isinstance(first, Mapping) else None
    if first is None or not isinstance(content, str | list) or (has_system and role != "system"):
        return [{"role": "system", "content": text}, *messages]
    joined: Any = f"{content}\n\n{text}" if role == "system" else f"{text}\n\n{content}"
    if isinstance(content, list):
        part = {"type": "text", "text": text}
        joined = [*content, part] if role == "system" else [part, *content]
    return [{**first, "content": joined}, *messages[1:]]


def _without_calls(messages: Sequence[Message]) -> list[Message]:
    """Write calls and their results as text.

    Results that follow each other become one message of the user, with what the user says next: many templates that
    lack tools want turns to alternate. Raises RequestError for malformed ones.
    """
    changed: list[Message] = []
    follows_result = False
    for index, given in enumerate(messages):
        if not isinstance(given, Mapping):
            changed.append(given)
            continue
        is_result = given.get("role") == "tool"
        message: Mapping[str, Any] = normal_message(index, given) if is_result or given.get("tool_calls") else given
        if is_result:
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            message = dict[str, Any](role="user", content=text)
        if follows_result and message.get("role") == "user":
            changed[-1] = {**message, "content": _joined(changed[-1]["content"], message.get("content"))}
        elif message.get("tool_calls"):
            calls = "\n".join(_call(one) for one in message["tool_calls"])
            content = message.get("content")
            kept = {name: value for name, value in message.items() if name != "tool_calls"}
            changed.append({**kept, "content": f"{content}\n{calls}" if content else calls})
        else:
            changed.append(message)
        follows_result = is_result
    return changed


def _joined(results: str, content: Any) -> Any:
    """Return the content of a message of the user behind the results of calls."""
    if isinstance(content, list):
        return [{"type": "text", "text": results}, *content]
    return f"{results}\n{content}" if content else results


def _call(call: Mapping[str, Any]) -> str:
    function = call["function"]
    written = {"name": function["name"], "arguments": function["arguments"]}
    return f"{OPEN}\n{json.dumps(written, ensure_ascii=False)}\n{CLOSE}"
