"""What tool parsers have in common. A parser is fed text and says what of it is content and which calls are complete.

It holds back only what may be the beginning of a call. A malformed call comes out as the text it was: none of it is
lost.
"""

import json
import re
from dataclasses import dataclass, field
from typing import Protocol

from pagoda.base.text import is_encodable

_STRUCTURE = re.compile(r'["\[\]{}]|\\.?', re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call.   arguments: a string with JSON, as in OpenAI's format."""

    name: str
    arguments: str


@dataclass(slots=True)
class Parsed:
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)


class ToolParser(Protocol):
    def feed(self, text: str) -> Parsed:
        """Add text; return the content and calls that are complete now."""
        ...

    def end(self) -> Parsed:
        """End the text; return what was held back."""
        ...


class ObjectEnd:
    """Finds the end of a JSON object while its text grows, looking at each character once."""

    def __init__(self) -> None:
        self._at = 0
        self._depth = 0
        self._in_string = False

    def find(self, text: str) -> int | None:
        """Return where the object or list that `text` begins with ends, or None.   text: what it was, and more."""
        for found in _STRUCTURE.finditer(text, self._at):
            mark = found[0]
            if mark == "\\":
                self._at = found.start()  # what it escapes is not known yet
                return None
            self._at = found.end()
            if mark == '"':
                self._in_string = not self._in_string
            elif not self._in_string and mark[0] != "\\":
                self._depth += 1 if mark in "[{" else -1
                if not self._depth:
                    return self._at
        self._at = len(text)
        return None


def held_back(text: str, marker: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `marker`."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0


def as_call(value: object) -> ToolCall | None:
    """Return the call in {"name": ..., "arguments" or "parameters": ...}; None if it is not a call or not encodable.

    Models may write an escaped lone surrogate, which JSON allows and UTF-8 does not.
    """
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(value["name"], arguments) if is_encodable(value["name"] + arguments) else None
