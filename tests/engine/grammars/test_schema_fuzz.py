"""Random JSON in place of schemas: a RequestError or a grammar, never another error; and what a grammar lets through
conforms to the schema, as an independent validator reads it.
"""

import contextlib
import json
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher

from pagoda.base.errors import RequestError
from pagoda.base.request_limits import RequestLimits
from pagoda.base.structured_outputs import StructuredOutputsParams
from pagoda.engine.answers.tool_parsers import TOOL_PARSERS
from pagoda.engine.grammars.compiling import compile_grammar
from pagoda.engine.grammars.json_schema import rewrite_schema
from pagoda.engine.grammars.preparer import GrammarPreparer
from pagoda.engine.grammars.tool_grammar import Tool
from pagoda.engine.grammars.vocabulary import GrammarVocabulary
from pagoda.engine.tokenizers.byte_tokenizer import ByteTokenizer
from pagoda.engine.tokenizers.load_tokenizer import load_tokenizer
from pagoda.engine.tokenizers.tokenizer import Tokenizer
from tests.cached_models import cached_model

Rng = random.Random
KEYWORDS = (
    *("type", "properties", "patternProperties", "additionalProperties", "required", "items", "additionalItems"),
    *("prefixItems", "minItems", "maxItems", "minLength", "maxLength", "pattern", "format", "minimum", "maximum"),
    *("exclusiveMinimum", "exclusiveMaximum", "multipleOf", "enum", "const", "allOf", "anyOf", "oneOf", "$ref", "$id"),
    *("id", "$anchor", "$defs", "definitions", "$schema", "minProperties", "maxProperties", "uniqueItems", "not", "if"),
    *("x-guidance", "discriminator", "title", "a", "b"),
)
STRINGS = (
    *("", "a", "#", "#/$defs/a", "#/definitions/b", "#/%zz", "#a", "~0", "http://[x", "\ud800", "\x00", "é", "a" * 50),
    *("object", "string", "array", "integer", "number", "null", "date", "uuid", "byte", "(", "^a+$", "[", "\\"),
    *("http://json-schema.org/draft-04/schema#", "https://json-schema.org/draft/2020-12/schema"),
)
NUMBERS = (0, 1, -1, 2, 0.5, 3.0, 1e308, -1e308, 1e-300, 1e22, 10**30, -(10**30), 2**53 + 1, 2**63, 2**64, 10**400, 997)


def any_json(rng: Rng, depth: int = 0) -> Any:
    kind = rng.random()
    if depth > 5 or kind < 0.35:
        return rng.choice((None, True, False, rng.choice(STRINGS), rng.choice(NUMBERS), rng.choice(STRINGS)))
    if kind < 0.5:
        return [any_json(rng, depth + 1) for _ in range(rng.randint(0, 4))]
    return {rng.choice(KEYWORDS): any_json(rng, depth + 1) for _ in range(rng.randint(0, 5))}


@pytest.mark.parametrize(
    ("first", "count"), [(0, 2000), pytest.param(2000, 18_000, marks=pytest.mark.slow)], ids=["2,000", "18,000"]
)
def test_json_in_place_of_a_schema_gives_a_grammar_or_a_request_error(first: int, count: int) -> None:
    preparer = GrammarPreparer(ByteTokenizer(), 258, RequestLimits())
    num_accepted = 0
    for seed in range(first, first + count):
        rng = Rng(seed)
        value = any_json(rng)
        schema = value if isinstance(value, dict) else {rng.choice(KEYWORDS): value}
        try:
            preparer.prepare(StructuredOutputsParams(json=rng.choice((schema, json.dumps(schema)))))
            num_accepted += 1
        except RequestError:
            pass
    assert 0.1 < num_accepted / count < 0.9


@pytest.mark.parametrize("name", ["hermes", "pythonic", "deepseek_v3"])
def test_json_in_place_of_a_tools_parameters_gives_a_grammar_or_a_request_error(name: str) -> None:
    num_refused = 0
    for seed in range(1000):
        rng = Rng(seed)
        value = any_json(rng)
        schema = value if isinstance(value, dict) else {rng.choice(KEYWORDS): value}
        for keyword in rng.sample(("properties", "required", "minProperties", "maxProperties"), 1):
            schema[keyword] = any_json(rng, 2)
        try:
            form = TOOL_PARSERS[name].GRAMMAR
            assert form is not None
            form.forced([Tool("f", schema)], 2)
        except RequestError:
            num_refused += 1
    assert 100 < num_refused < 1000


NAMES = ("a", "b", "c", "x1")


def some_schema(rng: Rng, depth: int = 0) -> Any:
    """Return a schema of today's or an older form, whose keywords come in any order."""
    if depth > 3 or rng.random() < 0.08:
        return rng.choice((True, {}, {"type": "null"}, {"type": "integer"}, {"type": "string"}, depth == 0))

    def sub() -> Any:
        return some_schema(rng, depth + 1)

    def subs(most: int) -> list[Any]:
        return [sub() for _ in range(rng.randint(1, most))]

    pieces: list[Callable[[], dict[str, Any]]] = [
        lambda: {"type": rng.choice(("object", "array", "string", "integer", "number", "null", ["string", "object"]))},
        lambda: {"properties": {name: sub() for name in rng.sample(NAMES, rng.randint(1, 3))}},
        lambda: {"patternProperties": {rng.choice(("^a", "b$", "x", "1", "^a$", "^(a|b)$")): sub()}},
        lambda: {"additionalProperties": rng.choice((False, sub()))},
        lambda: {"required": rng.sample(NAMES, rng.randint(1, 2))},
        lambda: {"items": sub()},
        lambda: {"prefixItems": subs(2)},
        lambda: {"items": subs(2), "additionalItems": rng.choice((False, sub()))},
        lambda: {"minItems": rng.randint(0, 3)},
        lambda: {"maxItems": rng.randint(0, 3)},
        lambda: {"minLength": rng.randint(0, 3), "maxLength": rng.randint(2, 5)},
        lambda: {"pattern": rng.choice(("^a+$", "b", "^[0-9]{2}", "\\d$", "^(x|yz)*$", "a|^b"))},
        lambda: {rng.choice(("minimum", "maximum")): rng.choice((0, -3, 5, 1.5, 1e3, -0.5, 12))},
        lambda: {rng.choice(("exclusiveMinimum", "exclusiveMaximum")): rng.choice((True, 0, 7, 2.5))},
        lambda: {"multipleOf": rng.choice((2, 3, 0.5, 10))},
        lambda: {"enum": rng.sample((1, "a", "b", None, True, {"a": 1}, [1], 2.5, "", {"b": "a", "c": []}), 3)},
        lambda: {"const": rng.choice((1, "a", None, {"a": "x"}, [], 0.5))},
        lambda: {rng.choice(("allOf", "anyOf", "oneOf")): subs(3)},
        lambda: {"$ref": rng.choice(("#", "#/$defs/p", "#/$defs/q"))},
        lambda: {"minProperties": rng.randint(0, 2)},
        lambda: {"maxProperties": rng.randint(0, 3)},
        lambda: {"format": rng.choice(("date", "ipv4", "byte"))},
    ]
    chosen = rng.sample(pieces, rng.randint(1, 4))
    schema = {name: value for piece in chosen for name, value in piece().items()}
    return {**schema, "$defs": {"p": some_schema(rng, 1), "q": some_schema(rng, 2)}} if depth == 0 else schema


def as_today(schema: Any) -> Any:
    """Return a schema in draft 2020-12's form; written for the validator, apart from the code under test."""
    if not isinstance(schema, dict | list):
        return schema
    if isinstance(schema, list):
        return [as_today(one) for one in schema]
    out = {name: value if name in ("enum", "const") else as_today(value) for name, value in schema.items()}
    for bound, flag in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if out.get(flag) is True:
            del out[flag]
            if bound in out:
                out[flag] = out.pop(bound)
    after = out.pop("additionalItems", True)
    if isinstance(out.get("items"), list):
        out["prefixItems"], out["items"] = out["items"], after
    return out


def closed_object(rng: Rng, depth: int = 0) -> dict[str, Any]:
    """Return a schema of an object in which few names, or none, are left besides those that it lists."""

    def sub() -> Any:
        return closed_object(rng, depth + 1) if depth < 2 and rng.random() < 0.3 else rng.choice(LEAVES)

    patterns = ("^a$", "^(a|b)$", "^ab?$", "^x1$", "^[ab]{1,2}$", "^$", "^a+$", "^.{3}$", "b")
    schema: dict[str, Any] = {"type": "object", "additionalProperties": rng.choice((False, False, sub()))}
    if rng.random() < 0.8:
        schema["properties"] = {name: sub() for name in rng.sample(NAMES, rng.randint(1, 3))}
    if rng.random() < 0.8:
        schema["patternProperties"] = {rng.choice(patterns): sub() for _ in range(rng.randint(1, 2))}
    if rng.random() < 0.7:
        schema["required"] = rng.sample(NAMES, rng.randint(1, 3))
    return {"allOf": [schema, closed_object(rng, 2)]} if depth == 0 and rng.random() < 0.1 else schema


LEAVES: tuple[Any, ...] = (
    *(True, {"type": "null"}, {"const": "a"}, {"enum": [1, "b"]}, {"type": "string", "format": "date"}),
    *({"type": "string", "pattern": "^a+$", "maxLength": 3}, {"type": "string", "pattern": "^abc$", "maxLength": 2}),
    *({"type": "integer", "minimum": 1, "maximum": 9, "multipleOf": 7}, {"type": "number", "exclusiveMaximum": 0.5}),
    *({"allOf": [{"enum": ["a", 1]}, {"enum": [1, 2]}]}, {"allOf": [{"pattern": "^a$"}, {"pattern": "^b$"}]}),
    *({"type": "array", "items": {"type": "integer", "minimum": 3, "maximum": 4, "multipleOf": 5}}, {"minItems": 1}),
)


def random_output(matcher: LLMatcher, rng: Rng, tokens: Sequence[bytes], eos: int) -> str | None:
    """Return a text that the grammar allows; None if it did not end soon. Asserts that it has no dead end."""
    out = bytearray()
    for _ in range(400):
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits)
        assert len(allowed), (bytes(out), matcher.get_error())
        if bits[eos] and (rng.random() < 0.5 or len(allowed) == 1):
            return out.decode()
        some = [one for one in rng.choices(allowed, k=8) if one != eos] or [one for one in allowed if one != eos]
        if len(out) > 60 and rng.random() < 0.7:
            some = [one for one in allowed[:200].tolist() if tokens[one][:1] in b'"}],'] or some
        token = int(rng.choice(some))
        assert matcher.consume_token(token)
        out += tokens[token]
    return None


MAKERS = {"any": some_schema, "closed": closed_object}


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(
    ("first", "count"), [(0, 250), pytest.param(250, 10_000, marks=pytest.mark.slow)], ids=["250", "10,000"]
)
def test_what_a_grammar_lets_through_conforms_to_the_schema(first: int, count: int, make: str) -> None:
    walk_schemas(ByteTokenizer(), MAKERS[make], range(first, first + count), 8)


@pytest.mark.parametrize("make", MAKERS)
def test_the_same_with_the_tokens_of_a_real_model(make: str) -> None:
    walk_schemas(load_tokenizer(cached_model("smollm2-135m")), MAKERS[make], range(5000, 5060), 4)


def walk_schemas(tokenizer: Tokenizer, make: Callable[[Rng], Any], seeds: range, num_outputs: int) -> None:
    """Write random outputs of random schemas: no dead end, and each that ends validates."""
    vocab_size = tokenizer.facts.vocab_size
    preparer = GrammarPreparer(tokenizer, vocab_size, RequestLimits())
    library_form = GrammarVocabulary(lambda: tokenizer, vocab_size).get()
    tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
    num_ended = 0
    for seed in seeds:
        rng = Rng(seed)
        schema = make(rng)
        try:
            text = preparer.prepare(StructuredOutputsParams(json=schema))
        except RequestError:
            continue
        validator = jsonschema.Draft202012Validator(as_today(schema))
        matcher = compile_grammar(library_form, text)
        for _ in range(num_outputs):
            try:
                output = random_output(matcher.deep_copy(), rng, tokens, tokenizer.facts.eos_token_ids[0])
            except AssertionError as error:
                raise AssertionError(f"schema {seed}, {schema}: {error}") from None
            if output is not None:
                num_ended += 1
                with contextlib.suppress(OverflowError):  # the validator's, of 1e999: it reads numbers as floats
                    assert validator.is_valid(json.loads(output)), (seed, schema, output)
    assert num_ended > len(seeds)


@pytest.mark.parametrize(
    "schema_of",
    [
        lambda n: {"anyOf": [{"const": i} for i in range(n)]},
        lambda n: {"properties": {f"a{i}": {"type": "string"} for i in range(n)}},
        lambda n: {"allOf": [{"$ref": f"#/$defs/{i}"} for i in range(n)], "$defs": {str(i): {} for i in range(n)}},
        lambda n: {
            "oneOf": [{"type": "object", "required": ["a"], "properties": {"a": {"const": f"{i}"}}} for i in range(n)]
        },
        lambda n: {"enum": [[i] for i in range(n)]},
        lambda n: {"title": "a" * 20 * n},
        lambda n: {"properties": {"k" * 10 * n: {"properties": {f"a{i}": {"not": i == n - 1} for i in range(n)}}}},
    ],
)
def test_a_schema_is_rewritten_in_linear_time(schema_of: Callable[[int], Any]) -> None:
    def seconds(n: int) -> float:
        text, times = json.dumps(schema_of(n)), list[float]()
        for _ in range(2):
            schema, begin_s = json.loads(text), time.thread_time()
            with contextlib.suppress(RequestError):
                rewrite_schema(schema, "json")
            times.append(time.thread_time() - begin_s)
        return min(times)

    assert seconds(16_000) < 8 * seconds(4000) + 0.01
