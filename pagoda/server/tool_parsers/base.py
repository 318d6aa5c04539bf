"""What tool parsers have in common. A parser is fed text and says what of it is content and what belongs to calls.

It holds back only what may be the beginning of a call. Where a format allows it, the arguments of a call come out in
pieces, as they are generated. What turns out not to be a call before that comes out as the text it was.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from pagoda.base.text import is_encodable

_STRUCTURE = re.compile(r'["\[\]{}]|\\.?', re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call, or a piece of one.

    name: None in a piece that goes on with the call before it.   arguments: a string with JSON, as in OpenAI's format.
    """

    name: str | None
    arguments: str


def whole_calls(pieces: Iterable[ToolCall]) -> list[ToolCall]:
    """Return the calls that the pieces are of."""
    found: list[tuple[str, list[str]]] = []
    for piece in pieces:
        if piece.name is not None:
            found.append((piece.name, []))
        found[-1][1].append(piece.arguments)
    return [ToolCall(name, "".join(arguments)) for name, arguments in found]


@dataclass(slots=True)
class Parsed:
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)


class ToolParser(Protocol):
    def feed(self, text: str) -> Parsed:
        """Add text; return the content and the pieces of calls that are certain now."""
        ...

    def end(self) -> Parsed:
        """End the text; return what was held back."""
        ...


class ObjectEnd:
    """Finds the end of a JSON object while its text grows, looking at each character once."""

    def __init__(self) -> None:
        self.at = 0
        self._depth = 0
        self._in_string = False

    def find(self, text: str) -> int | None:
        """Return where the object or list that `text` begins with ends, or None.   text: what it was, and more."""
        for found in _STRUCTURE.finditer(text, self.at):
            mark = found[0]
            if mark == "\\":
                self.at = found.start()  # what it escapes is not known yet
                return None
            self.at = found.end()
            if mark == '"':
                self._in_string = not self._in_string
            elif not self._in_string and mark[0] != "\\":
                self._depth += 1 if mark in "[{" else -1
                if not self._depth:
                    return self.at
        self.at = len(text)
        return None


class ArgumentsStream:
    """Passes on the JSON object that begins a text, piece by piece, up to its end or to `close`, the mark after a call.

    Each character is looked at once. White space in front of the object is dropped.
    """

    def __init__(self, close: str) -> None:
        self._close = close
        self._has_begun = False
        self._end = ObjectEnd()
        self._seen = ""  # not passed on yet
        self.is_done = False

    def feed(self, text: str) -> tuple[str, str]:
        """Return what of the text belongs to the object, and the rest, which is empty until the object ends."""
        self._seen += text
        if not self._has_begun:
            self._seen = self._seen.lstrip()
            self._has_begun = bool(self._seen)
        at = self._seen.find(self._close)
        known = self._seen[:at] if at >= 0 else self._seen[: len(self._seen) - held_back(self._seen, self._close)]
        end = self._end.find(known)
        if end is None and at < 0:
            passed, self._seen = self._seen[: self._end.at], self._seen[self._end.at :]
            self._end.at = 0
            return passed, ""
        self.is_done = True
        end = at if end is None else end
        return self._seen[:end], self._seen[end:]

    def rest(self) -> str:
        """Return what was held back, at the end of the text."""
        return self._seen


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
