"""Transcript: the messages of a conversation in the form that chat templates read, made of another API's."""

import re
from collections.abc import Sequence
from typing import Any

_GROWING = {"system": {"content": "\n\n"}, "assistant": {"content": "\n", "reasoning_content": ""}}
"""By role: the texts that may grow, with what is between their parts."""


class Transcript:
    """Collects messages, in forms that most templates take, in time that grows with them as a straight line.

    messages: those so far. Texts that grow are lists of their parts until `join_texts`.
    places: of each message, what errors call it.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places: list[str] = []

    def add(self, place: str, message: dict[str, Any]) -> None:
        """Add a message; one of the user to that before it: many templates want turns to alternate."""
        last = self.messages[-1] if self.messages else {}
        if message["role"] == "user" and last.get("role") == "user":
            if isinstance(last["content"], str):
                last["content"] = _as_parts(last["content"])
            last["content"] += _as_parts(message["content"])
        else:
            self.messages.append(message)
            self.places.append(place)

    def add_parts(self, place: str, parts: Sequence[dict[str, Any]]) -> None:
        """Add what the user says, if that is anything; a single text is not a list."""
        if parts:
            is_text = len(parts) == 1 and "text" in parts[0]
            self.add(place, {"role": "user", "content": parts[0]["text"] if is_text else list(parts)})

    def add_system(self, place: str, text: str) -> None:
        """Add a system message: most templates take only one at the start, so later ones are the user's, marked."""
        if not self.messages:
            self.add(place, {"role": "system", "content": [text]})
        elif self.messages[-1]["role"] == "system":
            self.messages[-1]["content"].append(text)
        else:
            self.add(place, {"role": "user", "content": f"<system>\n{text}\n</system>\n"})

    def join_texts(self) -> None:
        """Make texts of what was collected of them."""
        for message in self.messages:
            for name, separator in _GROWING.get(message["role"], {}).items():
                if isinstance(parts := message.get(name), list):
                    message[name] = separator.join(parts)

    def origin(self, param: str) -> str:
        """Return what errors call a field of a message, or the field."""
        found = re.match(r"messages\[(\d+)\]", param)
        return self.places[int(found[1])] if found else param


def _as_parts(content: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def function_tool(
    name: str, parameters: dict[str, Any] | None, description: str | None = None, strict: bool | None = None
) -> dict[str, Any]:
    """Return a tool as OpenAI's API writes them for conversations."""
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    function["parameters"] = parameters
    if strict is not None:
        function["strict"] = strict
    return {"type": "function", "function": function}
