"""LiteralReader: a value written in JSON or Python becomes JSON while its text grows."""

import json
import math
import re
from enum import Enum

_SPACE = re.compile(r"\s*")
_WORD = re.compile(r"""[^\s<=(),:'"\[\]{}]+""")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")  # \d is any script's digit
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_PLAIN = {quote: re.compile(rf"[^\\{quote}]+") for quote in "\"'"}
_HEX = r"u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}"
_ESCAPE = re.compile(rf"\\({_HEX}|.)", re.DOTALL)
_LONGEST_ESCAPE = 10
_MAX_DEPTH = 64
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": "", **{c: c for c in "\\'\"/"}}
_KEYWORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_CLOSING = {"{": "}", "[": "]", "(": ")"}
_WRITTEN = {"}": "}", "]": "]", ")": "]"}  # a tuple is a list


class _Next(Enum):
    VALUE = 1
    KEY = 2
    COLON = 3
    COMMA = 4


class LiteralReader:
    """Reads one value, looking at each character once. What it returns is always JSON once it has ended.

    at: where to go on in the text.   is_done: the value is complete.   is_broken: something else follows at `at`, or
    the text has ended; what was open is closed.
    Commas too many and brackets that are missing inside others are forgiven.
    """

    def __init__(self, takes_words: bool = True, in_object: bool = False) -> None:
        """takes_words: words that are not literals are strings.   in_object: an object's value has just been read."""
        self.at = 0
        self.is_done = self.is_broken = False
        self._takes_words = takes_words
        self._open = ["}"] if in_object else []  # what closes what is open
        self._next = _Next.COMMA if in_object else _Next.VALUE
        self._quote = ""
        self._has_comma = False  # in front of what is next, and not written yet
        self._has_items = [in_object]

    def read(self, text: str, is_over: bool) -> str:
        """Return the JSON of what can be read now.   text: what it was from its beginning, and more."""
        written: list[str] = []
        while not (self.is_done or self.is_broken):
            if not self._quote:
                found = _SPACE.match(text, self.at)
                assert found is not None
                self.at = found.end()
            read_next = self._in_string if self._quote else self._token
            if self.at == len(text) or not read_next(text, is_over, written):
                break
        if is_over and not self.is_done:
            self.is_broken = True
        if self.is_broken:
            written.append(self._close_all())
        return "".join(written)

    def _close_all(self) -> str:
        end = '"' if self._quote else ""
        is_key = self._quote and self._next is _Next.KEY
        if is_key or self._next is _Next.COLON:
            end += ": null"
        elif self._next is _Next.VALUE and not self._quote and self._is_due:
            end += "null"
        self._quote, self._next = "", _Next.COMMA
        while self._open:
            end += _WRITTEN[self._open.pop()]
        return end

    @property
    def _is_due(self) -> bool:
        """Whether a value must follow: of a key, or the only one."""
        return not self._open or self._open[-1] == "}"

    def _token(self, text: str, is_over: bool, written: list[str]) -> bool:
        """Read what is next outside of strings; return whether there was enough text."""
        char = text[self.at]
        if char in _WRITTEN:
            self._end(char, written)
        elif self._next is _Next.COLON:
            self._punctuation(char, ":", _Next.VALUE)
            written.append("" if self.is_broken else ": ")
        elif self._next is _Next.COMMA:
            self._has_comma = char == ","
            self._punctuation(char, ",", _Next.KEY if self._open[-1] == "}" else _Next.VALUE)
        elif char in "\"'":
            self._begin_item(written, '"')
            self._quote = char
            self.at += 1
        elif char in _CLOSING and self._next is _Next.VALUE and len(self._open) < _MAX_DEPTH:
            self._begin_item(written, "[" if char == "(" else char)
            self._open.append(_CLOSING[char])
            self._has_items.append(False)
            self._next = _Next.KEY if char == "{" else _Next.VALUE
            self.at += 1
        else:
            return self._word(text, is_over, written)
        return True

    def _punctuation(self, char: str, expected: str, following: _Next) -> None:
        if char == expected:
            self.at += 1
            self._next = following
        else:
            self.is_broken = True

    def _begin_item(self, written: list[str], begin: str) -> None:
        is_value = self._next is _Next.VALUE and self._open and self._open[-1] == "}"  # its key has the comma
        if self._has_comma and self._has_items[-1] and not is_value:
            written.append(", ")
        self._has_comma = False
        self._has_items[-1] = True
        written.append(begin)

    def _end(self, char: str, written: list[str]) -> None:
        """Close the innermost list or object that `char` closes, and those in it."""
        if char not in self._open:
            self.is_broken = True
            return
        if self._next is _Next.COLON:
            written.append(": null")
        elif self._next is _Next.VALUE and self._is_due:
            written.append("null")
        self.at += 1
        self._has_comma = False
        while True:
            innermost = self._open.pop()
            self._has_items.pop()
            written.append(_WRITTEN[innermost])
            if innermost == char:
                break
        self._next = _Next.VALUE
        self._end_item()

    def _end_item(self) -> None:
        self.is_done = not self._open
        self._next = _Next.COLON if self._next is _Next.KEY and self._open else _Next.COMMA

    def _word(self, text: str, is_over: bool, written: list[str]) -> bool:
        found = _WORD.match(text, self.at)
        if found is not None and found.end() == len(text) and not is_over:
            return False
        word = found[0] if found is not None else ""
        literal = _KEYWORDS.get(word) or _number(word)
        if not word or (literal is None and not self._takes_words):
            self.is_broken = True
            return True
        is_name = literal is None or self._next is _Next.KEY
        self._begin_item(written, json.dumps(word, ensure_ascii=False) if is_name else str(literal))
        self.at += len(word)
        self._end_item()
        return True

    def _in_string(self, text: str, is_over: bool, written: list[str]) -> bool:
        left = len(text) - self.at
        if text[self.at] == self._quote:
            self._quote = ""
            self.at += 1
            written.append('"')
            self._end_item()
        elif (plain := _PLAIN[self._quote].match(text, self.at)) is not None:
            written.append(json.dumps(plain[0], ensure_ascii=False)[1:-1])
            self.at = plain.end()
        elif left >= _LONGEST_ESCAPE or (left > 1 and (is_over or text[self.at + 1] not in "uUx")):
            escape = _ESCAPE.match(text, self.at)
            assert escape is not None  # what is not plain is a backslash
            written.append(_unescaped(escape[1]))
            self.at = escape.end()
        elif is_over:  # a backslash at the end
            self.at += 1
        else:
            return False
        return True


def as_json(text: str) -> str | None:
    """Return the JSON of a text that is one value in JSON or Python; None for another."""
    reader = LiteralReader(takes_words=False)
    written = reader.read(text, is_over=True)
    return written if reader.is_done and not text[reader.at :].strip() else None


def _number(word: str) -> str | None:
    """Return a number as JSON; None for what is not a finite one."""
    if _NUMBER.fullmatch(word) is None:
        return None
    if _JSON_NUMBER.fullmatch(word) is not None:
        return word if math.isfinite(float(word)) else None
    if (plain := word.removeprefix("+")) != word:
        return _number(plain)
    if word.removeprefix("-").isdigit():  # Python has no 01 either
        return None
    value = float(word)
    return json.dumps(value) if math.isfinite(value) else None


def _unescaped(code: str) -> str:
    """Return what an escape is, as JSON. Half of a pair of surrogates is written as JSON's own escape."""
    value = int(code[1:], 16) if len(code) > 1 else -1
    if 0xD800 <= value < 0xE000:
        return f"\\u{value:04x}"
    # Python keeps the backslash of an escape that it does not know.
    text = chr(value) if 0 <= value < 0x110000 else _ESCAPED.get(code, "\\" + code)
    return json.dumps(text, ensure_ascii=False)[1:-1]
