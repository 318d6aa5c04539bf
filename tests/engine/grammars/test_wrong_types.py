"""Each value of a schema, a structural tag, a tool and a field in turn of each wrong JSON type: accepted or refused."""

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import pytest

from pagoda.base.errors import RequestError
from pagoda.base.structured_outputs import StructuredOutputsParams
from pagoda.engine.answers.tool_parsers import TOOL_PARSERS
from pagoda.engine.grammars.grammar_text import grammar_text
from pagoda.engine.grammars.tool_grammar import Tool

VALUES: tuple[Any, ...] = (None, True, -1, 2.5, "x", [], ["x"], [["x"]], [{}], {}, {"x": 1}, {"x": ["x"]})
TREE = {
    "type": "object",
    "properties": {"kids": {"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "b": {"const": 1}},
    "required": ["b"],
}
SCHEMAS: dict[str, Any] = {
    "object": {
        "$id": "http://a/b",
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 1, "maximum": 9, "multipleOf": 2}},
        "patternProperties": {"^b$": {"type": "string", "pattern": "a+", "minLength": 1}},
        "additionalProperties": {"enum": ["c"], "title": "C", "deprecated": False},
        "required": ["a"],
        "minProperties": 1,
        "maxProperties": 3,
    },
    "references": {
        "$defs": {"d": TREE, "e": {"$anchor": "e", "type": ["string", "null"], "format": "uri-reference"}},
        "anyOf": [{"$ref": "#/$defs/d"}, {"$ref": "#e"}, {"allOf": [{"type": "object"}, {"required": ["a"]}]}],
    },
    "recursion": TREE,
    "tuple": {"type": "array", "minItems": 2, "prefixItems": [{"const": 1}], "items": {"type": "null"}},
    "tuple of draft 4": {
        "id": "#t",
        "type": "array",
        "items": [{"minimum": 1, "exclusiveMinimum": True}],
        "additionalItems": {"$ref": "#t"},
        "uniqueItems": False,
    },
    "tagged oneOf": {
        "oneOf": [
            {"type": "object", "required": ["t"], "properties": {"t": {"const": "a"}}},
            {"type": "object", "required": ["t"], "properties": {"t": {"enum": ["b"]}}},
        ]
    },
}
TAG = {
    "type": "tag",
    "begin": "<a>",
    "content": {"type": "json_schema", "json_schema": {"type": "object", "required": ["a"]}, "style": "json"},
    "end": ["</a>"],
}
TAGS: dict[str, Any] = {
    "parts": {
        "type": "structural_tag",
        "format": {
            "type": "sequence",
            "elements": [
                TAG,
                {"type": "or", "elements": [{"type": "const_string", "value": "a"}, {"type": "regex", "pattern": "b"}]},
                {"type": "repeat", "min": 1, "max": 2, "content": {"type": "optional", "content": TAG}},
                {"type": "any_text", "excludes": [], "max_tokens": None},
            ],
        },
    },
    "triggered": {
        "format": {
            "type": "triggered_tags",
            "triggers": ["<"],
            "tags": [TAG],
            "at_least_one": True,
            "stop_after_first": False,
        }
    },
    "separated": {"format": {"type": "tags_with_separator", "tags": [TAG], "separator": ","}},
    "older": {
        "structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}],
        "triggers": ["<"],
    },
}


def mutants(value: Any) -> Iterator[Any]:
    """Yield the value with each of its nodes in turn replaced by each of VALUES."""
    yield from VALUES
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        for other in mutants(child):
            changed = value.copy()
            changed[key] = other
            yield changed


def is_refused(run: Callable[[], object], param: str, given: object) -> bool:
    """Whether it is a RequestError that names the input. Fails for any other error."""
    error = None
    try:
        run()
    except Exception as raised:
        error = raised
    assert error is None or (isinstance(error, RequestError) and error.param == param), (given, error)
    return error is not None


def structured(**given: Any) -> Callable[[], str]:
    return lambda: grammar_text(StructuredOutputsParams(**given))


@pytest.mark.parametrize("name", SCHEMAS)
def test_in_a_schema(name: str) -> None:
    assert not is_refused(structured(json=SCHEMAS[name]), "", name)
    refused = [is_refused(structured(json=one), "structured_outputs", one) for one in mutants(SCHEMAS[name])]
    assert any(refused)


@pytest.mark.parametrize("name", TAGS)
def test_in_a_structural_tag(name: str) -> None:
    assert not is_refused(structured(structural_tag=TAGS[name]), "", name)
    refused = [is_refused(structured(structural_tag=one), "structured_outputs", one) for one in mutants(TAGS[name])]
    assert any(refused)


@pytest.mark.parametrize("name", ["hermes", "pythonic"])
def test_in_the_parameters_of_a_tool(name: str) -> None:
    form = TOOL_PARSERS[name].GRAMMAR
    assert form is not None
    for schema in (SCHEMAS["object"], SCHEMAS["recursion"]):
        for given in mutants(schema):
            if isinstance(given, dict | None):
                is_refused(lambda given=given: form.forced([Tool("f", given)], 2), "tools", given)


@pytest.mark.parametrize("name", [one.name for one in fields(StructuredOutputsParams) if one.name != "source"])
def test_in_a_field(name: str) -> None:
    for given in VALUES:
        is_refused(structured(**{"regex": "a", name: given}), "structured_outputs", given)
        is_refused(structured(**{name: given}), "structured_outputs", given)
