"""Parsers of formats in which a call is a name and its arguments between marks, the arguments as JSON or one by one."""

import json
import re
from collections.abc import Mapping
from typing import Any

from pagoda.server.tool_parsers.base import ArgumentsStream, Parsed, ToolCall, held_back

_LONGEST_NAME = 256  # characters; what is longer is not the name of a tool
Schemas = Mapping[str, Mapping[str, Any]]
"""By tool: the JSON schemas of its arguments, by name."""


class NamedCallParser:
    """A mark, the name, another mark, the arguments as JSON, which come out as they are written.

    The marks are special tokens, so these stay in the text.   SECTION: marks around all calls, which are dropped.
    """

    OPEN, ARGUMENTS, CLOSE = "", "", ""
    SECTION: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._text = ""
        self._inside = False
        self._has_calls = False
        self._arguments: ArgumentsStream | None = None

    def feed(self, text: str) -> Parsed:
        self._text += text
        parsed = Parsed()
        while self._advance(parsed):
            pass
        return parsed

    def name_of(self, written: str) -> str:
        """Return the name of the function from what is written between the marks."""
        return written.strip()

    def _advance(self, parsed: Parsed) -> bool:
        if self._arguments is not None:
            passed, self._text = self._arguments.feed(self._text)
            if passed:
                parsed.calls.append(ToolCall(None, passed))
            if not self._arguments.is_done:
                return False
            self._arguments, self._inside = None, False
            return True
        if self._inside:
            name, mark, rest = self._text.partition(self.ARGUMENTS)
            if not mark and len(name) > _LONGEST_NAME:
                parsed.content += self.OPEN
                self._inside = False
                return True
            if not mark:
                return False
            parsed.calls.append(ToolCall(self.name_of(name), ""))
            self._has_calls, self._text = True, rest
            self._arguments = ArgumentsStream(self.CLOSE or self.OPEN)
            return True
        marks = tuple(filter(None, (self.OPEN, self.CLOSE, *self.SECTION)))
        found = re.search("|".join(map(re.escape, marks)), self._text)
        sure = self._text[: found.start() if found else len(self._text) - max(held_back(self._text, m) for m in marks)]
        content = sure.rstrip()
        parsed.content += content
        if found is None:
            self._text = self._text[len(content) :]
            return False
        self._text, self._inside = self._text[found.end() :], found[0] == self.OPEN
        return True

    def end(self) -> Parsed:
        parsed = Parsed()
        if self._arguments is not None:
            if rest := self._arguments.rest():
                parsed.calls.append(ToolCall(None, rest))
        elif self._inside:
            parsed.content = self.OPEN + self._text
        elif self._text.strip() or not self._has_calls:
            parsed.content = self._text
        self._text, self._inside, self._arguments = "", False, None
        return parsed


class KimiParser(NamedCallParser):
    """Kimi K2: <|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|> in a section."""

    OPEN, ARGUMENTS, CLOSE = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")

    def name_of(self, written: str) -> str:
        return written.strip().removeprefix("functions.").partition(":")[0]


class Mistral3Parser(NamedCallParser):
    """Mistral 3 and later: [TOOL_CALLS]NAME[ARGS]{...}, any number of them."""

    OPEN, ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"


class TaggedArgumentsParser:
    """Each argument between tags of its own, as text: it becomes JSON by the type that the tool's schema says.

    CALL: the name, at the beginning of a call.   ARGUMENT: the name of an argument, up to the beginning of its value.
    PADDING: what may be on either side of a value without being part of it.
    Strings come out as they are written, other values when they are complete.
    """

    OPEN, CLOSE = "<tool_call>", "</tool_call>"
    CALL: re.Pattern[str]
    ARGUMENT: re.Pattern[str]
    END = ""  # of a value
    PADDING = ""

    def __init__(self, schemas: Schemas) -> None:
        self._schemas = schemas
        self._text = ""
        self._state = "text"
        self._space = ""  # in front of a call
        self._types: Mapping[str, Any] = {}
        self._is_string = False
        self._num_arguments = 0
        self._num_searched = 0  # characters of a value that do not begin its end
        self._has_calls = False

    def feed(self, text: str) -> Parsed:
        self._text += text
        parsed = Parsed()
        while getattr(self, f"_in_{self._state}")(parsed):
            pass
        return parsed

    def _in_text(self, parsed: Parsed) -> bool:
        at = self._text.find(self.OPEN)
        sure = self._text[:at] if at >= 0 else self._text[: len(self._text) - held_back(self._text, self.OPEN)]
        content = sure.rstrip()
        parsed.content += content
        if at < 0:
            self._text = self._text[len(content) :]
            return False
        self._space = sure[len(content) :]
        self._text, self._state = self._text[at + len(self.OPEN) :], "head"
        return True

    def _in_head(self, parsed: Parsed) -> bool:
        found = self.CALL.match(self._text)
        if found is None and len(self._text) > _LONGEST_NAME:
            parsed.content += self._space + self.OPEN
            self._state = "text"
            return True
        if found is None:
            return False
        name = found["name"].strip()
        self._types = self._schemas.get(name, {})
        self._text, self._state, self._num_arguments = self._text[found.end() :], "call", 0
        self._has_calls = True
        parsed.calls.append(ToolCall(name, "{"))
        return True

    def _in_call(self, parsed: Parsed) -> bool:
        """Between the arguments."""
        close, found = self._text.find(self.CLOSE), self.ARGUMENT.search(self._text)
        if close >= 0 and (found is None or close < found.start()):
            parsed.calls.append(ToolCall(None, "}"))
            self._text, self._state = self._text[close + len(self.CLOSE) :], "text"
            return True
        if found is None:
            self._text = self._text[-2 * _LONGEST_NAME :]
            return False
        name = found["name"].strip()
        self._is_string = _is_string(self._types.get(name))
        self._text, self._state = self._text[found.end() :], "padding"
        comma = ", " if self._num_arguments else ""
        self._num_arguments += 1
        quote = '"' if self._is_string else ""
        parsed.calls.append(ToolCall(None, f"{comma}{json.dumps(name, ensure_ascii=False)}: {quote}"))
        return True

    def _in_padding(self, parsed: Parsed) -> bool:
        """In front of a value."""
        if not self._text:
            return False
        self._text, self._state = self._text.removeprefix(self.PADDING), "value"
        return True

    def _in_value(self, parsed: Parsed) -> bool:
        at = self._text.find(self.END, max(0, self._num_searched - len(self.END)))
        self._num_searched = 0 if self._is_string or at >= 0 else len(self._text)
        if at >= 0:
            end = at - len(self.PADDING) if self._text.endswith(self.PADDING, 0, at) else at
        else:
            end = len(self._text) - max(held_back(self._text, mark) for mark in (self.END, self.PADDING + self.END))
        if self._is_string:
            piece = json.dumps(self._text[:end], ensure_ascii=False)[1 : None if at >= 0 else -1]
            if piece:
                parsed.calls.append(ToolCall(None, piece))
            self._text = self._text[end:]
            at = at - end if at >= 0 else at
        elif at >= 0:
            parsed.calls.append(ToolCall(None, _as_json(self._text[:end])))
        if at < 0:
            return False
        self._text, self._state = self._text[at + len(self.END) :], "call"
        return True

    def end(self) -> Parsed:
        parsed = Parsed()
        if self._state == "head":
            parsed.content = self._space + self.OPEN + self._text
        elif self._state == "text" and (self._text.strip() or not self._has_calls):
            parsed.content = self._text
        elif self._state == "call":  # models stop after the last argument without the closing tag
            parsed.calls.append(ToolCall(None, "}"))
        elif self._state == "value" and self._text:
            piece = json.dumps(self._text, ensure_ascii=False)[1:-1] if self._is_string else self._text
            parsed.calls.append(ToolCall(None, piece))
        self._text, self._state = "", "text"
        return parsed


class Qwen3CoderParser(TaggedArgumentsParser):
    """Qwen3-Coder: <tool_call><function=NAME><parameter=KEY>\\nVALUE\\n</parameter></function></tool_call>."""

    CALL = re.compile(r"\s*<function=(?P<name>[^>]*)>")
    ARGUMENT = re.compile(r"<parameter=(?P<name>[^>]*)>")
    END = "</parameter>"
    PADDING = "\n"


class GLMParser(TaggedArgumentsParser):
    """GLM 4.5 and later: <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>."""

    CALL = re.compile(r"\s*(?P<name>[^\s<{][^<\n]*)(?=\n|<)")
    ARGUMENT = re.compile(r"<arg_key>(?P<name>[^<]*)</arg_key>\s*<arg_value>")
    END = "</arg_value>"


def _is_string(schema: Any) -> bool:
    """Return whether a value of this schema is a string, and so written as it is. It may be null as well."""
    if not isinstance(schema, Mapping):
        return False
    alternatives = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(alternatives, list):
        left = [one for one in alternatives if one != {"type": "null"}]
        return bool(left) and all(map(_is_string, left))
    kinds = schema.get("type")
    return kinds == "string" or (isinstance(kinds, list) and [kind for kind in kinds if kind != "null"] == ["string"])


def _as_json(text: str) -> str:
    """Return the JSON of a value: the text itself if it is JSON, else a string."""
    try:
        return json.dumps(json.loads(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        words = {"True": "true", "False": "false", "None": "null"}
        return words.get(text.strip()) or json.dumps(text, ensure_ascii=False)
