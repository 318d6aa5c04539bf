"""Grammars of tool calls, in the formats that models write them in.

A call's name is one of the tools', and its arguments keep to that tool's schema. Each format has a parser of the same
name in `server/tool_parsers.py`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pagoda.base.registry import Registry
from pagoda.engine.grammars.grammar_text import JsonStyle, json_rule, literal

MAX_CALLS = 16
"""Calls of one answer that must consist of calls: a weak model might never stop."""
_TEXT = r"TEXT: /(.|\n)*/"


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call.

    parameters: JSON schema of its arguments, or None for no arguments.   field: of the request, for errors.
    """

    name: str
    parameters: dict[str, Any] | None
    field: str = "tools"

    def arguments_rule(self, is_free: bool) -> str:
        """Return the body of a rule for the arguments' object. is_free: any object will do.

        Raises RequestError for a schema that is not supported.
        """
        schema: dict[str, Any] = {"type": "object"}
        if not is_free:
            schema = {"properties": {}, "additionalProperties": False} if self.parameters is None else self.parameters
            schema = {**schema, "type": "object"} if "type" not in schema else schema
        return json_rule(schema, self.field, JsonStyle())


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes calls.

    opening, closing: text around one call.   separator: between two calls.   name_key, arguments_key: of its JSON.
    starts_answer: a call is not introduced by `opening` in the middle of a text, but is the answer from its first
        character on.
    list_marker: the calls are one JSON list after this text, or after the special token of this text. Or None.
    """

    opening: str
    closing: str
    separator: str
    arguments_key: str
    starts_answer: bool = False
    list_marker: str | None = None

    def forced(self, tools: Sequence[Tool], max_calls: int, marker_id: int | None = None) -> str:
        """Return the grammar of an answer of 1 to `max_calls` calls and nothing else.

        marker_id: the special token that `list_marker` is in this vocabulary, if it is one.
        """
        start = self._calls(max_calls)
        if self.list_marker is not None:
            start = f"{self._marker(marker_id)} calls"
        return "\n".join([f"start: {start}", *self._call_rules(tools, (), max_calls, with_opening=True)])

    def free(self, tools: Sequence[Tool], loose: Sequence[str], max_calls: int, marker_id: int | None = None) -> str:
        """Return the grammar of an answer in which calls may occur. loose: names of tools with any arguments."""
        if self.list_marker is not None:
            opened = f"TEXT? {self._marker(marker_id)}" if marker_id is not None else "opened"
            rules = [f"start: {opened} calls | TEXT", _TEXT]
            if marker_id is None:
                rules.append(f"opened[lazy]: TEXT {literal(self.list_marker)}")
            return "\n".join([*rules, *self._call_rules(tools, loose, max_calls, with_opening=True)])
        if self.starts_answer:
            calls = self._calls(max_calls)
            text = r"OTHER: /[^{](.|\n)*/"
            rules = self._call_rules(tools, loose, max_calls, with_opening=True)
            return "\n".join([f"start: OTHER | {calls}", text, *rules])
        many = f"{{0,{max_calls}}}"
        return "\n".join(
            [
                f"start: (opened call){many} tail",
                "tail: TEXT",
                f"opened[lazy]: TEXT {literal(self.opening.rstrip())}",
                _TEXT,
                *self._call_rules(tools, loose, max_calls, with_opening=False),
            ]
        )

    def _calls(self, max_calls: int) -> str:
        more = f" ({literal(self.separator)} call){{0,{max_calls - 1}}}" if max_calls > 1 else ""
        return f"call{more}"

    def _marker(self, marker_id: int | None) -> str:
        assert self.list_marker is not None
        return literal(self.list_marker) if marker_id is None else f"<[{marker_id}]>"

    def _call_rules(
        self, tools: Sequence[Tool], loose: Sequence[str], max_calls: int, *, with_opening: bool
    ) -> list[str]:
        opening = literal(self.opening) if with_opening and self.opening else ""
        closing = literal(self.closing) if self.closing else ""
        if not with_opening:  # in free text, the white space inside the tags is the model's choice
            opening, closing = "WS?", f"WS? {literal(self.closing.lstrip())}"
        rules = [
            f"call: {opening} ({' | '.join(f'tool{i}' for i in range(len(tools)))}) {closing}",
            r"WS: /[ \n]{1,2}/",
        ]
        if self.list_marker is not None:
            rules.append(f'calls: WS? "[" {self._calls(max_calls)} "]"')
        for i, tool in enumerate(tools):
            begin = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{self.arguments_key}": '
            rules.append(f"tool{i}: {literal(begin)} arguments{i} {literal('}')}")
            rules.append(f"arguments{i}: {tool.arguments_rule(tool.name in loose)}")
        return rules


CALL_FORMATS: Registry[CallFormat] = Registry(
    "tool call format",
    {
        "hermes": CallFormat("<tool_call>\n", "\n</tool_call>", "\n", "arguments"),
        "llama_json": CallFormat("", "", "; ", "parameters", starts_answer=True),
        "mistral": CallFormat("", "", ", ", "arguments", list_marker="[TOOL_CALLS]"),
        "granite": CallFormat("", "", ", ", "arguments", list_marker="<|tool_call|>"),
    },
)
