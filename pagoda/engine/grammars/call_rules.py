"""The rules of one tool call: its name and arguments, as JSON or as a Python call."""

import json
import re
from dataclasses import dataclass
from typing import Any, Protocol

from pagoda.base.errors import RequestError
from pagoda.engine.grammars.grammar_text import JsonStyle, json_rule, literal

_OPENING = frozenset(
    {"additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames", "minProperties", "$ref"}
    | {"allOf", "anyOf", "oneOf", "not", "if", "dependencies", "dependentSchemas", "dependentRequired"}
)
"""Keywords of an object by which it may have, or need, properties that it does not list."""


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
    Raises RequestError for keywords of a wrong type that are read here; of the others, the library says so.
    """

    name: str
    parameters: dict[str, Any] | None
    field: str = "tools"

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

    def arguments_rule(self, is_free: bool) -> str:
        """Return the body of a rule for the arguments' object. is_free: any object will do.

        Raises RequestError for a schema that is not supported.
        """
        return json_rule({"type": "object"} if is_free else self.schema, self.field, JsonStyle())


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
            f"arguments{i}: {tool.arguments_rule(is_free)}",
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
            f"arguments{i}: {tool.arguments_rule(is_free)}",
        ]


_NAME = re.compile(r"""[^\s=(),:'"\[\]{}]+""")
_ASSERTING = frozenset(("type", "properties", "required", "additionalProperties", "unevaluatedProperties"))
_DESCRIBING = frozenset(("$defs", "definitions", "$schema", "$id", "$comment", "title", "description"))
_IGNORED = _ASSERTING | _DESCRIBING | {"default", "examples", "strict", "deprecated"}
"""Keywords of the arguments' object that a call by names keeps to, or that say nothing about it."""
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
        tool.arguments_rule(False)  # raises with the place in the whole schema
        properties = _properties(tool)
        required = tool.schema.get("required", [])
        rules: list[str] = []
        firsts: list[str] = []
        may_begin = True
        for k, (name, schema) in enumerate(properties.items()):
            _check_name(name, tool)
            rest = f" rest{i}x{k + 1}" if k + 1 < len(properties) else ""
            rules.append(f"argument{i}x{k}: {literal(name + '=')} {_value(schema, tool)}")
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


def _properties(tool: Tool) -> dict[str, Any]:
    """Return the schemas of all arguments. Raises RequestError if they are not a plain list of properties."""
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
    return properties


def _value(schema: Any, tool: Tool) -> str:
    """Return the body of a rule for one argument."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    kinds = {"boolean": '("True" | "False")', "null": '"None"'}
    if (kind := schema.get("type")) in kinds and not set(schema) - {"type", "description", "title", "default"}:
        return kinds[kind]
    shared = {name: tool.schema[name] for name in ("$defs", "definitions") if name in tool.schema}
    return json_rule({**shared, **schema}, tool.field, JsonStyle())
