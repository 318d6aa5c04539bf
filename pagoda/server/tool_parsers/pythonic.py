"""PythonicParser: the answer is a Python list of calls."""

import json
import math
import re
from typing import Any

from pagoda.server.tool_parsers.base import Parsed, ToolCall, as_call

_MAX_DEPTH = 64
_TOKEN = re.compile(
    r"""\s*(?:(?P<string>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')"""
    r"""|(?P<number>-?\d+(?:\.\d*)?(?:[eE][+-]?\d+)?(?![^\s,)\]}]))"""
    r"""|(?P<name>[^\s=(),:'"\[\]{}]+)|(?P<mark>[=(),:\[\]{}]))""",
    re.DOTALL,
)
_END = re.compile(r"\)\s*\]\s*$")
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": "", **{c: c for c in "\\'\"/"}}
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}


class PythonicParser:
    """Llama 3.2 and 4: the whole answer is [name(key=value, ...), ...], with Python's or JSON's literals.

    A list of anything else comes out as text, and so does one that is cut off. Text after the list is content.
    """

    def __init__(self) -> None:
        self._text = ""
        self._is_list: bool | None = None  # None: not known yet, as long as there is only white space
        self._has_calls = False

    def feed(self, text: str) -> Parsed:
        self._text += text
        if self._is_list is None:
            start = self._text.lstrip()
            if not start:
                return Parsed()
            self._is_list = start.startswith("[") and not self._has_calls
        if not self._is_list:
            content, self._text = self._text, ""
            return Parsed(content)
        return self._take_list() if _END.search(self._text) else Parsed()

    def end(self) -> Parsed:
        parsed = self._take_list() if self._is_list else Parsed()
        if self._text.strip() or not self._has_calls:
            parsed.content += self._text
        self._text = ""
        return parsed

    def _take_list(self) -> Parsed:
        """Take the list of calls that the text begins with; nothing if it continues, and as content anything else."""
        parsed = Parsed()
        try:
            parsed.calls, end = read_calls(self._text)
        except _Unfinished:
            return parsed
        except (ValueError, KeyError, OverflowError):
            self._is_list = False
            parsed.content, self._text = self._text, ""
            return parsed
        rest, self._text = self._text[end:], ""
        self._is_list, self._has_calls = None, True
        return Parsed(self.feed(rest).content, parsed.calls)


class _Unfinished(ValueError):
    """The text ends in the middle."""


def read_calls(text: str) -> tuple[list[ToolCall], int]:
    """Return the calls of the list that `text` begins with, and where it ends. Raises ValueError if it is not one."""
    reader = _Reader(text)
    reader.expect("[")
    calls = [_call(reader)]
    while reader.expect(",", "]") == ",":
        calls.append(_call(reader))
    return calls, reader.at


def _call(reader: "_Reader") -> ToolCall:
    name, arguments = reader.name(), dict[str, Any]()
    reader.expect("(")
    is_last = reader.peek() == ")"
    if is_last:
        reader.expect(")")
    while not is_last:
        key = reader.name()
        if key in arguments:
            raise ValueError("an argument is given twice")
        reader.expect("=")
        arguments[key] = reader.value()
        is_last = reader.expect(",", ")") == ")"
    call = as_call({"name": name, "arguments": arguments})
    if call is None:
        raise ValueError("not encodable")
    return call


class _Reader:
    """Reads names, marks and literals one after the other; all methods raise ValueError for anything else."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.at = 0

    def _next(self) -> re.Match[str]:
        found = _TOKEN.match(self._text, self.at)
        if found is None:
            rest = self._text[self.at :].lstrip()
            raise _Unfinished if not rest or rest[0] in "\"'" else ValueError("not a literal")
        return found

    def peek(self) -> str:
        return self._next()[0].strip()

    def expect(self, *marks: str) -> str:
        found = self._next()
        if found["mark"] not in marks:
            raise ValueError(f"expected {marks}")
        self.at = found.end()
        return found["mark"]

    def name(self) -> str:
        found = self._next()
        if found["name"] is None:
            raise ValueError("expected a name")
        self.at = found.end()
        return found["name"]

    def value(self, depth: int = 0) -> Any:
        if depth > _MAX_DEPTH:
            raise ValueError("too deep")
        found = self._next()
        self.at = found.end()
        if found["string"] is not None:
            return _string(found["string"])
        if found["number"] is not None:
            return _number(found["number"])
        if found["name"] is not None:
            return _WORDS[found["name"]]
        if found["mark"] == "[":
            return [value for _, value in self._items("]", depth)]
        if found["mark"] == "{":
            return dict(self._items("}", depth))
        raise ValueError("expected a value")

    def _items(self, close: str, depth: int) -> list[tuple[str, Any]]:
        """Read the rest of a list, with empty keys, or of a dict."""
        items: list[tuple[str, Any]] = []
        while self.peek() != close:
            if items:
                self.expect(",")
            key = self.value(depth + 1) if close == "}" else ""
            if not isinstance(key, str):
                raise ValueError("keys are strings")
            if close == "}":
                self.expect(":")
            items.append((key, self.value(depth + 1)))
        self.expect(close)
        return items


def _number(text: str) -> int | float:
    value = json.loads(text) if not text.endswith(".") else float(text)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("too large")
    return value


def _string(quoted: str) -> str:
    """Return the text of a literal. Two escapes may be the halves of one character, as in JSON."""
    text = _ESCAPE.sub(_unescape, quoted[1:-1])
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")


def _unescape(found: re.Match[str]) -> str:
    code = found[1]
    if len(code) > 1:
        return chr(int(code[1:], 16))
    return _ESCAPED.get(code, found[0])  # Python keeps the backslash of an escape that it does not know
