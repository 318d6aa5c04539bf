"""Grammars of tool calls, in the formats that models write them in.

A call's name is one of the tools', and its arguments keep to that tool's schema. The formats are fields of their
parsers in `engine/answers/tool_parsers/`.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pagoda.base.errors import RequestError
from pagoda.engine.grammars.gbnf import gbnf_to_lark
from pagoda.engine.grammars.grammar_text import JsonStyle, json_rule, literal, rewritten_rule
from pagoda.engine.grammars.json_schema import Schema, rewrite_properties

MAX_CALLS = 16
"""Calls of one answer that must consist of calls: a weak model might never stop."""
_TEXT = r"TEXT: /(.|\n)*/"
_OPENING = frozenset(
    {"additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames", "minProperties", "$ref"}
    | {"allOf", "anyOf", "oneOf", "not", "if", "dependencies", "dependentSchemas", "dependentRequired"}
)
"""Keywords of an object by which it may have, or need, properties that it does not list."""


_INPUT = '{"input": '
_TYPES = (
    ("properties", dict, "an object of schemas"),
    ("required", list, "a list of strings"),
    ("minProperties", int, "an integer"),
    ("maxProperties", int, "an integer"),
)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call.

    parameters: JSON schema of its arguments, or None for no arguments.   field: of the request, for errors.
    input_grammar: in GBNF, of the text that its only argument, `input`, is, as it is written in JSON; "": the schema
        says all.
    Raises RequestError for keywords of a wrong type that are read here; the library checks the others.
    """

    name: str
    parameters: dict[str, Any] | None
    field: str = "tools"
    input_grammar: str = ""

    def __post_init__(self) -> None:
        given = self.parameters or {}
        for name, kind, what in _TYPES:
            if name in given and not isinstance(given[name], kind):
                raise RequestError(f"{self.field}: at /{name}: must be {what}", self.field)
        if not all(isinstance(one, str) for one in given.get("required", [])):
            raise RequestError(f"{self.field}: at /required: must be a list of strings", self.field)

    @property
    def schema(self) -> dict[str, Any]:
        """The schema of the arguments' object. A plain list of properties, without a word about others, allows none:
        a small model would invent one after the other.
        """
        if self.parameters is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        schema = {"type": "object", **self.parameters}
        properties, required = schema.get("properties"), schema.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list) or _OPENING & set(schema):
            return schema
        return {**schema, "additionalProperties": False} if all(name in properties for name in required) else schema

    def arguments_rules(self, i: int, is_free: bool) -> list[str]:
        """Return rule `arguments{i}`, the arguments' object, and what it needs.   is_free: any object will do.

        Raises RequestError for a schema that is not supported.
        """
        if self.input_grammar and not is_free:
            return [f'arguments{i}: {literal(_INPUT)} input{i} "}}"', *self.input_rules(i)]
        return [f"arguments{i}: {json_rule({'type': 'object'} if is_free else self.schema, self.field, JsonStyle())}"]

    def input_rules(self, i: int) -> list[str]:
        """Return rule `input{i}`, a string in JSON that follows `input_grammar`, and what it needs.

        Raises RequestError for a grammar that is too deep.
        """
        try:
            rules = gbnf_to_lark(self.input_grammar, f"text{i}", f"x{i}")
        except ValueError as error:
            raise RequestError(f"{self.field}: this grammar cannot be enforced: {error}", self.field) from None
        return [rf'input{i}: "\"" text{i} "\""', rules]


class CallRules(Protocol):
    def rules(self, i: int, tool: Tool, is_free: bool) -> list[str]:
        """Return rule `tool{i}`, and others whose names contain i.   is_free: any arguments will do.

        Raises RequestError for a schema that is not supported.
        """
        ...


@dataclass(frozen=True, slots=True)
class JsonCall:
    """{"name": ..., "arguments": ...}; the second key may have another name."""

    arguments_key: str

    def rules(self, i: int, tool: Tool, is_free: bool) -> list[str]:
        begin = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{self.arguments_key}": '
        return [
            f"tool{i}: {literal(begin)} arguments{i} {literal('}')}",
            *tool.arguments_rules(i, is_free),
        ]


@dataclass(frozen=True, slots=True)
class NamedCall:
    """The name as it is, `after_name`, the arguments as JSON, `after_arguments`."""

    after_name: str
    after_arguments: str = ""

    def rules(self, i: int, tool: Tool, is_free: bool) -> list[str]:
        if "\n" in tool.name:
            raise RequestError(f"{tool.field}: the name {tool.name!r:.80} has more than one line", tool.field)
        end = f" {literal(self.after_arguments)}" if self.after_arguments else ""
        return [
            f"tool{i}: {literal(tool.name + self.after_name)} arguments{i}{end}",
            *tool.arguments_rules(i, is_free),
        ]


_NAME = re.compile(r"""[^\s=(),:'"\[\]{}]+""")
_ASSERTING = frozenset(("type", "properties", "required", "additionalProperties", "unevaluatedProperties"))
_DESCRIBING = frozenset(("$defs", "definitions", "$schema", "$id", "$comment", "title", "description"))
_IGNORED = _ASSERTING | _DESCRIBING | {"default", "examples", "strict", "deprecated"}
"""Keywords of the arguments' object that a call by names keeps to, or that say nothing about it."""
_WORDS = {"boolean": '"True" | "False"', "null": '"None"'}
_COMBINING = frozenset({"allOf", "anyOf", "oneOf", "$ref", "const", "enum"})
"""Keywords that restrict a boolean or null."""
_ANY_VALUE = [
    'python_value: PYTHON_STRING | PYTHON_NUMBER | "True" | "False" | "None" | python_list | python_dict',
    'python_list: "[" (python_value (", " python_value)*)? "]"',
    'python_dict: "{" (PYTHON_STRING ": " python_value (", " PYTHON_STRING ": " python_value)*)? "}"',
    r"""PYTHON_STRING: /"([^"\\\n]|\\[^\n])*"/ | /'([^'\\\n]|\\[^\n])*'/""",
    r"PYTHON_NUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?/",
    r"PYTHON_NAME: /[A-Za-z_][A-Za-z0-9_]*/",
]


@dataclass(frozen=True, slots=True)
class PythonCall:
    """name(key=value, ...): only arguments that the schema lists, in its order.

    Values are JSON, which is Python but for the words true, false and null inside lists and objects; on their own they
    are written as in Python.
    """

    def rules(self, i: int, tool: Tool, is_free: bool) -> list[str]:
        _check_name(tool.name, tool)
        if is_free:
            # Rules of the same name may occur only once in a grammar, so each tool has its own.
            own = [re.sub(r"python_\w+|PYTHON_\w+", rf"\g<0>{i}", rule) for rule in _ANY_VALUE]
            pair = f'PYTHON_NAME{i} "=" python_value{i}'
            return [f'tool{i}: {literal(tool.name + "(")} ({pair} (", " {pair})*)? ")"', *own]
        if tool.input_grammar:
            return [f"tool{i}: {literal(f'{tool.name}(input=')} input{i} {literal(')')}", *tool.input_rules(i)]
        properties = _properties(tool)
        required = tool.schema.get("required", [])
        rules: list[str] = []
        firsts: list[str] = []
        may_begin = True
        for k, (name, schema) in enumerate(properties.items()):
            _check_name(name, tool)
            rest = f" rest{i}x{k + 1}" if k + 1 < len(properties) else ""
            rules.append(f"argument{i}x{k}: {literal(name + '=')} {_value(schema, tool.field)}")
            rules.append(f'rest{i}x{k}: (", " argument{i}x{k}){"" if name in required else "?"}{rest}')
            if may_begin:
                firsts.append(f"argument{i}x{k}{rest}")
            may_begin = may_begin and name not in required
        optional = "?" if may_begin else ""
        arguments = f" ({' | '.join(firsts)}){optional}" if firsts else ""
        return [f'tool{i}: {literal(tool.name + "(")}{arguments} ")"', *rules]


def _check_name(name: str, tool: Tool) -> None:
    if _NAME.fullmatch(name) is None:
        raise RequestError(
            f"{tool.field}: {name!r:.80} cannot be a name in a Python call, which this model's calls are", tool.field
        )


def _properties(tool: Tool) -> dict[str, Schema]:
    """Return the rewritten schemas of all arguments. Raises RequestError if they are not a plain list of properties."""
    schema = tool.schema
    properties = dict(schema.get("properties", {}))
    for name in schema.get("required", []):
        properties.setdefault(name, True)
    fits = {
        "minProperties": lambda count: count <= len(schema.get("required", [])),
        "maxProperties": lambda count: count >= len(properties),
    }
    for keyword, value in schema.items():
        if keyword not in _IGNORED and not (keyword in fits and fits[keyword](value)):
            raise RequestError(
                f"{tool.field}: at /{keyword}: is not supported for arguments in a Python call, which this model's "
                "calls are; list them in properties",
                tool.field,
            )
    return rewrite_properties({**schema, "properties": properties}, tool.field)


def _value(schema: Schema, field: str) -> str:
    """Return the body of a rule for one argument.   schema: rewritten."""
    if not isinstance(schema, dict) or _COMBINING & schema.keys():
        return rewritten_rule(schema, field, JsonStyle())
    named = schema.get("type")
    kinds = named if isinstance(named, list) else [named]
    words = [_WORDS[kind] for kind in kinds if isinstance(kind, str) and kind in _WORDS]
    others = [kind for kind in kinds if not isinstance(kind, str) or kind not in _WORDS]
    if not words:
        return rewritten_rule(schema, field, JsonStyle())
    rest = [rewritten_rule({**schema, "type": others}, field, JsonStyle())] if others else []
    return f"({' | '.join([*words, *rest])})"


# ---- one call and the text around it: a model's format


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

    def can_hold(self, tool: Tool) -> bool:
        """Return whether the tool's schema is supported."""
        try:
            self.call.rules(0, tool, False)
        except RequestError:
            return False
        return True

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


def bracketed(call: CallRules, marker: str | None = None) -> CallFormat:
    """Return the format of a list of calls, which begins the answer or follows a marker."""
    return CallFormat(call, "", "", ", ", "[", "]", marker, starts_answer=marker is None)


def deepseek(call: CallRules, opening: str, separator: str) -> CallFormat:
    """Return DeepSeek's format: a section of calls."""
    begin, end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    return CallFormat(call, opening, "<｜tool▁call▁end｜>", separator, "", end, begin)
