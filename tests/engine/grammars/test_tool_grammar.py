"""The grammars of tool calls, text by text, and the parsers of the same names on what they allow."""

import json
from typing import Any

import pytest

from pagoda.base.errors import RequestError
from pagoda.base.structured_outputs import StructuredOutputsParams
from pagoda.engine.grammars.grammar_text import grammar_text
from pagoda.engine.grammars.llguidance_backend import LlguidanceBackend
from pagoda.engine.grammars.tool_grammar import CALL_FORMATS, Tool
from pagoda.engine.templates.generic_tools import lacks_tools, with_generic_tools
from pagoda.engine.tokenizers.byte_tokenizer import BOS, EOS, ByteTokenizer
from pagoda.server.tool_parsers import TOOL_PARSERS
from tests.engine.grammars.matching import accepts, allowed, ready

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Zürich"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [Tool("weather", CITY), Tool("now", None)]
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
HERMES_NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
LLAMA = '{"name": "weather", "parameters": {"city": "Zürich"}}'
FORCED: dict[str, tuple[list[str], list[str]]] = {
    "hermes": (
        [HERMES, HERMES_NOW, f"{HERMES}\n{HERMES_NOW}"],
        ["", "text", f"{HERMES} ", f"{HERMES}{HERMES}", HERMES.replace("Bern", "Rom"), HERMES.replace("weather", "w")],
    ),
    "llama_json": (
        [LLAMA, f"{LLAMA}; {LLAMA}"],
        ["", "text", f"{LLAMA} and", LLAMA.replace("Zürich", "Rom"), "{}"],
    ),
}
LIST = '[{"name": "weather", "arguments": {"city": "Bern"}}]'
PAIR = LIST.replace("}}]", '}}, {"name": "now", "arguments": {}}]')
for name, marker in (("mistral", "[TOOL_CALLS]"), ("granite", "<|tool_call|>")):
    FORCED[name] = (
        [marker + LIST, f"{marker} {PAIR}"],
        ["", "text", LIST, marker + LIST + "x", marker + LIST.replace("Bern", "Rom"), f"{marker}[]"],
    )
FREE: dict[str, tuple[list[str], list[str]]] = {
    "hermes": (
        ["", "text", f"text {HERMES}", f"{HERMES} {HERMES_NOW} text", "a <tool b", HERMES.replace("\n", "")],
        [HERMES.replace("Bern", "Rom"), "<tool_call>text"],
    ),
    "llama_json": (["text", LLAMA, f"{LLAMA}; {LLAMA}"], [LLAMA.replace("Zürich", "Rom"), '{"text": 1}']),
}
for name, marker in (("mistral", "[TOOL_CALLS]"), ("granite", "<|tool_call|>")):
    FREE[name] = (
        ["", "text", marker + LIST, f"text {marker}{PAIR}", "[1, 2]"],
        [marker + LIST.replace("Bern", "Rom"), f"{marker}text"],
    )


@pytest.fixture(scope="module")
def backend() -> LlguidanceBackend:
    return LlguidanceBackend(ByteTokenizer, 258, 2)


def text_of(grammar: str) -> str:
    return grammar_text(StructuredOutputsParams(grammar=grammar)).text


def calls_in(name: str, text: str) -> list[tuple[str, Any]]:
    parser = TOOL_PARSERS[name]()
    parsed = [parser.feed(one) for one in text] + [parser.end()]
    return [(call.name, json.loads(call.arguments)) for part in parsed for call in part.calls]


@pytest.mark.parametrize("name", list(CALL_FORMATS))
def test_forced_calls(backend: LlguidanceBackend, name: str) -> None:
    grammar = text_of(CALL_FORMATS[name].forced(TOOLS, 3))
    good, bad = FORCED[name]
    assert [text for text in good if not accepts(backend, ByteTokenizer(), grammar, text)] == []
    assert [text for text in bad if accepts(backend, ByteTokenizer(), grammar, text)] == []
    for text in good:
        calls = calls_in(name, text)
        assert len(calls) == text.count('"name"')
        assert all(
            call in [("weather", {"city": c}) for c in ("Bern", "Zürich")] or call == ("now", {}) for call in calls
        )
    many = CALL_FORMATS[name].separator.join([good[0]] * 4)
    if CALL_FORMATS[name].list_marker is not None:
        many = good[0].replace("]", ", ".join(["", *[LIST[1:-1]] * 3]) + "]", 1 if name == "granite" else 2)
    assert not accepts(backend, ByteTokenizer(), grammar, many)
    single = text_of(CALL_FORMATS[name].forced(TOOLS, 1))
    assert not accepts(backend, ByteTokenizer(), single, good[-1])


@pytest.mark.parametrize("name", list(CALL_FORMATS))
def test_calls_in_text(backend: LlguidanceBackend, name: str) -> None:
    grammar = text_of(CALL_FORMATS[name].free(TOOLS, [], 3))
    good, bad = FREE[name]
    assert [text for text in good if not accepts(backend, ByteTokenizer(), grammar, text)] == []
    assert [text for text in bad if accepts(backend, ByteTokenizer(), grammar, text)] == []
    for text in good:
        assert len(calls_in(name, text)) == text.count('"name"')
    loose = text_of(CALL_FORMATS[name].free(TOOLS, ["weather"], 3))
    assert accepts(backend, ByteTokenizer(), loose, bad[0])


@pytest.mark.parametrize("name", ["mistral", "granite"])
def test_a_marker_that_is_a_special_token(backend: LlguidanceBackend, name: str) -> None:
    """It is asked for by its id, and text cannot stand for it."""
    forced = ready(backend, text_of(CALL_FORMATS[name].forced(TOOLS, 1, BOS)))
    assert allowed(backend, forced) == {BOS}
    forced.advance([BOS, *LIST.encode()])
    assert forced.error == ""
    assert allowed(backend, forced) == {EOS}
    assert calls_in(name, LIST) == [("weather", {"city": "Bern"})]
    free = ready(backend, text_of(CALL_FORMATS[name].free(TOOLS, [], 1, BOS)))
    assert {BOS, EOS, ord("a")} <= allowed(backend, free)
    free.advance([*b"text ", BOS])
    assert ord("[") in allowed(backend, free)
    assert ord("a") not in allowed(backend, free)


@pytest.mark.parametrize("name", ["mistral", "granite"])
def test_lists_that_are_no_calls_stay_text(name: str) -> None:
    marker = str(CALL_FORMATS[name].list_marker)
    for text in (
        "[1, 2] and more",
        '[{"a": 1}]',
        f"a {marker}",
        f"b {marker} nothing",
        f"{marker}[1]",
        marker[:-1],
        "[",
        " ",
    ):
        for pieces in (list(text), [text]):
            parser = TOOL_PARSERS[name]()
            parsed = [*map(parser.feed, pieces), parser.end()]
            assert [call for one in parsed for call in one.calls] == []
            content = "".join(one.content for one in parsed)
            assert content == text
    parser = TOOL_PARSERS[name]()
    parsed = [*map(parser.feed, f"Look. {marker} {PAIR} Done"), parser.end()]
    assert "".join(one.content for one in parsed).replace(" ", "") == "Look.Done"
    assert [call.name for one in parsed for call in one.calls] == ["weather", "now"]


def test_a_name_is_written_as_json_writes_it(backend: LlguidanceBackend) -> None:
    grammar = text_of(CALL_FORMATS["hermes"].forced([Tool('quo"te ::= é', None)], 1))
    text = HERMES_NOW.replace('"now"', json.dumps('quo"te ::= é', ensure_ascii=False))
    assert accepts(backend, ByteTokenizer(), grammar, text)
    assert calls_in("hermes", text) == [('quo"te ::= é', {})]


def test_an_unsupported_schema_is_refused_by_its_field() -> None:
    with pytest.raises(RequestError, match=r"tools\[3\]: at /properties/a/\$ref"):
        CALL_FORMATS["hermes"].forced([Tool("f", {"properties": {"a": {"$ref": "#/no"}}}, "tools[3]")], 1)


def test_generic_tools_take_a_place_that_the_template_has() -> None:
    tools = [{"type": "function", "function": {"name": "now"}}]
    user, system = {"role": "user", "content": "Hi"}, {"role": "system", "content": "Be short."}
    roles = "{% if messages[0]['role'] == 'system' %}"
    assert lacks_tools(roles)
    assert not lacks_tools("{{ tools }}")
    (first, second) = with_generic_tools([user], tools, roles)
    assert (first["role"], second) == ("system", user)
    assert '{"name": "now"}' in first["content"]
    (first, second) = with_generic_tools([system, user], tools, roles)
    assert first["content"].startswith("Be short.\n\nYou may call")
    (only,) = with_generic_tools([user], tools, "{{ raise_exception('System role not supported') }}")
    assert only["role"] == "user"
    assert only["content"].endswith("\n\nHi")
    (only,) = with_generic_tools([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], tools, "")
    assert [part["text"] for part in only["content"]][1:] == ["Hi"]
    assert with_generic_tools([user], None, roles) == [user]
    odd: list[Any] = ["no message", {"role": "tool"}, {"role": "assistant", "tool_calls": ["no call"]}]
    assert len(with_generic_tools(odd, tools, roles)) == 4
