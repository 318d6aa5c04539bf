"""PythonicParser: the answer is a Python list of calls, whose values become JSON as they are written."""

import json
import math
import re
from typing import NoReturn

from pagoda.server.tool_parsers.base import Reading, ToolParser

_MAX_DEPTH = 64
_WORD = re.compile(r"""[^\s=(),:'"\[\]{}]+""")
_NUMBER = re.compile(r"-?\d+(?:\.\d*)?(?:[eE][+-]?\d+)?")
_HEX = r"u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}"
_PLAIN = {quote: re.compile(rf"(?:[^\\{quote}])+") for quote in "\"'"}
_ESCAPE = re.compile(rf"\\({_HEX}|.)", re.DOTALL)
_LONGEST_ESCAPE = 10
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": "", **{c: c for c in "\\'\"/"}}
_KEYWORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}


class _OtherText(Exception):
    """This is not a list of calls, or the text ends in the middle of one."""


class PythonicParser(ToolParser):
    """Llama 3.2 and 4: the whole answer is [name(key=value, ...), ...], with Python's or JSON's literals.

    A list of anything else comes out as text. Text after the list is content.
    """

    def read(self) -> Reading[None]:
        self._is_certain = False  # that what is read belongs to a call
        self._before = ""  # what has been read, and comes out as text if that turns out not to be so
        try:
            yield from self._expect("[")
            while True:
                yield from self._call()
                self._is_certain = False
                if (yield from self._expect(",", "]")) == "]":
                    return
        except _OtherText:
            self.text = self._before + self.text

    def begin(self, name: str, arguments: str = "") -> None:
        super().begin(name, arguments)
        self._is_certain, self._before = True, ""

    def _call(self) -> Reading[None]:
        name, keys = (yield from self._word()), set[str]()
        yield from self._expect("(")
        if (yield from self._peek()) == ")":
            yield from self._expect(")")
            return self.begin(name, "{}")
        while True:
            key = yield from self._word()
            if key in keys:
                raise _OtherText
            yield from self._expect("=")
            if not keys:
                self.begin(name)
            self.add(f"{', ' if keys else '{'}{json.dumps(key, ensure_ascii=False)}: ")
            keys.add(key)
            yield from self._value(0)
            if (yield from self._expect(",", ")")) == ")":
                return self.add("}")

    def _peek(self) -> Reading[str]:
        """Return the next character that is not white space."""
        while not (start := self.text.lstrip()):
            if self.is_over:
                self._end_early()
            yield
        return start[0]

    def _end_early(self) -> NoReturn:
        if self._is_certain:
            self.text = ""
        raise _OtherText

    def _read(self, size: int) -> str:
        read, self.text = self.text[:size], self.text[size:]
        self._before += "" if self._is_certain else read
        return read

    def _expect(self, *marks: str) -> Reading[str]:
        mark = yield from self._peek()
        if mark not in marks:
            raise _OtherText
        self._read(self.text.index(mark) + 1)
        return mark

    def _word(self) -> Reading[str]:
        """Read a name, number or keyword."""
        yield from self._peek()
        begin = len(self.text) - len(self.text.lstrip())
        while (found := _WORD.match(self.text, begin)) is not None and found.end() == len(self.text):
            if self.is_over:
                break
            yield
        if found is None:
            raise _OtherText
        self._read(found.end())
        return found[0]

    def _value(self, depth: int) -> Reading[None]:
        mark = yield from self._peek()
        if depth > _MAX_DEPTH:
            raise _OtherText
        if mark in "\"'":
            yield from self._string()
        elif mark in "[{":
            yield from self._items(mark, depth)
        else:
            word = yield from self._word()
            value = _KEYWORDS.get(word) or _number(word)
            if value is None and self.is_over and not self.text:
                self._end_early()
            self.add(json.dumps(word, ensure_ascii=False) if value is None else value)  # the call has begun

    def _items(self, mark: str, depth: int) -> Reading[None]:
        """Pass on a list or a dict."""
        close = "]" if mark == "[" else "}"
        yield from self._expect(mark)
        self.add(mark)
        comma = ""
        while (yield from self._peek()) != close:
            if comma:
                yield from self._expect(",")
            self.add(comma)
            if mark == "{":
                yield from self._string()
                yield from self._expect(":")
                self.add(": ")
            yield from self._value(depth + 1)
            comma = ", "
        yield from self._expect(close)
        self.add(close)

    def _string(self) -> Reading[None]:
        """Pass on a string, piece by piece."""
        quote = yield from self._expect('"', "'")
        self.add('"')
        while not self.text.startswith(quote):
            if (plain := _PLAIN[quote].match(self.text)) is not None:
                self.add(json.dumps(self._read(plain.end()), ensure_ascii=False)[1:-1])
            elif len(self.text) >= _LONGEST_ESCAPE or (self.text[1:] and (self.is_over or self.text[1] not in "uUx")):
                escape = _ESCAPE.match(self.text)
                assert escape is not None  # what is not plain is a backslash
                self._read(escape.end())
                self.add(_unescaped(escape[1]))
            elif self.is_over:
                self._end_early()
            else:
                yield
        self._read(1)
        self.add('"')


def _number(word: str) -> str | None:
    """Return a number as JSON; None for what is not a finite one."""
    if _NUMBER.fullmatch(word) is None:
        return None
    try:
        value = float(word) if word.endswith(".") else json.loads(word)
    except ValueError:  # Python has no 01 either
        return None
    return json.dumps(value) if math.isfinite(value) else None


def _unescaped(code: str) -> str:
    """Return what an escape is, as JSON. Half of a pair of surrogates is written as JSON's own escape."""
    value = int(code[1:], 16) if len(code) > 1 else -1
    if 0xD800 <= value < 0xE000:
        return f"\\u{value:04x}"
    # Python keeps the backslash of an escape that it does not know.
    text = chr(value) if 0 <= value < 0x110000 else _ESCAPED.get(code, "\\" + code)
    return json.dumps(text, ensure_ascii=False)[1:-1]
