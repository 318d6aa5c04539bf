"""ToolParser: what the parsers of all formats have in common.

A parser is fed text and says what of it is content and what belongs to calls. It holds back only what may be the
beginning of a call. The arguments of a call come out in pieces, as they are generated, and each character is looked at
once. What turns out not to be a call before that comes out as the text it was.
"""

import json
import re
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pagoda.base.text import is_encodable

Schemas = Mapping[str, Mapping[str, Any]]
"""By tool: the JSON schemas of its arguments, by name."""
T = TypeVar("T")
Reading = Generator[None, None, T]
"""What yields wherever it needs more text, and returns a T."""
LONGEST_NAME = 256  # characters; what is longer is not the name of a tool
_LONGEST_HEAD = 512  # of a call in JSON, up to its arguments
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_STRUCTURE = r'["\[\]{}]|\\.?'


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call, or a piece of one.

    name: None in a piece that goes on with the call before it.   arguments: a string with JSON, as in OpenAI's format.
    """

    name: str | None
    arguments: str


def merged(pieces: Iterable[ToolCall]) -> list[ToolCall]:
    """Return the pieces with those of the same call made into one."""
    found: list[tuple[str | None, list[str]]] = []
    for piece in pieces:
        if piece.name is not None or not found:
            found.append((piece.name, []))
        found[-1][1].append(piece.arguments)
    return [ToolCall(name, "".join(arguments)) for name, arguments in found]


@dataclass(slots=True)
class Parsed:
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)


class ToolParser:
    """Reads one answer, whose format a subclass says in `read`; without one, everything is content.

    White space in front of calls, between them and after the last is dropped with them.
    text: what has come and is not read yet.   is_over: no more comes.   space: in front of the mark read last.
    """

    keeps_special_tokens = False
    """The text of special tokens is part of the format."""

    def __init__(self, schemas: Schemas | None = None) -> None:
        """schemas: of the arguments, for formats that do not say of which type a value is."""
        self.schemas = schemas or {}
        self.text = self.space = ""
        self.is_over = False
        self.parsed = Parsed()
        self._has_calls = False
        self._reading = self._read_all()

    def feed(self, text: str) -> Parsed:
        """Add text; return the content and the pieces of calls that are certain now."""
        self.text += text
        next(self._reading)
        parsed, self.parsed = self.parsed, Parsed()
        return parsed

    def end(self) -> Parsed:
        """End the text; return what was held back."""
        self.is_over = True
        return self.feed("")

    def read(self) -> Reading[None]:
        """Go through the text in its order. What is left when this returns is content."""
        yield from ()

    def _read_all(self) -> Reading[None]:
        yield from self.read()
        while True:
            sure = self.text if self.is_over and not self._has_calls else self.text.rstrip()
            self.parsed.content += sure
            self.text = self.text[len(sure) :]
            yield

    # ---- what `read` is made of; each returns at the end of the text, at the latest

    def begin(self, name: str, arguments: str = "") -> None:
        """Begin a call."""
        self.parsed.calls.append(ToolCall(name, arguments))
        self._has_calls = True

    def add(self, arguments: str) -> None:
        """Add to the arguments of the call."""
        if arguments:
            self.parsed.calls.append(ToolCall(None, arguments))

    def text_until(self, *marks: str, is_kept: bool = True) -> Reading[str]:
        """Read content up to the first of the marks, and that; return it, "" if none comes.

        is_kept: False: drop the content.
        """
        pattern = re.compile("|".join(map(re.escape, marks)))
        while True:
            found = pattern.search(self.text)
            until = found.start() if found else len(self.text) - max(held_back(self.text, mark) for mark in marks)
            content = self.text[:until].rstrip()
            self.parsed.content += content if is_kept else ""
            self.space, self.text = self.text[len(content) : until], self.text[len(content) :]
            if found:
                self.text = self.text[len(self.space) + len(found[0]) :]
                return found[0]
            if self.is_over:
                return ""
            yield

    def comes(self, word: str) -> Reading[bool]:
        """Return whether a word is next, after white space."""
        while word.startswith(start := self.text.lstrip()) and start != word and not self.is_over:
            yield
        return start.startswith(word)

    def take(self, word: str) -> Reading[str]:
        """Read white space and a word, if they are next; return both, else ""."""
        if not (yield from self.comes(word)):
            return ""
        size = self.text.index(word) + len(word)
        taken, self.text = self.text[:size], self.text[size:]
        return taken

    def head(self, pattern: "re.Pattern[str]") -> Reading["re.Match[str] | None"]:
        """Read what the pattern matches, if that is next and no longer than LONGEST_NAME."""
        while (found := pattern.match(self.text, 0, LONGEST_NAME)) is None:
            if self.is_over or len(self.text) >= LONGEST_NAME:
                return None
            yield
        self.text = self.text[found.end() :]
        return found

    def arguments(self, *marks: str) -> Reading[None]:
        """Pass on the JSON object that is next, up to its end, or to a mark outside of its strings."""
        end = ObjectEnd(*marks)
        while not (self.text.strip() or self.is_over):
            yield
        self.text = self.text.lstrip()
        while True:
            stop = end.find(self.text)
            size = stop if stop is not None else len(self.text) if self.is_over else end.at
            self.add(self.text[:size])
            self.text, end.at = self.text[size:], 0
            if stop is not None or self.is_over:
                return
            yield

    def json_call(self, *marks: str) -> Reading[str | None]:
        """Read {"name": ..., "arguments": {...}}. Return None, or if it is not a call, what was read.

        Its arguments are passed on as they are written if the name is in front of them.
        marks: where it ends although its object does not; not read.
        """
        if not (yield from self.comes("{")):
            return ""
        end = ObjectEnd(*marks)
        while True:
            found = _HEAD.match(self.text, 0, _LONGEST_HEAD)
            if found is not None and (name := _name(found["name"])) is not None:
                self.text = self.text[found.end() :]
                self.begin(name)
                yield from self.arguments(*marks)
                yield from self._rest_of_object(*marks)
                return None
            if (stop := end.find(self.text)) is not None or self.is_over:
                break
            yield
        read, self.text = self.text[:stop], "" if stop is None else self.text[stop:]
        call = _as_call(read)
        if call is not None:
            self.begin(call.name or "", call.arguments)
        return read if call is None else None

    def _rest_of_object(self, *marks: str) -> Reading[None]:
        end = ObjectEnd(*marks, depth=1)
        while (stop := end.find(self.text)) is None and not self.is_over:
            yield
        self.text = self.text[stop:] if stop is not None else ""


class ObjectEnd:
    """Finds the end of a JSON object while its text grows, looking at each character once."""

    def __init__(self, *marks: str, depth: int = 0) -> None:
        """marks: outside of strings, the object ends in front of one.   depth: of objects that have begun."""
        self.at = 0
        self._marks = marks
        self._structure = re.compile("|".join([*map(re.escape, marks), _STRUCTURE]), re.DOTALL)
        self._depth = depth
        self._in_string = False

    def find(self, text: str) -> int | None:
        """Return where the object or list that `text` begins with ends, or None.   text: what it was, and more."""
        until = len(text) - max((held_back(text, mark) for mark in self._marks), default=0)
        for found in self._structure.finditer(text, self.at, until):
            mark = found[0]
            if mark == "\\":
                self.at = found.start()  # what it escapes is not known yet
                return None
            self.at = found.end()
            if mark == '"':
                self._in_string = not self._in_string
            elif self._in_string or mark[0] == "\\":
                continue
            elif mark in self._marks:
                return found.start()
            else:
                self._depth += 1 if mark in "[{" else -1
                if not self._depth:
                    return self.at
        self.at = until
        return None


def held_back(text: str, marker: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `marker`."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0


def _name(quoted: str) -> str | None:
    """Return a name from JSON; None if it is not encodable.

    Models may write an escaped lone surrogate, which JSON allows and UTF-8 does not.
    """
    try:
        name = json.loads(quoted)
    except ValueError:
        return None
    return name if is_encodable(name) else None


def _as_call(text: str) -> ToolCall | None:
    """Return the call in {"name": ..., "arguments" or "parameters": ...}; None if it is not one or not encodable."""
    try:
        value = json.loads(text)
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
    except (ValueError, RecursionError):
        return None
    return ToolCall(value["name"], arguments) if is_encodable(value["name"] + arguments) else None
