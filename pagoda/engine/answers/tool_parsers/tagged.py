"""Formats that write each argument between tags of its own, as bare text."""

import json
import re

from pagoda.engine.answers.tool_parsers.argument_types import ANY_ARGUMENTS, ANY_TYPE, Types
from pagoda.engine.answers.tool_parsers.base import Reading, ToolParser, held_back
from pagoda.engine.answers.tool_parsers.literals import as_json

_NULLS = ("null", "None")
_MAX_DEPTH = 64
_CLOSING = re.compile(r"(?:<|</[^<>\s]*)?")
_STATED: dict[str | None, Types] = {"true": frozenset({"string"}), "false": ANY_TYPE - {"string"}}
"""The types of a value of which the text says whether it is a string."""


class TaggedArgumentsParser(ToolParser):
    """Each argument between tags of its own, as text: it becomes JSON by the type that the tool's schema says.

    OPEN: in front of a call; may be missing where CALL_OPEN begins the name.   CALL: the rest of the name.
    ARGUMENT_OPEN, ARGUMENT: the beginning and the rest of an argument's name, up to its value, with `type` where the
    text says that, too (_STATED).   END: of a value; where it is missing, the next argument or the end of the call is.
    CALL_END: in front of CLOSE.
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
        while (found := (yield from self._next_argument())) is not None:
            argument = found["name"].strip()
            self.add(f"{comma}{json.dumps(argument, ensure_ascii=False)}: ")
            yield from self._value(_STATED.get(found.groupdict().get("type")) or types.of(argument))
            comma = ", "
        self.add("}")

    def _next_argument(self) -> Reading["re.Match[str] | None"]:
        """Read up to a value; return its ARGUMENT, or None at the end of the call. Text on the way is content."""
        ends = [mark for mark in (self.CALL_END, self.CLOSE) if mark]
        opens = [mark for mark in (self.OPEN, self.CALL_OPEN) if mark]
        marks = (self.ARGUMENT_OPEN, self.END, *ends, *opens)
        while mark := (yield from self.text_until(*marks)):
            if mark == self.ARGUMENT_OPEN:
                if (found := (yield from self.head(self.ARGUMENT))) is not None:
                    return found
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


class DeepSeekV32Parser(TaggedArgumentsParser):
    """DeepSeek V3.2: <｜DSML｜function_calls>, <｜DSML｜invoke name="NAME"> and its end for each call, within it
    <｜DSML｜parameter name="KEY" string="true">VALUE</｜DSML｜parameter>, </｜DSML｜function_calls>.
    """

    OPEN, CLOSE = "<｜DSML｜function_calls>", "</｜DSML｜function_calls>"
    CALL_OPEN, CALL_END = '<｜DSML｜invoke name="', "</｜DSML｜invoke>"
    CALL = re.compile(r'(?P<name>[^">\n]+)">')
    ARGUMENT_OPEN, END = '<｜DSML｜parameter name="', "</｜DSML｜parameter>"
    ARGUMENT = re.compile(r'(?P<name>[^">\n]+)"(?: string="(?P<type>true|false)")?>')
    MARKS = ("｜DSML｜", "function_calls>")


class DeepSeekV4Parser(DeepSeekV32Parser):
    """DeepSeek V4: V3.2's format, in <｜DSML｜tool_calls>."""

    OPEN, CLOSE = "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"
    MARKS = ("｜DSML｜", "tool_calls>")


class MiniMaxM3Parser(TaggedArgumentsParser):
    """MiniMax-M3: <tool_call>, for each call <invoke name="NAME"><KEY>VALUE</KEY></invoke>, </tool_call>, with MARK in
    front of each tag. Objects are such elements, too, and lists are elements named `item`; of the values in them the
    schema is not looked at.
    """

    MARK = "]<]minimax[>["
    OPEN, CLOSE = MARK + "<tool_call>", MARK + "</tool_call>"
    CALL_OPEN, CALL_END = MARK + '<invoke name="', MARK + "</invoke>"
    CALL = re.compile(r'(?P<name>[^">\n]+)">')
    END, ARGUMENT = MARK, re.compile(r"<(?P<name>/[^<>\s]+|[^</>\s][^<>\n]*)>")
    MARKS = ("]<]minimax[>[",)
    keeps_special_tokens = True

    def _call(self, name: str) -> Reading[None]:
        types = self.tools.get(name, ANY_ARGUMENTS)
        closings, comma = ["}"], ""
        self.begin(name, "{")
        while mark := (yield from self.text_until(self.MARK)):
            found = yield from self.head(self.ARGUMENT)
            tag = found["name"] if found is not None else ""
            if found is None and self.is_over and _CLOSING.fullmatch(self.text):  # the text ends in the middle of one
                self.text = ""
            elif found is None:
                self.parsed.add(self.space + mark)
            elif tag in ("/invoke", "/tool_call"):
                yield from self.take(self.CLOSE)
                break
            elif tag.startswith("/"):  # of an object or a list
                if len(closings) > 1:
                    self.add(closings.pop())
                    comma = ", "
            elif tag == "tool_call" or tag.startswith('invoke name="'):
                self.text = mark + found[0] + self.text
                break
            else:
                while tag != "item" and closings[-1] == "]":  # whose end is missing
                    self.add(closings.pop())
                    comma = ", "
                self.add(comma + (f"{json.dumps(tag, ensure_ascii=False)}: " if closings[-1] == "}" else ""))
                comma = yield from self._element(tag, types.of(tag) if len(closings) == 1 else ANY_TYPE, closings)
        else:
            if self.MARK.startswith(self.text.strip()):  # the text ends in the middle of one
                self.text = ""
        self.add("".join(reversed(closings)))

    def _element(self, tag: str, types: Types, closings: list[str]) -> Reading[str]:
        """Pass on a value, or the beginning of an object or a list; return what separates it from what follows."""
        is_nested = (yield from self.comes(self.MARK + "<")) and not (yield from self.comes(self.MARK + "</"))
        if is_nested and len(closings) < _MAX_DEPTH:
            is_list = "array" in types and ((yield from self.comes(self.MARK + "<item>")) or "object" not in types)
            self.add("[" if is_list else "{")
            closings.append("]" if is_list else "}")
            return ""
        yield from self._value(types)
        if not (yield from self.take(f"</{tag}>")) and self.text:
            self.text = self.MARK + self.text
        return ", "


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
