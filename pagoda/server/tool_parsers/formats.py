"""Formats in which calls stand between marks of the model's family: as JSON, as a name and JSON, or value by value."""

import json
import re
from collections.abc import Mapping
from typing import Any

from pagoda.base.text import is_encodable
from pagoda.server.tool_parsers.base import LONGEST_NAME, Reading, ToolParser, held_back


class HermesParser(ToolParser):
    """Hermes and Qwen: <tool_call>{"name": ..., "arguments": ...}</tool_call>, any number of them.

    What is not a call comes out as it was, tags and white space too.
    """

    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def read(self) -> Reading[None]:
        while (yield from self.text_until(self.OPEN)):
            before = self.space + self.OPEN
            written = yield from self.json_call(self.OPEN, self.CLOSE)
            if written is not None:
                self.parsed.content += before + written
                continue
            while not (rest := self.text.lstrip(" \t\r\n}")) and not self.is_over:  # and braces too many
                self.text = ""
                yield
            self.text = rest
            yield from self.take(self.CLOSE)


class LlamaJsonParser(ToolParser):
    """Llama 3: the whole answer is {"name": ..., "parameters": ...}, or several separated by semicolons.

    <|python_tag|> may precede them. The tag and semicolons are dropped with the call that follows them; where none
    follows, they come out as text.
    """

    TAG = "<|python_tag|>"

    def read(self) -> Reading[None]:
        before, written = "", None
        while written is None:
            before = (yield from self.take(self.TAG)) + (yield from self.take(";"))
            written = (yield from self.json_call()) if (yield from self.comes("{")) else ""
        self.text = before + written + self.text


class MistralParser(ToolParser):
    """Mistral: [TOOL_CALLS] [{"name": ..., "arguments": ...}, ...], with text around it.

    The marker is a special token of the model's, and so is not in the text where those are left out: then a list of
    calls is the beginning of the answer. A list of anything else comes out as text.
    """

    MARKER = "[TOOL_CALLS]"

    def read(self) -> Reading[None]:
        self.text = (yield from self._list()) + self.text
        while (yield from self.text_until(self.MARKER)):
            before = self.space + self.MARKER
            self.parsed.content += yield from self._list(before)

    def _list(self, before: str = "") -> Reading[str]:
        """Read a list of calls if one is next; return what was read after the last of them, or `before` and that."""
        expected = "["
        while taken := (yield from self.take(expected)):
            before += taken
            if not (yield from self.comes("{")):
                break
            if (written := (yield from self.json_call())) is not None:
                return before + written
            before, expected = "", ","
            if (yield from self.take("]")):
                break
        return before


class GraniteParser(MistralParser):
    """Granite 3: <|tool_call|> [{"name": ..., "arguments": ...}, ...], as Mistral."""

    MARKER = "<|tool_call|>"


class NamedCallParser(ToolParser):
    """A mark, the name, another mark, the arguments as JSON, and with CLOSE a last mark, the text before which is lost.

    SECTION: marks around all calls, which are dropped.
    """

    OPEN, ARGUMENTS, CLOSE = "", "", ""
    SECTION: tuple[str, ...] = ()

    def name_of(self, written: str) -> str:
        """Return the name of the function from what is written between the marks."""
        return written.strip()

    def read(self) -> Reading[None]:
        marks = [mark for mark in (self.OPEN, self.CLOSE, *self.SECTION) if mark]
        head = re.compile(f"(?P<name>.*?){re.escape(self.ARGUMENTS)}", re.DOTALL)
        mark = yield from self.text_until(*marks)
        while mark:
            found = (yield from self.head(head)) if mark == self.OPEN else None
            if found is not None:
                self.begin(self.name_of(found["name"]))
                yield from self.arguments(*marks)
            elif mark == self.OPEN:
                self.parsed.content += mark
            mark = yield from self.text_until(*marks, is_kept=found is None or not self.CLOSE)


class KimiParser(NamedCallParser):
    """Kimi K2: <|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|> in a section."""

    keeps_special_tokens = True
    OPEN, ARGUMENTS, CLOSE = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")

    def name_of(self, written: str) -> str:
        return written.strip().removeprefix("functions.").partition(":")[0]


class Mistral3Parser(NamedCallParser):
    """Mistral 3 and later: [TOOL_CALLS]NAME[ARGS]{...}, any number of them."""

    keeps_special_tokens = True
    OPEN, ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"


class DeepSeekV31Parser(NamedCallParser):
    """DeepSeek V3.1: a name and JSON. The marks are ordinary tokens in DeepSeek's vocabularies."""

    OPEN, ARGUMENTS, CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")


class DeepSeekV3Parser(DeepSeekV31Parser):
    """DeepSeek V3 and R1: a kind, a name, and the arguments in a fenced block of JSON."""

    ARGUMENTS = "\n```json\n"

    def name_of(self, written: str) -> str:
        return written.rpartition(DeepSeekV31Parser.ARGUMENTS)[2].strip()


class TaggedArgumentsParser(ToolParser):
    """Each argument between tags of its own, as text: it becomes JSON by the type that the tool's schema says.

    CALL: the name, at the beginning of a call.   ARGUMENT: the name of an argument, up to the beginning of its value.
    PADDING: what may be on either side of a value without being part of it.
    Strings come out as they are written, other values when they are complete.
    """

    OPEN, CLOSE = "<tool_call>", "</tool_call>"
    CALL: re.Pattern[str]
    ARGUMENT: re.Pattern[str]
    END = ""  # of a value
    CALL_END = ""  # in front of CLOSE
    PADDING = ""

    def read(self) -> Reading[None]:
        while (yield from self.text_until(self.OPEN)):
            before = self.space + self.OPEN
            found = yield from self.head(self.CALL)
            if found is None:
                self.parsed.content += before
                continue
            name, comma = found["name"].strip(), ""
            types = self.schemas.get(name, {})
            self.begin(name, "{")
            while (argument := (yield from self._next_argument())) is not None:
                is_string = _is_string(types.get(argument))
                quote = '"' if is_string else ""
                self.add(f"{comma}{json.dumps(argument, ensure_ascii=False)}: {quote}")
                if not (yield from self._value(is_string)):
                    return
                comma = ", "
            self.add("}")
            yield from self.take(self.CLOSE)

    def _next_argument(self) -> Reading[str | None]:
        """Read up to a value; return its name, or None after the last: in front of the end of the call."""
        ends = filter(None, (self.OPEN, self.CLOSE, self.CALL_END))
        pattern = re.compile("|".join([self.ARGUMENT.pattern, *ends]))
        while (found := pattern.search(self.text)) is None:
            self.text = "" if self.is_over else self.text[-2 * LONGEST_NAME :]
            if self.is_over:  # models stop after the last argument without the closing tag
                return None
            yield
        is_last = found["name"] is None
        self.text = self.text[found.start() if is_last and found[0] != self.CALL_END else found.end() :]
        return None if is_last else found["name"].strip()

    def _value(self, is_string: bool) -> Reading[bool]:
        """Read a value; return whether it is complete."""
        while not (self.text or self.is_over):
            yield
        self.text = self.text.removeprefix(self.PADDING)
        num_searched = 0  # characters that do not begin the end
        while True:
            at = self.text.find(self.END, max(0, num_searched - len(self.END)))
            if at >= 0:
                end = at - len(self.PADDING) if self.text.endswith(self.PADDING, 0, at) else at
            elif self.is_over:
                end = len(self.text)
            else:
                end = len(self.text) - max(held_back(self.text, mark) for mark in (self.END, self.PADDING + self.END))
            if is_string:
                self.add(json.dumps(self.text[:end], ensure_ascii=False)[1:-1])
                self.text, at = self.text[end:], at - end if at >= 0 else at
            elif at >= 0:
                self.add(_as_json(self.text[:end]))
            elif self.is_over:
                self.add(self.text)
            num_searched = len(self.text)
            if at >= 0:
                self.add('"' if is_string else "")
                self.text = self.text[at + len(self.END) :]
            elif self.is_over:
                self.text = ""
            if at >= 0 or self.is_over:
                return at >= 0
            yield


class Qwen3CoderParser(TaggedArgumentsParser):
    """Qwen3-Coder: <tool_call><function=NAME><parameter=KEY>\\nVALUE\\n</parameter></function></tool_call>."""

    CALL = re.compile(r"\s*<function=(?P<name>[^>]*)>")
    ARGUMENT = re.compile(r"<parameter=(?P<name>[^>]*)>")
    END, CALL_END = "</parameter>", "</function>"
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
        value = json.loads(text)
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
        return written if is_encodable(written) else json.dumps(value)  # half of a surrogate pair stays an escape
    except (ValueError, RecursionError):
        words = {"True": "true", "False": "false", "None": "null"}
        return words.get(text.strip()) or json.dumps(text, ensure_ascii=False)
