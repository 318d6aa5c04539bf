"""Parse tool calls in generated text while it streams.

A parser is fed text and says what of it is content and which calls are complete. It holds back only what may be the
beginning of a call. A malformed call comes out as the text it was: none of it is lost.
"""

import json
from dataclasses import dataclass, field
from typing import Protocol

from pagoda.base.registry import Registry
from pagoda.base.text import is_encodable


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


def held_back(text: str, marker: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `marker`."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0


def _as_call(value: object) -> ToolCall | None:
    """Return the call in {"name": ..., "arguments" or "parameters": ...}; None if it is not a call or not encodable.

    Models may write an escaped lone surrogate, which JSON allows and UTF-8 does not.
    """
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(value["name"], arguments) if is_encodable(value["name"] + arguments) else None


class HermesParser:
    """Hermes and Qwen: <tool_call>{"name": ..., "arguments": ...}</tool_call>, any number of them.

    White space in front of a call is dropped with it. What is not a call comes out as it was, tags and white space too.
    """

    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        self._text = ""
        self._space = ""  # white space in front of the open tag
        self._inside = False

    def feed(self, text: str) -> Parsed:
        self._text += text
        parsed = Parsed()
        while True:
            marker = self.CLOSE if self._inside else self.OPEN
            at = self._text.find(marker)
            if at < 0:
                break
            before, self._text = self._text[:at], self._text[at + len(marker) :]
            if self._inside:
                self._take_call(before, self.CLOSE, parsed)
            else:
                content = before.rstrip()
                parsed.content += content
                self._space = before[len(content) :]
            self._inside = not self._inside
        if not self._inside:
            sure = self._text[: len(self._text) - held_back(self._text, self.OPEN)]
            cut = len(sure.rstrip())
            parsed.content += sure[:cut]
            self._text = self._text[cut:]
        return parsed

    def end(self) -> Parsed:
        parsed = Parsed()
        text, self._text = self._text, ""
        if self._inside:  # models stop after the JSON without the closing tag
            self._take_call(text, "", parsed)
        else:
            parsed.content = text
        self._inside = False
        return parsed

    def _take_call(self, text: str, close: str, parsed: Parsed) -> None:
        """Add the call that `text` is; if it is malformed, add it to the content with its tags."""
        try:
            call = _as_call(json.loads(text))
        except (ValueError, RecursionError):
            call = None
        if call is not None:
            parsed.calls.append(call)
        else:
            parsed.content += f"{self._space}{self.OPEN}{text}{close}"
        self._space = ""


class LlamaJsonParser:
    """Llama 3: the whole answer is {"name": ..., "parameters": ...}, or several separated by semicolons.

    <|python_tag|> may precede them. The tag, semicolons and white space are dropped with the call that follows them;
    where none follows, they come out as text.
    """

    TAG = "<|python_tag|>"

    def __init__(self) -> None:
        self._text = ""
        self._is_call: bool | None = None
        self._decoder = json.JSONDecoder()

    def feed(self, text: str) -> Parsed:
        self._text += text
        if self._is_call is None:
            start = self._text.lstrip()
            if not start or (self.TAG.startswith(start) and start != self.TAG):
                return Parsed()
            self._is_call = start.startswith(("{", self.TAG))
        if self._is_call:
            return self._take_calls()
        content, self._text = self._text, ""
        return Parsed(content)

    def end(self) -> Parsed:
        parsed = self._take_calls() if self._is_call else Parsed()
        parsed.content += self._text
        self._text = ""
        return parsed

    def _take_calls(self) -> Parsed:
        parsed = Parsed()
        while True:
            rest = self._text.lstrip().removeprefix(self.TAG).lstrip().removeprefix(";").lstrip()
            try:
                value, size = self._decoder.raw_decode(rest)
            except (ValueError, RecursionError):
                return parsed
            call = _as_call(value)
            if call is None:  # JSON, but not a call: the rest is an answer
                self._is_call = False
                parsed.content += self._text
                self._text = ""
                return parsed
            parsed.calls.append(call)
            self._text = rest[size:]


class MistralParser:
    """Mistral: [TOOL_CALLS] [{"name": ..., "arguments": ...}, ...], at the end of an answer.

    The marker is a special token of the model's, and so is not in the text where those are left out: then a list of
    calls is the whole answer. A list of anything else comes out as text.
    """

    MARKER = "[TOOL_CALLS]"

    def __init__(self) -> None:
        self._text = ""
        self._is_list: bool | None = None  # None: not known yet
        self._marker = ""  # with the white space in front of it
        self._decoder = json.JSONDecoder()

    def feed(self, text: str) -> Parsed:
        self._text += text
        parsed = Parsed()
        if self._is_list is None or not self._is_list:
            at = self._text.find(self.MARKER)
            if at >= 0:
                parsed.content = self._text[:at].rstrip()
                self._marker = self._text[len(parsed.content) : at + len(self.MARKER)]
                self._text, self._is_list = self._text[at + len(self.MARKER) :], True
        if self._is_list is None:
            start = self._text.lstrip()
            if not start or self.MARKER.startswith(start):
                return parsed
            self._is_list = start.startswith("[")
        if not self._is_list:
            cut = len(self._text[: len(self._text) - held_back(self._text, self.MARKER)].rstrip())
            parsed.content, self._text = self._text[:cut], self._text[cut:]
        elif self._text.rstrip().endswith("]"):
            self._take_list(parsed)
        return parsed

    def end(self) -> Parsed:
        content = self._marker + self._text
        self._text = self._marker = ""
        return Parsed(content)

    def _take_list(self, parsed: Parsed) -> None:
        """Take the list of calls that the text begins with; if it is complete and anything else, it is content."""
        begin = len(self._text) - len(self._text.lstrip())
        try:
            values, end = self._decoder.raw_decode(self._text, begin)
        except (ValueError, RecursionError):
            return
        calls = [_as_call(value) for value in values] if isinstance(values, list) else []
        if calls and all(call is not None for call in calls):
            parsed.calls += [call for call in calls if call is not None]
            self._text = self._text[end:].lstrip()
        else:
            parsed.content += self._marker + self._text
            self._text = ""
        self._is_list, self._marker = False, ""


class GraniteParser(MistralParser):
    """Granite 3: <|tool_call|> [{"name": ..., "arguments": ...}, ...], as Mistral."""

    MARKER = "<|tool_call|>"


TOOL_PARSERS: Registry[type[ToolParser]] = Registry(
    "tool call parser",
    {"hermes": HermesParser, "llama_json": LlamaJsonParser, "mistral": MistralParser, "granite": GraniteParser},
)


def parser_for_template(template: str | None) -> str | None:
    """Return the parser for the tool call format in a chat template, or None if it has none."""
    if template is None:
        return None
    if HermesParser.OPEN in template:
        return "hermes"
    for name, parser in (("mistral", MistralParser), ("granite", GraniteParser)):
        if parser.MARKER in template:
            return name
    if LlamaJsonParser.TAG in template or '"parameters":' in template:
        return "llama_json"
    return None
