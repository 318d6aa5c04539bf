"""Formats that write each argument between tags of its own, as bare text."""

import json
import re

from pagoda.engine.answers.tool_parsers.argument_types import ANY_ARGUMENTS, Types
from pagoda.engine.answers.tool_parsers.base import Reading, ToolParser, held_back
from pagoda.engine.answers.tool_parsers.literals import as_json

_NULLS = ("null", "None")


class TaggedArgumentsParser(ToolParser):
    """Each argument between tags of its own, as text: it becomes JSON by the type that the tool's schema says.

    OPEN: in front of a call; may be missing where CALL_OPEN begins the name.   CALL: the rest of the name.
    ARGUMENT_OPEN, ARGUMENT: the beginning and the rest of an argument's name, up to its value.   END: of a value; where
    it is missing, the next argument or the end of the call is.   CALL_END: in front of CLOSE.
    PADDING: what may be on either side of a value without being part of it.
    Strings come out as they are written, other values when they are complete.
    """

    reads_types = True
    OPEN, CLOSE = "<tool_call>", "</tool_call>"
    CALL_OPEN = CALL_END = PADDING = ""
    CALL: re.Pattern[str]
    ARGUMENT_OPEN = END = ""
    ARGUMENT: re.Pattern[str]

    def read(self) -> Reading[None]:
        opens = [mark for mark in (self.OPEN, self.CALL_OPEN) if mark]
        while mark := (yield from self.text_until(*opens)):
            before = self.space + mark
            if mark == self.OPEN and self.CALL_OPEN:
                taken = yield from self.take(self.CALL_OPEN)
                before += taken
                found = (yield from self.head(self.CALL)) if taken else None
            else:
                found = yield from self.head(self.CALL)
            if found is not None:
                yield from self._call(found["name"].strip())
            else:
                self.parsed.add(before)

    def _call(self, name: str) -> Reading[None]:
        types, comma = self.tools.get(name, ANY_ARGUMENTS), ""
        self.begin(name, "{")
        while (argument := (yield from self._next_argument())) is not None:
            self.add(f"{comma}{json.dumps(argument, ensure_ascii=False)}: ")
            yield from self._value(types.of(argument))
            comma = ", "
        self.add("}")

    def _next_argument(self) -> Reading[str | None]:
        """Read up to a value; return its name, or None at the end of the call. Text on the way is content."""
        ends = [mark for mark in (self.CALL_END, self.CLOSE) if mark]
        opens = [mark for mark in (self.OPEN, self.CALL_OPEN) if mark]
        marks = (self.ARGUMENT_OPEN, self.END, *ends, *opens)
        while mark := (yield from self.text_until(*marks)):
            if mark == self.ARGUMENT_OPEN:
                if (found := (yield from self.head(self.ARGUMENT))) is not None:
                    return found["name"].strip()
                self.parsed.add(self.space + mark)
            elif mark in opens:
                self.text = mark + self.text
                return None
            elif mark in ends:
                if mark != self.CLOSE:
                    yield from self.take(self.CLOSE)
                return None
        if any(mark.startswith(self.text.strip()) for mark in marks):  # the text ends in the middle of one
            self.text = ""
        return None

    def _value(self, types: Types) -> Reading[None]:
        """Pass on a value."""
        while not (self.text or self.is_over):
            yield
        self.text = self.text.removeprefix(self.PADDING)
        marks = [mark for mark in (self.END, self.ARGUMENT_OPEN, self.CALL_END, self.CLOSE) if mark]
        end = re.compile("|".join(map(re.escape, marks)))
        held = {*marks, *(self.PADDING + mark for mark in marks)}
        text, is_string = "", False
        while True:
            found = end.search(self.text)
            if found is not None:
                size = found.start()
                size -= len(self.PADDING) if self.text.endswith(self.PADDING, 0, size) else 0
            else:
                size = len(self.text) - (0 if self.is_over else max(held_back(self.text, mark) for mark in held))
            text, self.text = text + self.text[:size], self.text[size:]
            is_end = found is not None or self.is_over
            if not is_string and _is_string(text, types, is_end):
                is_string = True
                self.add('"')
            if is_string:
                self.add(json.dumps(text, ensure_ascii=False)[1:-1])
                text = ""
            if is_end:
                break
            yield
        self.add('"' if is_string else _as_json(text, types))
        self.text = self.text.removeprefix(self.PADDING).removeprefix(self.END) if found is not None else ""


class Qwen3CoderParser(TaggedArgumentsParser):
    """Qwen3-Coder: <tool_call><function=NAME><parameter=KEY>\\nVALUE\\n</parameter></function></tool_call>."""

    CALL_OPEN, CALL_END, PADDING = "<function=", "</function>", "\n"
    CALL = re.compile(r"(?P<name>[^>\n]+)>")
    ARGUMENT_OPEN, END = "<parameter=", "</parameter>"
    ARGUMENT = re.compile(r"(?P<name>[^>\n]+)>")
    MARKS = (CALL_OPEN, ARGUMENT_OPEN)
    VLLMS_NAMES = ("qwen3_xml",)


class SeedParser(Qwen3CoderParser):
    """Seed-OSS: Qwen3-Coder's format with a tag of its own around each call, and values without lines of their own."""

    OPEN, CLOSE, PADDING = "<seed:tool_call>", "</seed:tool_call>", ""
    MARKS = (OPEN,)
    VLLMS_NAMES = ("seed_oss",)


class MiniMaxParser(TaggedArgumentsParser):
    """MiniMax-M2: <minimax:tool_call>, then <invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke> for
    each call, </minimax:tool_call>.
    """

    OPEN, CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"
    CALL_OPEN, CALL_END = '<invoke name="', "</invoke>"
    CALL = re.compile(r'(?P<name>[^">\n]+)">')
    ARGUMENT_OPEN, END = '<parameter name="', "</parameter>"
    ARGUMENT = re.compile(r'(?P<name>[^">\n]+)">')
    MARKS = (OPEN,)
    VLLMS_NAMES = ("minimax_m2",)


class GLMParser(TaggedArgumentsParser):
    """GLM 4.5 and later: <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>."""

    CALL = re.compile(r"\s*(?P<name>[^\s<{][^<\n]*)(?=\n|<)")
    ARGUMENT_OPEN, END = "<arg_key>", "</arg_value>"
    ARGUMENT = re.compile(r"(?P<name>[^<]*)(?:</arg_key>\s*)?<arg_value>")
    MARKS = (ARGUMENT_OPEN,)
    VLLMS_NAMES = ("glm45", "glm47")


def _is_string(text: str, types: Types, is_whole: bool) -> bool:
    """Return whether a value is known to be a string, and so is written as it is.   text: its beginning, or all."""
    if not types <= {"string", "null"} or "string" not in types:
        return False
    if "null" not in types:
        return True
    return text not in _NULLS if is_whole else not any(word.startswith(text) for word in _NULLS)


def _as_json(text: str, types: Types) -> str:
    """Return the JSON of a value: what the text says in JSON or Python, if it may have that type, else a string."""
    written = as_json(text)
    if written is None or ("string" in types and _kind(written) not in types):
        return json.dumps(text, ensure_ascii=False)
    return written


def _kind(written: str) -> str:
    """Return the type of a value in JSON."""
    kinds = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
    return kinds.get(written[0], "number" if set(".eE") & set(written) else "integer")
