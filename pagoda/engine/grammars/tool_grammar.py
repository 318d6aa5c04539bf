"""Grammars of tool calls, in the formats that models write them in.

A call's name is one of the tools', and its arguments keep to that tool's schema. Each format has a parser of the same
name in `server/tool_parsers/`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pagoda.base.registry import Registry
from pagoda.engine.grammars.call_rules import CallRules, JsonCall, NamedCall, PythonCall, Tool
from pagoda.engine.grammars.grammar_text import literal

__all__ = ["CALL_FORMATS", "MAX_CALLS", "CallFormat", "Tool"]

MAX_CALLS = 16
"""Calls of one answer that must consist of calls: a weak model might never stop."""
_TEXT = r"TEXT: /(.|\n)*/"


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes calls.

    call: what is between `opening` and `closing`, the text around one call.   separator: between two calls.
    list_open, list_close: around all of them.   list_marker: this text, or the special token of this text, begins
        them. Without one they are introduced by `opening` in the middle of a text, or,
    starts_answer: they are the answer from its first character on.
    """

    call: CallRules
    opening: str = ""
    closing: str = ""
    separator: str = ""
    list_open: str = ""
    list_close: str = ""
    list_marker: str | None = None
    starts_answer: bool = False

    def forced(self, tools: Sequence[Tool], max_calls: int, marker_id: int | None = None) -> str:
        """Return the grammar of an answer of 1 to `max_calls` calls and nothing else.

        marker_id: the special token that `list_marker` is in this vocabulary, if it is one.
        """
        start = "calls" if self.list_marker is None else f"{self._marker(marker_id)} calls"
        return "\n".join([f"start: {start}", *self._rules(tools, (), max_calls)])

    def free(self, tools: Sequence[Tool], loose: Sequence[str], max_calls: int, marker_id: int | None = None) -> str:
        """Return the grammar of an answer in which calls may occur. loose: names of tools with any arguments."""
        rules = self._rules(tools, loose, max_calls)
        if self.list_marker is not None:
            opened = f"TEXT? {self._marker(marker_id)}" if marker_id is not None else "opened"
            if marker_id is None:
                rules.append(f"opened[lazy]: TEXT {literal(self.list_marker)}")
            return "\n".join([f"start: {opened} calls | TEXT", _TEXT, *rules])
        if self.starts_answer:
            first = "{" if not self.list_open else rf"\{self.list_open}"
            return "\n".join(["start: OTHER | calls", rf"OTHER: /[^{first}](.|\n)*/", *rules])
        many = f"{{0,{max_calls}}}"
        # In free text, the white space inside the tags is the model's choice.
        call = f"WS? ({self._names(tools)}) WS? {literal(self.closing.lstrip())}"
        opened = f"opened[lazy]: TEXT {literal(self.opening.rstrip())}"
        return "\n".join([f"start: (opened free){many} tail", "tail: TEXT", opened, _TEXT, f"free: {call}", *rules])

    def _marker(self, marker_id: int | None) -> str:
        assert self.list_marker is not None
        return literal(self.list_marker) if marker_id is None else f"<[{marker_id}]>"

    def _names(self, tools: Sequence[Tool]) -> str:
        return " | ".join(f"tool{i}" for i in range(len(tools)))

    def _rules(self, tools: Sequence[Tool], loose: Sequence[str], max_calls: int) -> list[str]:
        between = [literal(self.separator)] if self.separator else []
        more = [f"({' '.join([*between, 'call'])}){{0,{max_calls - 1}}}"] if max_calls > 1 else []
        calls = [*_literals(self.list_open), "call", *more, *_literals(self.list_close)]
        rules = [
            f"calls: {' '.join(['WS?', *calls] if self.list_marker is not None else calls)}",
            f"call: {' '.join([*_literals(self.opening), f'({self._names(tools)})', *_literals(self.closing)])}",
            r"WS: /[ \n]{1,2}/",
        ]
        for i, tool in enumerate(tools):
            rules += self.call.rules(i, tool, tool.name in loose)
        return rules


def _literals(text: str) -> list[str]:
    return [literal(text)] if text else []


def _bracketed(call: CallRules, marker: str | None = None) -> CallFormat:
    return CallFormat(call, "", "", ", ", "[", "]", marker, starts_answer=marker is None)


def _deepseek(call: CallRules, opening: str, separator: str) -> CallFormat:
    begin, end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    return CallFormat(call, opening, "<｜tool▁call▁end｜>", separator, "", end, begin)


CALL_FORMATS: Registry[CallFormat] = Registry(
    "tool call format",
    {
        "hermes": CallFormat(JsonCall("arguments"), "<tool_call>\n", "\n</tool_call>", "\n"),
        "llama_json": CallFormat(JsonCall("parameters"), separator="; ", starts_answer=True),
        "pythonic": _bracketed(PythonCall()),
        "mistral": _bracketed(JsonCall("arguments"), "[TOOL_CALLS]"),
        "granite": _bracketed(JsonCall("arguments"), "<|tool_call|>"),
        "deepseek_v3": _deepseek(
            NamedCall("\n```json\n", "\n```"), "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n"
        ),
        "deepseek_v31": _deepseek(NamedCall("<｜tool▁sep｜>"), "<｜tool▁call▁begin｜>", ""),
    },
)
