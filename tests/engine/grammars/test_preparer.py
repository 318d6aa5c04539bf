"""Trying grammars before they are accepted: what is refused, and why; what would hang or crash the library."""

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest

from pagoda import LLM, SamplingParams
from pagoda.base.errors import RequestError
from pagoda.base.request_limits import RequestLimits
from pagoda.base.structured_outputs import StructuredOutputsParams
from pagoda.engine.grammars.preparer import GrammarPreparer
from pagoda.engine.text_engine import TextEngine
from pagoda.engine.tokenizers.byte_tokenizer import ByteTokenizer
from tests.fake_engine import byte_inputs, fake_core


@pytest.fixture(scope="module")
def preparer() -> GrammarPreparer:
    return GrammarPreparer(ByteTokenizer(), 258, RequestLimits())


def refusal(preparer: GrammarPreparer, **given: Any) -> str:
    with pytest.raises(RequestError) as refused:
        preparer.prepare(StructuredOutputsParams(**given, source="response_format"))
    assert refused.value.param == "response_format"
    return str(refused.value)


def test_compiled_grammars_are_cached(preparer: GrammarPreparer) -> None:
    params = StructuredOutputsParams(json={"type": "object"})
    assert preparer.known(params) is None
    text = preparer.prepare(params)
    assert preparer.known(params) == text
    assert preparer.prepare(StructuredOutputsParams(json='{"type": "object"}')) == text


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"pattern": "(?=a)b"}, "look-around"),
        ({"properties": {"a": {"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}}}, "the alternatives of a oneOf may"),
        ({"items": {"minProperties": 1, "properties": {"a": {}, "b": {}}}}, "min/maxProperties only supported"),
        ({"anyOf": [{"type": "string", "maxLength": 1, "minLength": 3}]}, "minLength (3) is greater than maxLength"),
        ({"$ref": "#"}, "no text satisfies it"),
        ({"format": {}}, "Expected string for 'format'"),
        ({"uniqueItems": True, "maxItems": None}, "at /uniqueItems: is not supported"),
        ({"anyOf": [{}], "properties": "x"}, "properties must be an object"),
        ({"$ref": "http://[x"}, "external schemas are not fetched"),
        ({"$id": "http://[x", "$ref": "other"}, "external schemas are not fetched"),
        ('{"minLength": 1e400}', "out of range"),
        ({"maxLength": 10**400}, "number out of range"),
    ],
)
def test_a_schema_that_the_library_refuses_is_a_request_error_with_its_message(
    preparer: GrammarPreparer, schema: Any, said: str
) -> None:
    message = refusal(preparer, json=schema)
    assert said in message
    assert "coerce_one_of" not in message


@pytest.mark.parametrize(
    "schema",
    [
        {"format": {}},
        {"uniqueItems": True, "maxItems": None},
        {"anyOf": [{}], "properties": "x"},
        {"$ref": "http://[x"},
        {"$id": "http://[x", "$ref": "y"},
        '{"minLength": 1e400}',
    ],
)
def test_generate_raises_a_request_error_for_an_invalid_schema(schema: Any) -> None:
    with LLM.over(lambda: TextEngine(fake_core(), byte_inputs())) as llm, pytest.raises(RequestError) as refused:
        llm.generate("x", SamplingParams(structured_outputs=StructuredOutputsParams(json=schema)))
    assert refused.value.param == "structured_outputs"


def test_an_id_that_is_not_a_uri_is_ignored(preparer: GrammarPreparer) -> None:
    assert preparer.prepare(StructuredOutputsParams(json={"$id": "http://[x", "type": "null"}))


def test_other_grammars_say_what_is_wrong(preparer: GrammarPreparer) -> None:
    assert "unknown name" in refusal(preparer, grammar="start: nothing")
    assert "regex" in refusal(preparer, regex="(((")
    assert "no text satisfies it" in refusal(preparer, grammar="start: start")
    assert "no text satisfies it" in refusal(preparer, grammar="start: A\nA: /a/ & /b/")


def test_texts_that_are_forced_from_the_beginning_are_accepted(preparer: GrammarPreparer) -> None:
    forms: list[dict[str, Any]] = [{"choice": ["after that"]}, {"json": {"const": "h\u00e4llo"}}, {"regex": "abc"}]
    for given in forms:
        assert preparer.prepare(StructuredOutputsParams(**given, source="response_format"))
    assert "GBNF" in refusal(preparer, grammar="root ::= (((")
    assert "at structures/0/begin: no trigger begins '<a>'" in refusal(
        preparer, structural_tag={"structures": [{"begin": "<a>", "schema": {}, "end": ""}], "triggers": ["<b"]}
    )
    assert "262144" in refusal(preparer, regex="a" * 300_000)


def reference_chain(schemas: int, link: Callable[[Any], Any]) -> dict[str, Any]:
    """Each of many schemas names the next one."""
    defs = {f"a{i}": link({"$ref": f"#/$defs/a{i + 1}"}) for i in range(schemas)}
    return {"$ref": "#/$defs/a0", "$defs": {**defs, f"a{schemas}": {"type": "array"}}}


FLOODS: dict[str, dict[str, Any]] = {
    "alternatives": {"oneOf": [{"required": ["t"], "properties": {"t": {"const": f"a{i}"}}} for i in range(2000)]},
    "values": {"enum": [{"a": i} for i in range(9000)]},
    "properties": {"properties": {f"a{i}": {"type": "string"} for i in range(9000)}},
    "patterns": {"allOf": [{"type": "string", "pattern": f".*{i}.*"} for i in range(24)]},
    "multiples": {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (7, 11, 13, 17, 19, 23)]},
    "a large multiple": {"type": "integer", "multipleOf": 999_983},
    "large multiples": {"anyOf": [{"type": "integer", "multipleOf": 9973, "minimum": i} for i in range(500)]},
    "references": reference_chain(5000, lambda link: link),
    "references in objects": reference_chain(3000, lambda link: {"properties": {"x": link}}),
    "copies": reference_chain(20, lambda link: {"type": "array", "prefixItems": [{"type": "array", **link}] * 10}),
    "copies in allOf": reference_chain(20, lambda link: {"allOf": [link] * 10}),
    "combinations": {
        "allOf": [{"anyOf": [{"properties": {f"p{j}": {"const": i}}} for i in range(9)]} for j in range(9)]
    },
    "nesting": functools.reduce(lambda inner, _: {"items": inner}, range(400), {}),
}


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_is_refused_soon(preparer: GrammarPreparer, name: str) -> None:
    begin_s = time.process_time()
    assert refusal(preparer, json=FLOODS[name])
    assert time.process_time() - begin_s < 10  # a tenth of a second of CPU


def test_large_schemas_that_are_not_floods_are_accepted(preparer: GrammarPreparer) -> None:
    tags = [{"type": "object", "properties": {"t": {"const": f"a{i}"}}, "required": ["t"]} for i in range(500)]
    for schema in (
        {"oneOf": tags, "discriminator": {"propertyName": "t"}},
        {"properties": {f"a{i}": {"type": "string"} for i in range(500)}},
        {"type": "array", "maxItems": 10**9, "minItems": 10**8},
        {"type": "string", "maxLength": 10**9, "minLength": 10**8},
        {"type": "object", "properties": {"a": {"$ref": "#"}, "b": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}},
        reference_chain(60, lambda link: {"properties": {"x": link}}),
    ):
        assert preparer.prepare(StructuredOutputsParams(json=schema))


def test_a_grammar_whose_rules_name_each_other_thousands_deep_compiles(preparer: GrammarPreparer) -> None:
    rules = "\n".join(f"r{i}: r{i + 1}" for i in range(9000))
    assert preparer.prepare(StructuredOutputsParams(grammar=f'start: r0\n{rules}\nr9000: "a"'))


def alternatives(count: int) -> str:
    return " | ".join(f'"{i} item"' for i in range(count))


@pytest.mark.parametrize("before", ["", '"x" ', '"ab" "c" '], ids=["at the beginning", "after one", "after some"])
def test_a_grammar_that_no_output_can_follow_is_refused(preparer: GrammarPreparer, before: str) -> None:
    """It compiles and allows a first token, but then its rows exceed the library's limit."""
    assert "max is 2000" in refusal(preparer, grammar=f"start: {before}({alternatives(3000)})")
    assert preparer.prepare(
        StructuredOutputsParams(grammar=f"start: {before}({alternatives(1500)})", source="response_format")
    )


def test_a_grammar_that_some_outputs_can_follow_is_accepted(preparer: GrammarPreparer) -> None:
    text = f'start: "a" "b" "c" | "x" ({alternatives(3000)})'
    assert preparer.prepare(StructuredOutputsParams(grammar=text, source="response_format"))
