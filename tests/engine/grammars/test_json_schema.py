"""Rewriting JSON schemas: the same values are valid before and after, and what cannot be written is refused."""

import contextlib
import itertools
import json
import time
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from pagoda.base.errors import RequestError
from pagoda.engine.grammars import dead_ends
from pagoda.engine.grammars.compiling import compile_grammar
from pagoda.engine.grammars.json_schema import parse_schema, rewrite_schema

EQUIVALENT: dict[str, dict[str, Any]] = {
    "definitions": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "definitions": {"n": {"type": "integer", "minimum": 1}},
        "properties": {"a": {"$ref": "#/definitions/n"}, "b": {"$ref": "#/properties/a"}},
    },
    "anchor": {"$defs": {"x": {"$anchor": "here", "type": "string"}}, "properties": {"a": {"$ref": "#here"}}},
    "id": {
        "$id": "https://a.example/root.json",
        "$defs": {"x": {"$id": "other.json", "type": "string"}},
        "properties": {"a": {"$ref": "other.json"}, "b": {"$ref": "https://a.example/root.json#/$defs/x"}},
    },
    "recursion": {
        "type": "object",
        "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "additionalProperties": False,
    },
    "escaped pointer": {"$defs": {"a/b~c": {"type": "null"}}, "properties": {"a": {"$ref": "#/$defs/a~1b~0c"}}},
    "tuple": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "properties": {"a": {"type": "array", "items": [{"type": "string"}], "additionalItems": {"type": "integer"}}},
    },
    "draft 4 bounds": {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "properties": {"a": {"type": "integer", "minimum": 1, "exclusiveMinimum": True}},
    },
    "oneOf by tag": {
        "oneOf": [
            {"type": "object", "properties": {"a": {"const": "x"}}, "required": ["a"]},
            {"type": "object", "properties": {"a": {"const": "y"}, "b": {"type": "integer"}}, "required": ["a"]},
        ]
    },
    "unknown format": {"properties": {"a": {"type": "string", "format": "byte"}}},
    "unknown keywords": {"x-order": 3, "nullable": True, "properties": {"a": {"title": "A", "example": 5}}},
    "one unlisted property": {"required": ["a"], "minProperties": 2},
    "all properties": {
        "properties": {"a": {}, "b": {}},
        "required": ["a", "b"],
        "additionalProperties": False,
        "minProperties": 2,
    },
    "items that may repeat": {"properties": {"a": {"uniqueItems": False, "type": "array"}}},
    "tags of references": {
        "$defs": {
            "x": {"type": "object", "properties": {"a": {"const": "x"}}, "required": ["a"]},
            "y": {"type": "object", "properties": {"a": {"enum": ["y", ""]}, "b": {"type": "null"}}, "required": ["a"]},
        },
        "oneOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}],
        "discriminator": {"propertyName": "a"},
    },
    "names like keywords": {"properties": {"a": {"const": {"$ref": "#/nowhere"}}, "not": {"type": "null"}}},
    "names like those of keywords with instances": {
        "properties": {"a": {"$ref": "#/$defs/examples"}, "default": True},
        "$defs": {
            "examples": {"type": "object", "properties": {"enum": {"$ref": "#/$defs/const"}}, "required": ["a"]},
            "const": {"type": "null"},
        },
    },
    "patterns of listed names": {
        "properties": {"a": {"type": "string"}, "c": True},
        "patternProperties": {"^a$": {"minLength": 1}, "^(a|b)$": {"type": ["string", "null"]}, "^c+$": {"const": 1}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "a definition elsewhere": {"x": {"y": [{"type": "null"}]}, "properties": {"a": {"$ref": "#/x/y/0"}}},
}
VALUES = ["x", "", 1, 3, 1.5, True, None, [], ["x", 1], ["x"], [1], {}, {"a": {}}, {"$ref": "#/nowhere"}]
INSTANCES: list[Any] = [
    *VALUES,
    *({"a": value} for value in VALUES),
    *({"b": value} for value in VALUES),
    *({"a": a, "b": b} for a, b in itertools.product(VALUES, VALUES)),
    *({"a": a, "c": 1} for a in VALUES),
    *({"a": a, "b": 1, "c": 1} for a in VALUES),
    {"c": 1},
    {"b": 1, "c": 1},
    {"d": 1},
    {"not": 1},
    {"not": None},
]


@pytest.mark.parametrize("name", EQUIVALENT)
def test_rewriting_does_not_change_which_values_are_valid(name: str) -> None:
    schema = EQUIVALENT[name]
    rewritten: Any = rewrite_schema(schema, "json")
    before = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)(schema)
    after = jsonschema.Draft202012Validator(rewritten)
    valid = [before.is_valid(value) for value in INSTANCES]
    assert [after.is_valid(value) for value in INSTANCES] == valid
    assert len(set(valid)) == 2 or name.startswith("unknown"), "the instances tell nothing apart"


@pytest.mark.parametrize(
    ("schema", "at"),
    [
        ({"properties": {"a/b": {"not": {"pattern": "x"}}}}, "/properties/a~1b/not"),
        ({"$defs": {"x": {"uniqueItems": True}}, "items": {"$ref": "#/$defs/x"}}, "/$defs/x/uniqueItems"),
        ({"properties": {"a": {"$ref": "https://other.example/x"}}}, "/properties/a/$ref"),
        ({"properties": {"a": {"$ref": "#/$defs/no"}}}, "/properties/a/$ref"),
        ({"items": [{}, {"contains": {"type": "string"}}]}, "/items/1/contains"),
        ({"anyOf": [{}, {"if": {"pattern": "a"}, "then": False}]}, "/anyOf/1/if"),
        ({"dependencies": {"a": ["b"]}}, "/dependencies"),
        ({"divisibleBy": 3}, "/divisibleBy"),
        ({"properties": {"a": 5}}, "/properties/a"),
        ({"minProperties": 2}, "/minProperties"),
        ({"items": {"required": ["a"], "minProperties": 3}}, "/items/minProperties"),
        ({"patternProperties": {"^[a-f]$": {}}, "additionalProperties": False, "minProperties": 2}, "/minProperties"),
        ({"minimum": 2**53 + 1}, "/minimum"),
        ({"type": "integer", "minimum": 1e300}, "/minimum"),
        ({"enum": [1, {"a": [2**53 + 1]}]}, "/enum"),
        ({"items": {"multipleOf": 99991}}, "/items/multipleOf"),
        ({"items": [{}], "prefixItems": [{}]}, "/items"),
        ({"$dynamicRef": "#x"}, "/$dynamicRef"),
        ({"allOf": [{"unevaluatedProperties": False}]}, "/allOf/0/unevaluatedProperties"),
        ({"allOf": [{"additionalProperties": False}, {"patternProperties": {"a": {}}}]}, "/"),
    ],
)
def test_unsupported_keywords_are_refused_with_their_place(schema: dict[str, Any], at: str) -> None:
    with pytest.raises(RequestError) as refusal:
        rewrite_schema(schema, "response_format")
    assert f"response_format: at {at}:" in str(refusal.value)
    assert refusal.value.param == "response_format"


def test_a_pattern_that_matches_listed_names_only_becomes_properties() -> None:
    """The library would write a comma for one more property, and find no name for it."""
    integer = {"type": "integer"}
    schema = {"properties": {"a": {"minimum": 0}}, "patternProperties": {"^a$": integer, "^b": True, "a^": integer}}
    rewritten = rewrite_schema({**schema, "additionalProperties": False}, "json")
    assert rewritten == {
        "properties": {"a": {"allOf": [{"minimum": 0}, integer]}},
        "patternProperties": {"^b": True, "a^": integer},  # the library refuses the last one
        "additionalProperties": False,
    }


@pytest.mark.parametrize("made", [lambda name: "^" + name + "$", lambda name: "^(" + "|".join([name] * 9) + ")$"])
def test_comparing_patterns_with_names_is_bounded(made: Callable[[str], str]) -> None:
    names = [f"{'x' * 4000}{i}" for i in range(9)]
    patterns = {made("x" * (4000 - i) if i else "x{4000}"): {} for i in range(9)}
    schema = {"type": "object", "properties": dict.fromkeys(names, True), "patternProperties": patterns}
    begin_s = time.thread_time()
    with contextlib.suppress(RequestError):
        rewrite_schema(schema, "json")
    assert time.thread_time() - begin_s < 8


def test_patterns_that_the_library_refuses_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    num_compiled = 0

    def counted(*given: Any) -> Any:
        nonlocal num_compiled
        num_compiled += 1
        return compile_grammar(*given)

    monkeypatch.setattr(dead_ends, "compile_grammar", counted)
    with pytest.raises(RequestError, match="too many patterns or long names"):
        rewrite_schema({"patternProperties": {f"({i}": True for i in range(20_000)}}, "json")
    assert num_compiled < 400
    num_compiled = 0
    same = {"type": "object", "patternProperties": {"^x-": True, "(": True}}
    rewrite_schema({"properties": {f"p{i}": same for i in range(60)}}, "json")  # as many documents have it
    assert num_compiled == 2


def test_references_are_followed_in_linear_time() -> None:
    class Counted(dict[str, Any]):
        num_reads = 0

        def get(self, *given: Any) -> Any:
            Counted.num_reads += 1
            return super().get(*given)

    def reads(count: int) -> int:
        # each definition needs the next; their order winds from both ends to the middle
        at = [i for pair in zip(range(count), reversed(range(count)), strict=True) for i in pair][:count]
        defs: dict[str, Any] = {f"d{i}": None for i in range(count)}
        for own, following in itertools.pairwise(at):
            defs[f"d{own}"] = Counted(allOf=[{"$ref": f"d{following}"}])
        defs[f"d{at[-1]}"] = Counted(type="null")
        Counted.num_reads = 0
        assert dead_ends.endless(defs) == set()
        return Counted.num_reads

    assert reads(600) <= 2 * reads(300)


def test_names_with_one_schema_are_followed_once() -> None:
    schema: Any = {"type": "null"}
    for _ in range(60):
        schema = {"type": "object", "required": ["a", "b", "a"], "additionalProperties": schema}
    assert rewrite_schema(schema, "json") == schema


@pytest.mark.parametrize(
    ("defs", "root"),
    [
        ({}, {"$ref": "#"}),
        ({"a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/a"}}, "required": ["b"]}}, {}),
        ({"a": {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1}}, {}),
        ({"a": {"type": "array", "prefixItems": [True, {"$ref": "#/$defs/b"}], "minItems": 2}, "b": {"$ref": "#"}}, {}),
        ({"a": {"allOf": [{"type": "object"}, {"anyOf": [{"$ref": "#/$defs/b"}]}]}, "b": {"$ref": "#/$defs/a"}}, {}),
    ],
)
def test_recursion_without_an_end_is_refused(defs: dict[str, Any], root: dict[str, Any]) -> None:
    schema = root or {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}
    with pytest.raises(RequestError, match="no text satisfies it, because references lead back to themselves"):
        rewrite_schema({**schema, "$defs": defs}, "json")


def test_no_option_of_the_library_gets_through() -> None:
    schema = {"type": "object", "x-guidance": {"lenient": True}, "properties": {"x-guidance": {"type": "null"}}}
    rewritten = rewrite_schema(schema, "json")
    assert rewritten == {"type": "object", "properties": {"x-guidance": {"type": "null"}}}


def test_nesting_and_text_are_bounded() -> None:
    deep: Any = {}
    for _ in range(110):
        deep = {"items": deep}
    with pytest.raises(RequestError, match="nested more than 100 deep"):
        rewrite_schema(deep, "json")
    for text in ("{", "[]", "5", '{"a": NaN}', "[" * 100_000):
        with pytest.raises(RequestError, match="JSON"):
            parse_schema(text, "json")
    assert parse_schema(json.dumps({"type": "null"}), "json") == {"type": "null"}


def test_closed_objects() -> None:
    schema = {"properties": {"a": {"properties": {"b": {}}, "additionalProperties": True}, "c": {"type": "object"}}}
    rewritten = rewrite_schema(schema, "json", close_objects=True)
    assert rewritten == {
        "properties": {
            "a": {"properties": {"b": {}}, "additionalProperties": True},
            "c": {"type": "object"},
        },
        "additionalProperties": False,
    }
