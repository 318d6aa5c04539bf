"""Formats in which calls stand between marks of the model's family: as JSON, or as a name and JSON."""

import json
import re

from pagoda.engine.answers.tool_parsers.base import Reading, ToolParser, held_back
from pagoda.engine.answers.tool_parsers.literals import LiteralReader
from pagoda.engine.grammars.tool_grammar import CallFormat, JsonCall, NamedCall, bracketed, deepseek


class HermesParser(ToolParser):
    """Hermes and Qwen: <tool_call>{"name": ..., "arguments": ...}</tool_call>, any number of them.

    What is not a call comes out as it was, tags and white space too.
    """

    OPEN, CLOSE = "<tool_call>", "</tool_call>"
    MARKS = (OPEN,)
    GRAMMAR = CallFormat(JsonCall("arguments"), "<tool_call>\n", "\n</tool_call>", "\n")

    def read(self) -> Reading[None]:
        while (yield from self.text_until(self.OPEN)):
            before = self.space + self.OPEN
            written = yield from self.json_call()
            if written is not None:
                self.parsed.add(before + written)
                continue
            while not (rest := self.text.lstrip(" \t\r\n}")) and not self.is_over:  # and braces too many
                self.text = ""
                yield
            self.text = rest
            yield from self.take(self.CLOSE)


_SHOWS_PARAMETERS = re.compile(r'\{"name":(?:(?!"description"|"arguments")[\s\S]){0,200}?"parameters":')
"""A template's example of a call, or how it writes one; a tool's schema has a description before its parameters."""


class LlamaJsonParser(ToolParser):
    """Llama 3: {"name": ..., "parameters": ...}, or several separated by semicolons.

    <|python_tag|> may precede them. The tag and semicolons are dropped with the call that follows them; where none
    follows, they come out as text. After some text, an object without the tag is a call only if it begins as one.
    """

    TAG = "<|python_tag|>"
    BEGINNINGS = ('{"name":', '{"type": "function",')
    GRAMMAR = CallFormat(JsonCall("parameters"), separator="; ", starts_answer=True)
    VLLMS_NAMES = ("llama3_json", "llama4_json")

    @classmethod
    def is_of(cls, template: str) -> bool:
        return cls.TAG in template or _SHOWS_PARAMETERS.search(template) is not None

    def read(self) -> Reading[None]:
        yield from self._calls("")
        while mark := (yield from self.text_until(self.TAG, *self.BEGINNINGS)):
            before = self.space
            if mark == self.TAG:
                before += mark
            else:
                self.text = mark + self.text
            yield from self._calls(before, is_marked=mark == self.TAG)

    def _calls(self, before: str, is_marked: bool = False) -> Reading[None]:
        """Read calls; what follows the last, `before` with it if there is none, is content if it is not a call."""
        written = None
        while written is None:
            tag = yield from self.take(self.TAG)
            is_marked = is_marked or bool(tag)
            before += tag + (yield from self.take(";"))
            written = (yield from self.json_call(is_marked)) if (yield from self.comes("{")) else ""
            before = "" if written is None else before
        self.parsed.add(before + written)


class MistralParser(ToolParser):
    """Mistral: [TOOL_CALLS] [{"name": ..., "arguments": ...}, ...], with text around it.

    The marker is a special token of the model's, and so is not in the text where those are left out: then a list of
    calls is the beginning of the answer. Without the marker, an object that has no arguments is a call only if it is
    the name of a known tool and nothing else. A list of anything else comes out as text.
    """

    MARKERS: tuple[str, ...] = ("[TOOL_CALLS]",)
    MARKS = ("[TOOL_CALLS]",)
    GRAMMAR = bracketed(JsonCall("arguments"), "[TOOL_CALLS]")

    def read(self) -> Reading[None]:
        self.text = (yield from self._list()) + self.text
        while mark := (yield from self.text_until(*self.MARKERS)):
            rest = yield from self._list(self.space + mark)
            self.parsed.add(rest)

    def _list(self, before: str = "") -> Reading[str]:
        """Read a list of calls if one is next; return what was read after the last of them, or `before` and that.

        before: the marker, and the white space in front of it.
        """
        is_marked, expected = bool(before), "["
        while taken := (yield from self.take(expected)):
            before += taken
            if not (yield from self.comes("{")):
                break
            if (written := (yield from self.json_call(is_marked))) is not None:
                return before + written
            before, expected = "", ","
            if (yield from self.take("]")):
                break
        return before


class GraniteParser(MistralParser):
    """Granite 3: <|tool_call|> [{"name": ..., "arguments": ...}, ...], as Mistral; 3.1 writes <tool_call>."""

    MARKERS = ("<|tool_call|>", "<tool_call>")
    MARKS = ("<|tool_call|>",)
    GRAMMAR = bracketed(JsonCall("arguments"), "<|tool_call|>")


class HunyuanParser(MistralParser):
    """Hunyuan, and Apriel: <tool_calls>[{"name": ..., "arguments": ...}, ...]</tool_calls>."""

    MARKERS = ("<tool_calls>",)
    MARKS = ("<tool_calls>[",)
    CLOSE = "</tool_calls>"
    GRAMMAR = bracketed(JsonCall("arguments"), "<tool_calls>")
    VLLMS_NAMES = ("hunyuan_a13b",)

    def _list(self, before: str = "") -> Reading[str]:
        rest = yield from super()._list(before)
        if before and not rest:
            yield from self.take(self.CLOSE)
        return rest


class NemotronParser(HunyuanParser):
    """Nemotron Nano 2: <TOOLCALL>[{"name": ..., "arguments": ...}, ...]</TOOLCALL>."""

    MARKERS = MARKS = ("<TOOLCALL>",)
    CLOSE = "</TOOLCALL>"
    GRAMMAR = bracketed(JsonCall("arguments"), "<TOOLCALL>")
    VLLMS_NAMES = ()


class MiniMaxM1Parser(ToolParser):
    """MiniMax-M1: <tool_calls>, {"name": ..., "arguments": ...} on a line for each call, </tool_calls>."""

    OPEN, CLOSE = "<tool_calls>", "</tool_calls>"
    MARKS = (r'<tool_calls>\n{"name"',)
    GRAMMAR = CallFormat(JsonCall("arguments"), separator="\n", list_close="\n</tool_calls>", list_marker=OPEN)

    def read(self) -> Reading[None]:
        while mark := (yield from self.text_until(self.OPEN)):
            before, written = self.space + mark, None
            while written is None and (yield from self.comes("{")):
                if (written := (yield from self.json_call())) is None:
                    before = ""
            self.parsed.add(before + (written or ""))
            if not before:
                yield from self.take(self.CLOSE)


class ApertusParser(ToolParser):
    """Apertus: <|tools_prefix|>[{NAME: {...}}, ...]<|tools_suffix|>."""

    OPEN, CLOSE = "<|tools_prefix|>", "<|tools_suffix|>"
    CALL = re.compile(r'\s*[\[,]\s*\{\s*"(?P<name>[^"\\\n]+)"\s*:\s*(?=\{)')
    MARKS = (OPEN,)
    keeps_special_tokens = True

    def read(self) -> Reading[None]:
        while mark := (yield from self.text_until(self.OPEN)):
            before = self.space + mark
            while not (yield from self.comes("]")) and (found := (yield from self.head(self.CALL))) is not None:
                self.begin(found["name"])
                before = ""
                if not (yield from self.arguments()):
                    break
                yield from self.take("}")
            if before:
                self.parsed.add(before)
            else:
                yield from self.take("]")
                yield from self.take(self.CLOSE)


class CohereParser(ApertusParser):
    """Command R7B: <|START_ACTION|>[{"tool_call_id": "0", "tool_name": ..., "parameters": {...}}, ...]<|END_ACTION|>.

    The ids count from 0 in every answer, so they are not kept.
    """

    OPEN, CLOSE = "<|START_ACTION|>", "<|END_ACTION|>"
    CALL = re.compile(
        r'\s*[\[,]\s*\{\s*(?:"tool_call_id"\s*:\s*"[^"\\\n]*"\s*,\s*)?'
        r'"tool_name"\s*:\s*"(?P<name>[^"\\\n]+)"\s*,\s*"parameters"\s*:\s*(?=\{)'
    )
    MARKS = (OPEN, '"tool_name"')


class NamedCallParser(ToolParser):
    """A mark, the name, another mark or nothing, and the arguments as JSON, or none.

    HEAD: the name, and `id` if calls have ids, up to the arguments.   OTHERS: marks that are dropped: around all calls,
    and after each.   FENCE: after the arguments.
    """

    OPEN = ""
    HEAD: re.Pattern[str]
    OTHERS: tuple[str, ...] = ()
    FENCE = ""

    def read(self) -> Reading[None]:
        while mark := (yield from self.text_until(self.OPEN, *self.OTHERS)):
            if mark == self.OPEN:
                yield from self.call(self.space + mark)

    def call(self, before: str) -> Reading[None]:
        """Read the rest of a call; `before`, what was read of it, is content if it is none."""
        found = yield from self.head(self.HEAD)
        if found is None:
            self.parsed.add(before)
            return
        self.begin(found["name"], call_id=found.groupdict().get("id"))
        yield from self.arguments()
        yield from self.take(self.FENCE)


class KimiParser(NamedCallParser):
    """Kimi K2: <|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|> in a section.

    What is in front of the arguments is the call's id: the template repeats it.
    """

    keeps_special_tokens = True
    OPEN = "<|tool_call_begin|>"
    HEAD = re.compile(
        r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s<{\[:]+)(?::\d+)?)\s*"
        r"(?:<\|tool_call_argument_begin\|>|(?=\{|<\|tool_call_end\|>))"
    )
    OTHERS = ("<|tool_call_end|>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    MARKS = (OPEN,)
    VLLMS_NAMES = ("kimi_k2",)


CHANNEL_CALL = "<|channel|>commentary to=functions."


class HarmonyParser(NamedCallParser):
    """GPT-OSS: <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>.

    As its template writes calls, the recipient is in front of the channel, after the role: which is the prompt's last
    word in the first message, and <|start|>assistant in others.
    """

    keeps_special_tokens = True
    OPEN = CHANNEL_CALL
    TO = "to=functions."
    AFTER_ROLE = f"<|start|>assistant {TO}"
    HEAD = re.compile(
        r"(?P<name>[^\s<{\[]+)\s*(?:<\|channel\|>(?:commentary|analysis)\s*)?"
        r"(?:<\|constrain\|>)?(?:json|code|text)?\s*(?:<\|message\|>|(?=\{))"
    )
    OTHERS = ("<|call|>",)
    MARKS = ("<|channel|>commentary",)
    VLLMS_NAMES = ("openai",)

    def read(self) -> Reading[None]:
        if taken := (yield from self.take(self.TO)):
            yield from self.call(taken)
        while mark := (yield from self.text_until(self.OPEN, self.AFTER_ROLE, *self.OTHERS)):
            if mark not in self.OTHERS:
                yield from self.call(self.space + mark)


class Gemma4Parser(NamedCallParser):
    """Gemma 4: <|tool_call>call:NAME{KEY:VALUE,...}<tool_call|>, where <|"|> is on either side of a string."""

    keeps_special_tokens = True
    OPEN, QUOTE = "<|tool_call>", '<|"|>'
    HEAD = re.compile(r"\s*call:(?P<name>[^\s<{\[]+)\s*(?=\{)")
    OTHERS = ("<tool_call|>", "<|tool_response>")
    MARKS = ("<|tool_call>call:",)

    def value(self) -> Reading[bool]:
        """See ToolParser. Strings are taken as they are, without escapes."""
        reader, given, in_string = LiteralReader(), "", False
        parts: list[tuple[str, str]] = []  # of `given`, as JSON and as they were written
        while True:
            at = self.text.find(self.QUOTE)
            is_last = self.is_over and at < 0
            end = at if at >= 0 else len(self.text) - held_back(self.text, self.QUOTE)
            piece, self.text = self.text[:end], self.text[end:]
            parts.append((json.dumps(piece, ensure_ascii=False)[1:-1] if in_string else piece, piece))
            given += parts[-1][0]
            self.add(reader.read(given, is_last))
            given, reader.at = given[reader.at :], 0
            if reader.is_done or reader.is_broken:
                # Where the text ends in a mark, that is left out.
                rest = "" if is_last and not reader.is_done else self.text
                self.text = _as_written(parts, len(given)) + rest
                return reader.is_done
            if not given:
                parts.clear()
            if at < 0:
                yield
                continue
            parts.append(('"', self.QUOTE))
            given += '"'
            self.text, in_string = self.text.removeprefix(self.QUOTE), not in_string


def _as_written(parts: list[tuple[str, str]], size: int) -> str:
    """Return the last `size` characters of the JSON of `parts` as they were written."""
    rest = ""
    for as_json, written in reversed(parts):
        if not size:
            break
        if size < len(as_json):
            written = written[-size:] if as_json == written else json.loads(f'"{as_json[-size:]}"')
        rest, size = written + rest, size - min(size, len(as_json))
    return rest


class Mistral3Parser(NamedCallParser):
    """Mistral 3 and later: [TOOL_CALLS]NAME[ARGS]{...}, any number of them; [CALL_ID] may follow the name."""

    keeps_special_tokens = True
    OPEN = "[TOOL_CALLS]"
    HEAD = re.compile(
        r"\s*(?P<name>[^\s<{\[]+)\s*(?:\[CALL_ID\]\s*(?P<id>[^\s<{\[]+)\s*)?(?:\[ARGS\]|(?=\{))",
    )
    MARKS = (OPEN, "[ARGS]")


class DeepSeekV31Parser(NamedCallParser):
    """DeepSeek V3.1: a name and JSON. The marks are ordinary tokens in DeepSeek's vocabularies."""

    OPEN, SEPARATOR, CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    HEAD = re.compile(rf"\s*(?P<name>[^\s<{{\[]+)\s*(?:{SEPARATOR}|(?=\{{|{CLOSE}))")
    OTHERS = (CLOSE, "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    MARKS = ("<｜tool▁calls▁begin｜>",)
    GRAMMAR = deepseek(NamedCall(SEPARATOR), OPEN, "")


class DeepSeekV3Parser(DeepSeekV31Parser):
    """DeepSeek V3 and R1: a kind, a name, and the arguments in a fenced block of JSON."""

    HEAD = re.compile(
        rf"\s*(?:function{DeepSeekV31Parser.SEPARATOR})?\s*(?P<name>[^\s<{{\[`]+)\s*"
        rf"(?:```json|(?=\{{|{DeepSeekV31Parser.CLOSE}))"
    )
    FENCE = "```"
    GRAMMAR = deepseek(NamedCall("\n```json\n", "\n```"), "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n")

    @classmethod
    def is_of(cls, template: str) -> bool:
        return super().is_of(template) and "\n```json\n" in template.replace("\\n", "\n")
