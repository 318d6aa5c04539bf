"""StructuredOutputsParams: what a request's output is constrained to."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pagoda.base.errors import RequestError
from pagoda.base.param_values import Converted
from pagoda.base.text import check_encodable

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""The fields of StructuredOutputsParams of which exactly one is given."""

_UNSET: Any = None


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """Constrain the output; set exactly one of the first six fields. The names are vLLM's.

    json: a JSON schema, as a mapping or a string.   regex: a regular expression that the whole output matches.
    choice: strings, one of which is the output.   grammar: a context-free grammar in Lark's syntax, or in GBNF (EBNF
        with `::=` and the start rule `root`).
    json_object: True for any JSON object.
    structural_tag: text with JSON in tags, as a mapping or a string (see docs/howto/structured-output.md).
    disable_any_whitespace: no whitespace between the tokens of JSON.
    disable_additional_properties: objects without `additionalProperties` in the schema accept no other properties.
    whitespace_pattern: a regular expression for the whitespace between the tokens of JSON, at most one match
        in each place. By default a space, or a line break with indentation.
    reasoning_end: what ends the model's reasoning, as a string or the id of a special token; the text up to it is
        unconstrained. None: the constraint applies from the first token.
    source: the field of the request that this comes from, for error messages.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: Converted[Iterable[str] | None, tuple[str, ...] | None] = _UNSET
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    reasoning_end: str | int | None = None
    source: str = field(default="structured_outputs", compare=False)

    def __post_init__(self) -> None:
        put = object.__setattr__  # normalise the fields of the frozen record during construction
        for name in ("json", "structural_tag"):
            put(self, name, _json_text(name, getattr(self, name)))
        if not isinstance(self.reasoning_end, int):
            _check_text("reasoning_end", self.reasoning_end)
        for name in ("regex", "grammar", "whitespace_pattern"):
            _check_text(name, getattr(self, name))
        if self.choice is not None:
            put(self, "choice", _choices(self.choice))
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                raise _refuse(name, getattr(self, name), "true or false")
        if self.json_object not in (None, True, False):
            raise _refuse("json_object", self.json_object, "true or false")
        put(self, "json_object", self.json_object or None)
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            said = f"got {' and '.join(given)}" if given else "got none of them"
            raise RequestError(f"structured_outputs takes exactly one of {', '.join(KINDS)} ({said})", _FIELD)

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        return next(name for name in KINDS if getattr(self, name) is not None)

    @property
    def num_chars(self) -> int:
        """Characters of the schema, grammar, expression or choices."""
        value = getattr(self, self.kind)
        if isinstance(value, tuple):
            return sum(map(len, value))
        return len(value) if isinstance(value, str) else 0


_FIELD = "structured_outputs"


def _refuse(name: str, value: object, allowed: str) -> RequestError:
    return RequestError(f"structured_outputs.{name}={value!r:.80} is not allowed: it must be {allowed}", _FIELD)


def _json_text(name: str, value: Any) -> str | None:
    """Return a JSON object as text. Its keys keep their order, which is the order of an object's properties."""
    if value is None:
        return None
    if isinstance(value, Mapping | bool):
        try:
            value = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"structured_outputs.{name} cannot be written as JSON: {error}", _FIELD) from None
    if not isinstance(value, str) or not value.strip():
        raise _refuse(name, value, "a JSON object, or its text")
    check_encodable(f"structured_outputs.{name}", value)
    return value


def _check_text(name: str, value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, str) or not value:
        raise _refuse(name, value, "a string that is not empty")
    check_encodable(f"structured_outputs.{name}", value)


def _choices(value: Any) -> tuple[str, ...]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise _refuse("choice", value, "a list of strings")
    choices = tuple(value)
    if not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise _refuse("choice", value, "a list of at least one string, none of them empty")
    for choice in choices:
        check_encodable("structured_outputs.choice", choice)
    return tuple(dict.fromkeys(choices))
