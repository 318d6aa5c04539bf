"""Checking grammars before they are accepted: errors with their place, and grammars that hang or crash the library."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from pagoda.base.errors import RequestError
from pagoda.base.request_limits import RequestLimits
from pagoda.base.structured_outputs import StructuredOutputsParams
from pagoda.engine.grammars.checker import GrammarLimits
from pagoda.engine.grammars.preparer import GrammarPreparer
from pagoda.engine.tokenizers.byte_tokenizer import ByteTokenizer


@pytest.fixture(scope="module")
def preparer() -> Iterator[GrammarPreparer]:
    preparer = GrammarPreparer(ByteTokenizer(), 258, RequestLimits(), GrammarLimits(timeout_s=1.5))
    yield preparer
    preparer.close()


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
        ({"properties": {"a": {"items": {"type": "string", "pattern": "(?=a)b"}}}}, "at /properties/a/items:"),
        ({"$defs": {"x": {"pattern": "("}}, "items": {"$ref": "#/$defs/x"}}, "at /$defs/x:"),
        (
            {"properties": {"a": {"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}}},
            "at /properties/a/oneOf: its alternatives may overlap",
        ),
        ({"items": {"minProperties": 2, "properties": {"a": {}, "b": {}}}}, "at /items/minProperties: "),
        ({"items": {"minProperties": 1, "properties": {"a": {}, "b": {}}}}, "at /items:"),
        ({"anyOf": [{"type": "string", "maxLength": 1, "minLength": 3}]}, "at /anyOf/0:"),
        ({"$ref": "#"}, "at /: no text satisfies it"),
    ],
)
def test_an_error_names_its_place_in_the_schema(preparer: GrammarPreparer, schema: dict[str, Any], said: str) -> None:
    message = refusal(preparer, json=schema)
    assert said in message
    assert "coerce_one_of" not in message


def test_other_grammars_say_what_is_wrong(preparer: GrammarPreparer) -> None:
    assert "unknown name" in refusal(preparer, grammar="start: nothing")
    assert "regex" in refusal(preparer, regex="(((")
    assert "no text satisfies it" in refusal(preparer, grammar="start: start")
    assert "no text satisfies it" in refusal(preparer, grammar="start: A\nA: /a/ & /b/")


def test_texts_that_are_forced_from_the_beginning_are_accepted(preparer: GrammarPreparer) -> None:
    for given in ({"choice": ["after that"]}, {"json": {"const": "h\u00e4llo"}}, {"regex": "abc"}):
        assert preparer.prepare(StructuredOutputsParams(**given, source="response_format"))
    assert "GBNF" in refusal(preparer, grammar="root ::= (((")
    assert "no trigger begins structures[0].begin" in refusal(
        preparer, structural_tag={"structures": [{"begin": "<a>", "schema": {}, "end": ""}], "triggers": ["<b"]}
    )
    assert "262144" in refusal(preparer, regex="a" * 300_000)


def test_a_grammar_that_compiles_for_too_long_is_refused_at_the_deadline(preparer: GrammarPreparer) -> None:
    patterns = [{"type": "string", "pattern": f".*{i}.*"} for i in range(24)]
    begin_s = time.monotonic()
    assert "not compiled within 1.5 s" in refusal(preparer, json={"allOf": patterns})
    assert time.monotonic() - begin_s < 30
    preparer.prepare(StructuredOutputsParams(choice=["after it"]))


def test_a_grammar_that_overflows_the_stack_is_refused(preparer: GrammarPreparer) -> None:
    rules = "\n".join(f"r{i}: r{i + 1}" for i in range(3000))
    assert "too complex" in refusal(preparer, grammar=f'start: r0\n{rules}\nr3000: "a"')
    preparer.prepare(StructuredOutputsParams(choice=["after that"]))


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


def test_the_process_is_replaced_when_it_is_killed(preparer: GrammarPreparer) -> None:
    preparer.prepare(StructuredOutputsParams(choice=["one"]))
    first = preparer._checker.process.pid
    preparer._checker.process.kill()
    preparer.prepare(StructuredOutputsParams(choice=["two"]))
    assert preparer._checker.process.pid not in (None, first)
