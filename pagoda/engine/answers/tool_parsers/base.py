"""ToolParser: what the parsers of all formats have in common.

A parser is fed text and says what of it is content and what belongs to calls. It holds back only what may be the
beginning of a call. The arguments of a call come out in pieces, as they are generated, and each character is looked at
once. What turns out not to be a call before that comes out as the text it was.
"""

import json
import re
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from pagoda.base.text import is_encodable
from pagoda.engine.answers.tool_parsers.argument_types import ArgumentTypes
from pagoda.engine.answers.tool_parsers.literals import LiteralReader
from pagoda.engine.grammars.tool_grammar import CallFormat

T = TypeVar("T")
Reading = Generator[None, None, T]
"""What yields wherever it needs more text, and returns a T."""
LONGEST_NAME = 256  # characters; what is longer is not the name of a tool
_LONGEST_HEAD = 512  # of a call in JSON, up to its arguments
_CALL_KEYS = ("name", "arguments", "parameters")
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call, or a piece of one.

    name: None in a piece that goes on with the call before it.   arguments: a string with JSON, as in OpenAI's format:
    those of all pieces of a call are an object.   id: if the model gives calls ids of its own.
    """

    name: str | None
    arguments: str
    id: str | None = None


def merged(pieces: Iterable[ToolCall]) -> list[ToolCall]:
    """Return the pieces with those of the same call made into one."""
    found: list[tuple[ToolCall, list[str]]] = []
    for piece in pieces:
        if piece.name is not None or not found:
            found.append((piece, []))
        found[-1][1].append(piece.arguments)
    return [ToolCall(first.name, "".join(arguments), first.id) for first, arguments in found]


@dataclass(slots=True)
class Parsed:
    """What was read.   pieces: content and pieces of calls, in their order."""

    pieces: list[str | ToolCall] = field(default_factory=list[str | ToolCall])

    def add(self, piece: str | ToolCall) -> None:
        """Add a piece; an empty text is none."""
        if piece != "":
            self.pieces.append(piece)

    @property
    def content(self) -> str:
        return "".join(piece for piece in self.pieces if isinstance(piece, str))

    @property
    def calls(self) -> list[ToolCall]:
        return [piece for piece in self.pieces if isinstance(piece, ToolCall)]


class ToolParser:
    """Reads one answer, whose format a subclass says in `read`; without one, everything is content.

    MARKS: a chat template that has all of them uses the format.   GRAMMAR: of calls in it; None: they are not enforced.
    VLLMS_NAMES: what vLLM calls the format.
    White space in front of calls, between them and after the last is dropped with them.
    text: what has come and is not read yet.   is_over: no more comes.   space: in front of the mark read last.
    """

    MARKS: ClassVar[tuple[str, ...]] = ()
    GRAMMAR: ClassVar[CallFormat | None] = None
    VLLMS_NAMES: ClassVar[tuple[str, ...]] = ()
    keeps_special_tokens = False
    """The text of special tokens is part of the format."""
    reads_types = False
    """The format does not say of which type a value is."""

    def __init__(self, tools: Mapping[str, ArgumentTypes] | None = None) -> None:
        """tools: those that may be called, by name; the types of their arguments matter only if `reads_types`."""
        self.tools = tools or {}
        self.text = self.space = ""
        self.is_over = False
        self.parsed = Parsed()
        self._has_calls = False
        self._reading = self._read_all()

    @classmethod
    def is_of(cls, template: str) -> bool:
        """Return whether a chat template uses the format."""
        return bool(cls.MARKS) and all(mark in template for mark in cls.MARKS)

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
            self.parsed.add(sure)
            self.text = self.text[len(sure) :]
            yield

    # ---- what `read` is made of; each returns at the end of the text, at the latest

    def begin(self, name: str, arguments: str = "", call_id: str | None = None) -> None:
        """Begin a call."""
        self.parsed.add(ToolCall(name, arguments, call_id))
        self._has_calls = True

    def add(self, arguments: str) -> None:
        """Add to the arguments of the call."""
        if arguments:
            self.parsed.add(ToolCall(None, arguments))

    def text_until(self, *marks: str) -> Reading[str]:
        """Read content up to the first of the marks, and that; return it, "" if none comes."""
        pattern = re.compile("|".join(map(re.escape, marks)))
        while True:
            found = pattern.search(self.text)
            until = found.start() if found else len(self.text) - max(held_back(self.text, mark) for mark in marks)
            content = self.text[:until].rstrip()
            self.parsed.add(content)
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

    def arguments(self) -> Reading[bool]:
        """Pass on the object that is next, {} if there is none; return whether it is complete."""
        if (yield from self.comes("{")):
            return (yield from self.value())
        self.add("{}")
        return True

    def value(self) -> Reading[bool]:
        """Pass on the value that is next as JSON, up to its end or what cannot be a part of it; return which."""
        reader = LiteralReader()
        while True:
            self.add(reader.read(self.text, self.is_over))
            self.text, reader.at = self.text[reader.at :], 0
            if reader.is_done or reader.is_broken:
                return reader.is_done
            yield

    def json_call(self, is_marked: bool = True) -> Reading[str | None]:
        """Read {"name": ..., "arguments": {...}}. Return None, or if it is not a call, what was read.

        Its arguments are passed on as they come if the name is in front of them.
        is_marked: the format's mark is in front. Without it, an object that has no arguments is only a call if it is
        the name of a known tool and nothing else: any answer in JSON may have a name.
        """
        if not (yield from self.comes("{")):
            return ""
        reader, written = LiteralReader(takes_words=False), ""
        while True:
            found = _HEAD.match(self.text, 0, _LONGEST_HEAD)
            if found is not None and (name := _name(found["name"])) is not None:
                self.text = self.text[found.end() :]
                self.begin(name)
                if (yield from self.value()):
                    yield from self._end_of_object()
                return None
            written += reader.read(self.text, self.is_over)
            if reader.is_done or reader.is_broken:
                break
            yield
        read, self.text = self.text[: reader.at], self.text[reader.at :]
        members = _members(written) if reader.is_done else {}
        call = _as_call(members)
        if members is None or call is None or not (is_marked or self._is_sure(members)):
            return read
        self.begin(call.name or "", call.arguments)
        self._keep({name: value for name, value in members.items() if name not in _CALL_KEYS})
        return None

    def _is_sure(self, members: dict[str, Any]) -> bool:
        """Return whether an object without a mark is a call."""
        has_arguments = "arguments" in members or "parameters" in members
        return has_arguments or (len(members) == 1 and members["name"] in self.tools)

    def _end_of_object(self) -> Reading[None]:
        """Read the end of the object whose arguments were read, and its other members."""
        reader, written = LiteralReader(in_object=True), "{"
        while True:
            written += reader.read(self.text, self.is_over)
            if reader.is_done or reader.is_broken:
                break
            yield
        members = _members(written.replace("{, ", "{", 1)) if reader.is_done else None
        if members is not None:
            self.text = self.text[reader.at :]
            self._keep(members)

    def _keep(self, members: dict[str, Any]) -> None:
        """Make content of a call's further members, but for those that only describe it."""
        kept = {name: value for name, value in members.items() if name not in ("id", "type")}
        written = json.dumps(kept, ensure_ascii=False) if kept else ""
        self.parsed.add(written if is_encodable(written) else json.dumps(kept))


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


def _members(written: str) -> dict[str, Any] | None:
    """Return the members of an object in JSON; None if one occurs twice, or it is nested too deeply."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(members := dict(pairs)) < len(pairs):
            raise ValueError
        return members

    try:
        return json.loads(written, object_pairs_hook=unique)
    except (ValueError, RecursionError):
        return None


def _as_call(members: dict[str, Any] | None) -> ToolCall | None:
    """Return the call in {"name": ..., "arguments" or "parameters": ...}; None if it is not one or not encodable.

    Arguments may be an object, a string with the JSON of one, or nothing.
    """
    given = [name for name in ("arguments", "parameters") if members and name in members]
    if members is None or not isinstance(members.get("name"), str) or len(given) > 1:
        return None
    arguments = members[given[0]] if given else {}
    try:
        if isinstance(arguments, str):
            arguments = json.loads(arguments) if arguments.strip() else {}
        if not isinstance(arguments, dict | None):
            return None
        written = json.dumps(arguments or {}, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    return ToolCall(members["name"], written) if is_encodable(members["name"] + written) else None
