"""The grammars of tool calls, text by text, and the parsers of the same names on what they allow."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from pagoda.base.errors import RequestError
from pagoda.base.request_limits import RequestLimits
from pagoda.base.structured_outputs import StructuredOutputsParams
from pagoda.engine.answers.tool_parsers import TOOL_PARSERS, parser_for_template
from pagoda.engine.answers.tool_parsers.base import merged
from pagoda.engine.grammars import json_schema
from pagoda.engine.grammars.grammar_text import grammar_text
from pagoda.engine.grammars.json_schema import SchemaRefs
from pagoda.engine.grammars.llguidance_backend import LlguidanceBackend
from pagoda.engine.grammars.preparer import GrammarPreparer
from pagoda.engine.grammars.tool_grammar import CallFormat, Tool
from pagoda.engine.templates.generic_tools import lacks_tools, with_generic_tools
from pagoda.engine.tokenizers.byte_tokenizer import BOS, EOS, ByteTokenizer
from tests.engine.grammars.matching import VOCAB, accepts, allowed, ready

FORMATS: dict[str, CallFormat] = {
    name: form for name in TOOL_PARSERS if (form := TOOL_PARSERS[name].GRAMMAR) is not None
}
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
MARKED = (
    ("mistral", "[TOOL_CALLS]"),
    ("granite", "<|tool_call|>"),
    ("hunyuan", "<tool_calls>"),
    ("nemotron", "<TOOLCALL>"),
)
PAIR = LIST.replace("}}]", '}}, {"name": "now", "arguments": {}}]')
for name, marker in MARKED:
    FORCED[name] = (
        [marker + LIST, f"{marker} {PAIR}"],
        ["", "text", LIST, marker + LIST + "x", marker + LIST.replace("Bern", "Rom"), f"{marker}[]"],
    )
PYTHON = '[weather(city="Bern")]'
PYTHON_PAIR = '[weather(city="Zürich"), now()]'
FORCED["pythonic"] = (
    [PYTHON, "[now()]", PYTHON_PAIR],
    ["", "text", "[]", f"{PYTHON} ", PYTHON[1:-1], PYTHON.replace("Bern", "Rom"), "[weather()]", "[now(city=1)]"],
)
OLMO = '<function_calls>weather(city="Bern")\n</function_calls>'
OLMO_PAIR = OLMO.replace("\n", "\nnow()\n", 1)
M1 = '<tool_calls>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_calls>'
M1_PAIR = M1.replace("}\n", '}\n{"name": "now", "arguments": {}}\n', 1)
FORCED["minimax_m1"] = ([M1, M1_PAIR], ["", "text", M1 + "x", M1.replace("Bern", "Rom"), M1[: -len("\n</tool_calls>")]])
FORCED["olmo3"] = ([OLMO, OLMO_PAIR], ["", "text", OLMO + "x", OLMO.replace("Bern", "Rom"), OLMO.replace("\n", "")])
DEEPSEEK: dict[str, tuple[str, str, str]] = {}
for name, weather, now, between in (
    (
        "deepseek_v3",
        'function<｜tool▁sep｜>weather\n```json\n{"city": "Bern"}\n```',
        "function<｜tool▁sep｜>now\n```json\n{}\n```",
        "\n",
    ),
    ("deepseek_v31", 'weather<｜tool▁sep｜>{"city": "Bern"}', "now<｜tool▁sep｜>{}", ""),
):
    weather, now = (f"<｜tool▁call▁begin｜>{one}<｜tool▁call▁end｜>" for one in (weather, now))
    section = f"<｜tool▁calls▁begin｜>{weather}<｜tool▁calls▁end｜>"
    DEEPSEEK[name] = (section, section.replace(weather, weather + between + now), weather + between)
    FORCED[name] = (
        [section, DEEPSEEK[name][1]],
        ["", "text", weather, section + "x", section.replace("Bern", "Rom"), section.replace(weather, "")],
    )


ON_LINES = {
    "olmo3": 'weather(city="Bern")\n',
    "minimax_m1": '{"name": "weather", "arguments": {"city": "Bern"}}\n',
}
"""Formats in which each call ends with a line, which the closing of the section begins with."""


def num_calls(text: str) -> int:
    return text.count("weather") + text.count("now")


FREE: dict[str, tuple[list[str], list[str]]] = {
    "hermes": (
        ["", "text", f"text {HERMES}", f"{HERMES} {HERMES_NOW} text", "a <tool b", HERMES.replace("\n", "")],
        [HERMES.replace("Bern", "Rom"), "<tool_call>text"],
    ),
    "llama_json": (["text", LLAMA, f"{LLAMA}; {LLAMA}"], [LLAMA.replace("Zürich", "Rom"), '{"text": 1}']),
}
for name, marker in MARKED:
    FREE[name] = (
        ["", "text", marker + LIST, f"text {marker}{PAIR}", "[1, 2]"],
        [marker + LIST.replace("Bern", "Rom"), f"{marker}text"],
    )


FREE["pythonic"] = (
    ["text", PYTHON, PYTHON_PAIR, "a list: [1]"],
    [PYTHON.replace("Bern", "Rom"), "[1]"],
)
FREE["olmo3"] = (
    ["", "text", OLMO, f"text {OLMO_PAIR}", "a < b"],
    [OLMO.replace("Bern", "Rom"), "<function_calls>text"],
)
FREE["minimax_m1"] = (
    ["", "text", M1, f"text {M1_PAIR}", "a < b"],
    [M1.replace("Bern", "Rom"), "<tool_calls>text"],
)
for name, (section, pair, _) in DEEPSEEK.items():
    FREE[name] = (
        ["", "text", section, f"text {pair}", "a < b"],
        [section.replace("Bern", "Rom"), "<｜tool▁calls▁begin｜>text"],
    )


@pytest.fixture(scope="module")
def backend() -> LlguidanceBackend:
    return LlguidanceBackend(ByteTokenizer, 258, 2)


def text_of(grammar: str) -> str:
    return grammar_text(StructuredOutputsParams(grammar=grammar))


def calls_in(name: str, text: str) -> list[tuple[str, Any]]:
    parser = TOOL_PARSERS[name]()
    parsed = [parser.feed(one) for one in text] + [parser.end()]
    calls = merged(piece for part in parsed for piece in part.calls)
    return [(str(call.name), json.loads(call.arguments)) for call in calls]


def several(name: str, count: int) -> str:
    """Return an answer of `count` calls."""
    if name in DEEPSEEK:
        section, _, call = DEEPSEEK[name]
        return section.replace(call.rstrip(), (call * count).rstrip())
    good = FORCED[name][0][0]
    if name in ON_LINES:
        return good.replace(ON_LINES[name], ON_LINES[name] * count)
    marker = FORMATS[name].list_marker or ""
    inner = good.removeprefix(marker)[1:-1] if FORMATS[name].list_open else good
    joined = FORMATS[name].separator.join([inner] * count)
    return f"{marker}[{joined}]" if FORMATS[name].list_open else joined


@pytest.mark.parametrize("name", list(FORMATS))
def test_forced_calls(backend: LlguidanceBackend, name: str) -> None:
    grammar = text_of(FORMATS[name].forced(TOOLS, 3))
    good, bad = FORCED[name]
    assert [text for text in good if not accepts(backend, ByteTokenizer(), grammar, text)] == []
    assert [text for text in bad if accepts(backend, ByteTokenizer(), grammar, text)] == []
    for text in good:
        calls = calls_in(name, text)
        assert len(calls) == num_calls(text)
        assert all(
            call in [("weather", {"city": c}) for c in ("Bern", "Zürich")] or call == ("now", {}) for call in calls
        )
    assert accepts(backend, ByteTokenizer(), grammar, several(name, 3))
    assert not accepts(backend, ByteTokenizer(), grammar, several(name, 4))
    single = text_of(FORMATS[name].forced(TOOLS, 1))
    assert not accepts(backend, ByteTokenizer(), single, good[-1])


@pytest.mark.parametrize("name", list(FORMATS))
def test_calls_in_text(backend: LlguidanceBackend, name: str) -> None:
    grammar = text_of(FORMATS[name].free(TOOLS, [], 3))
    good, bad = FREE[name]
    assert [text for text in good if not accepts(backend, ByteTokenizer(), grammar, text)] == []
    assert [text for text in bad if accepts(backend, ByteTokenizer(), grammar, text)] == []
    for text in good:
        assert len(calls_in(name, text)) == num_calls(text)
    loose = text_of(FORMATS[name].free(TOOLS, ["weather"], 3))
    assert accepts(backend, ByteTokenizer(), loose, bad[0])


@pytest.mark.parametrize("name", ["mistral", "granite"])
def test_a_marker_that_is_a_special_token(backend: LlguidanceBackend, name: str) -> None:
    """It is asked for by its id, and text cannot stand for it."""
    forced = ready(backend, text_of(FORMATS[name].forced(TOOLS, 1, BOS)))
    assert allowed(backend, forced) == {BOS}
    forced.advance([BOS, *LIST.encode()])
    assert forced.error == ""
    assert allowed(backend, forced) == {EOS}
    assert calls_in(name, LIST) == [("weather", {"city": "Bern"})]
    free = ready(backend, text_of(FORMATS[name].free(TOOLS, [], 1, BOS)))
    assert {BOS, EOS, ord("a")} <= allowed(backend, free)
    free.advance([*b"text ", BOS])
    assert ord("[") in allowed(backend, free)
    assert ord("a") not in allowed(backend, free)


@pytest.mark.parametrize("name", ["mistral", "granite"])
def test_lists_that_are_not_calls_stay_text(name: str) -> None:
    marker = str(FORMATS[name].list_marker)
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
            assert outcome(name, pieces) == (text, [])
    content, calls = outcome(name, f"Look. {marker} {PAIR} Done")
    assert content.replace(" ", "") == "Look.Done"
    assert [called for called, _ in calls] == ["weather", "now"]


def outcome(name: str, pieces: Sequence[str]) -> tuple[str, list[tuple[str, Any]]]:
    parser = TOOL_PARSERS[name]()
    parsed = [*map(parser.feed, pieces), parser.end()]
    calls = merged(call for one in parsed for call in one.calls)
    return "".join(one.content for one in parsed), [(str(call.name), json.loads(call.arguments)) for call in calls]


BERN = ("weather", {"city": "Bern"})
PYTHON_TEXTS: list[tuple[str, str, list[tuple[str, Any]]]] = [
    (PYTHON, "", [BERN]),
    (f"\n{PYTHON}\n", "", [BERN]),
    ("[weather( city = 'Bern' ), concert.get-details ( n = -5, x=1.5e2, l=[1, 'a', None], d={'k': {\"j\": []}} )]", "",
     [BERN, ("concert.get-details", {"n": -5, "x": 150.0, "l": [1, "a", None], "d": {"k": {"j": []}}})]),
    ("[f(a=True, b=false, c=null, class='x')]", "", [("f", {"a": True, "b": False, "c": None, "class": "x"})]),
    ("""[f(a='it\\'s "]"', b="é\\u00e9\\ud83d\\ude00\\n\\d")]""", "", [("f", {"a": 'it\'s "]"', "b": "éé😀\n\\d"})]),
    # A value that is no literal is taken as a string.
    ("[f(a=x, b=007, c=1e999)]", "", [("f", {"a": "x", "b": "007", "c": "1e999"})]),
    (f"{PYTHON} and more", " and more", [BERN]),
    (f"{PYTHON} {PYTHON}", f" {PYTHON}", [BERN]),
    *(
        (text, text, [])
        for text in (
            "", "   ", "text [f(a=1)]", "[1, 2]", "[]", "[f]", "[f(1)]", "[f(x) for x in y]", "[", "[f(a",
        )
    ),
    # What has been passed on of a call stays a call, and what follows where it breaks is text.
    ("[f(a=1, a=2)]", ", a=2)]", [("f", {"a": 1})]),
    ("[f(a=g())]", "())]", [("f", {"a": "g"})]),
    ("[f(a=1)", "", [("f", {"a": 1})]),
    ("[f(a='", "", [("f", {"a": ""})]),
    ('[f(a="x)]', "", [("f", {"a": "x)]"})]),
    ("[f(a=1), g(b=2), and then]", ", and then]", [("f", {"a": 1}), ("g", {"b": 2})]),
    ("[f(a=1)}]", "}]", [("f", {"a": 1})]),
    ("[f(a={1: 2})]", "", [("f", {"a": {"1": 2}})]),
    ("[f(a='\\U99999999')]", "", [("f", {"a": "\\U99999999"})]),
    ("[f(a=" + "[" * 70 + "])]", "[" * 6 + "])]", [("f", {"a": json.loads("[" * 64 + "]" * 64)})]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "content", "calls"), PYTHON_TEXTS, ids=[one[0][:20] for one in PYTHON_TEXTS])
def test_python_calls(text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    """Whole or in pieces: calls are read, and anything else comes out as it was."""
    for pieces in ([text], list(text), [text[i : i + 3] for i in range(0, len(text), 3)]):
        assert outcome("pythonic", pieces) == (content, calls)


@pytest.mark.parametrize("name", list(DEEPSEEK))
def test_deepseek_calls(name: str) -> None:
    section, pair, call = DEEPSEEK[name]
    begin, end, now = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", ("now", {})
    bad = call.rstrip().replace('"Bern"', "Bern")
    texts: list[tuple[str, str, list[tuple[str, Any]]]] = [
        (f"Look.\n{pair}", "Look.", [BERN, now]),
        (f"{section} Then {section}", " Then", [BERN, BERN]),
        (begin + call.rstrip().removesuffix("<｜tool▁call▁end｜>"), "", [BERN]),
        (begin + call, "", [BERN]),
        (f"{begin}{call}text{bad}{end}", f"{call[len(call.rstrip()) :]}text", [BERN, BERN]),
        (f"a {begin}{call[:20]}{end} b", f"a{call[:20]} b", []),  # marks of sections are dropped
        *((text, text, []) for text in ("", " ", "a < b", f"a\n{begin[:-1]}", call[:20])),
    ]
    for text, content, calls in texts:
        for pieces in ([text], list(text), [text[i : i + 7] for i in range(0, len(text), 7)]):
            assert outcome(name, pieces) == (content, calls), text


OPTIONS = {
    "type": "object",
    "properties": {
        "a": {"type": "boolean"},
        "b": {"type": "integer", "maximum": 9, "minimum": 0},
        "c": {"$ref": "#/$defs/c"},
        "d": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "$defs": {"c": {"enum": ["x", None]}},
    "required": ["b"],
}


def test_python_arguments_obey_their_schema(backend: LlguidanceBackend) -> None:
    grammar = text_of(FORMATS["pythonic"].forced([Tool("f", OPTIONS)], 1))
    good = ["b=1", "a=True, b=2", "a=False, b=0, d=[true]", 'b=3, c="x"', "b=3, c=null, d=[]"]
    bad = ["", "a=True", "a=true, b=1", "b=10", "b=1, a=True", "b=1,c=null", "b=1, e=2", "b=1, ", ", b=1", "1"]
    assert [one for one in good if not accepts(backend, ByteTokenizer(), grammar, f"[f({one})]")] == []
    assert [one for one in bad if accepts(backend, ByteTokenizer(), grammar, f"[f({one})]")] == []
    optional = {**OPTIONS, "required": []}
    assert accepts(backend, ByteTokenizer(), text_of(FORMATS["pythonic"].forced([Tool("f", optional)], 1)), "[f()]")
    loose = text_of(FORMATS["pythonic"].free([Tool("f", OPTIONS), Tool("g", None)], ["f", "g"], 2))
    for text in ("[f(x='it', y={\"k\": [1, None]}), g()]", "[f()]", "no list"):
        assert accepts(backend, ByteTokenizer(), loose, text)


@pytest.mark.parametrize(
    ("tool", "said"),
    [
        (Tool("get weather", None, "tools[1]"), r"tools\[1\]: 'get weather' cannot be a name"),
        (Tool("f", {"properties": {"a=": True}}, "tools[1]"), "'a=' cannot be a name"),
        (Tool("f", {"anyOf": [{"required": ["a"]}], "properties": {"a": True}}, "t"), "t: at /anyOf: is not supported"),
        (Tool("f", {"properties": {"a": {"uniqueItems": True}}}, "t"), "t: at /properties/a/uniqueItems"),
        (Tool("f", {"maxProperties": 1, "properties": {"a": True, "b": True}}, "t"), "t: at /maxProperties"),
    ],
)
def test_schemas_that_python_calls_cannot_obey(tool: Tool, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        FORMATS["pythonic"].forced([tool], 1)


def test_python_arguments_of_several_types_and_references(backend: LlguidanceBackend) -> None:
    tool = Tool(
        "f",
        {
            "properties": {
                "a": {"type": ["string", "null"], "maxLength": 2},
                "b": {"type": ["null", "boolean"]},
                "c": {"$ref": "#"},
                "d": {"type": "array", "items": {"$ref": "#/properties/b"}},
            }
        },
    )
    grammar = text_of(FORMATS["pythonic"].forced([tool], 1))
    good = ["a=None", 'a="xy"', "b=None", "b=True", 'c={"a": "x"}', 'c={"c": {"b": null}}', "d=[null, true]", ""]
    bad = ["a=1", 'a="xyz"', "b=1", 'c={"a": 1}', "c=[]", "d=[1]"]
    assert [one for one in good if not accepts(backend, ByteTokenizer(), grammar, f"[f({one})]")] == []
    assert [one for one in bad if accepts(backend, ByteTokenizer(), grammar, f"[f({one})]")] == []


@pytest.mark.parametrize("given", [[], [5, "null"], [["null"], "boolean"], {"null": 1}, 5])
def test_types_that_are_no_types_are_not_an_error_of_the_server(given: Any) -> None:
    preparer = GrammarPreparer(ByteTokenizer(), VOCAB, RequestLimits())
    grammar = FORMATS["pythonic"].forced([Tool("f", {"properties": {"a": {"type": given}}, "required": ["a"]})], 1)
    with pytest.raises(RequestError, match="tools: "):
        preparer.prepare(StructuredOutputsParams(grammar=grammar, source="tools"))


def test_what_many_python_arguments_refer_to_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Any] = []

    class Counted(SchemaRefs):
        def __init__(self, root: Any) -> None:
            read.append(root)
            super().__init__(root)

    monkeypatch.setattr(json_schema, "SchemaRefs", Counted)
    properties = {f"a{i}": {"$ref": "#/$defs/used"} for i in range(100)}
    used, large = ({"enum": [f"x{i}" for i in range(count)]} for count in (20, 2000))
    defs = {"used": used, **{f"unused{i}": used for i in range(200)}}
    grammar = FORMATS["pythonic"].forced([Tool("f", {"properties": properties, "$defs": defs})], 1)
    assert len(read) == 1
    assert len(grammar) < 100 * 1000
    tool = Tool("f", {"properties": properties, "$defs": {"used": large}})
    with pytest.raises(RequestError, match="tools: at /: the schema is too large"):
        FORMATS["pythonic"].forced([tool], 1)


def test_formats_are_found_in_templates() -> None:
    calls = (
        "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name']"
    )
    found = {
        calls + r" + '\n```json\n' + arguments + '\n```'": "deepseek_v3",
        calls.replace("tool['type'] + ", ""): "deepseek_v31",
        "of [func_name1(params_name1=params_value1, ...), func_name2(params)]": "pythonic",
        '{"name": function name, "parameters": dictionary}': "llama_json",
        r'following the format below:\n<tool_calls>\n{"name": <tool-name>, ...}': "minimax_m1",
        "{%- set ns_token = ']<]minimax[>[' -%}{{ ns_token ~ '<tool_call>' }}": "minimax_m3",
        "{%- set dsml_token = '｜DSML｜' -%}{{ '<' + dsml_token + 'function_calls>' }}": "deepseek_v32",
        "{%- set dsml_token = '｜DSML｜' -%}{{ '<' + dsml_token + 'tool_calls>' }}": "deepseek_v4",
        "{{ messages }}": None,
    }
    assert {template: parser_for_template(template) for template in found} == found
    # Their forced calls are written as those of hermes are.
    without_grammar = {"apertus", "cohere", "gemma4", "glm", "harmony", "kimi", "lfm2", "minimax", "mistral3"}
    without_grammar |= {"qwen3_coder", "seed", "minimax_m3", "deepseek_v32", "deepseek_v4"}
    assert set(TOOL_PARSERS) - set(FORMATS) == without_grammar


LISTED = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("more", "fit_alone", "fit_with_another"),
    [
        ({}, True, False),
        ({"type": "object", "title": "of f", "$defs": {"x": True}}, True, False),
        ({"additionalProperties": True}, True, True),
        ({"patternProperties": {"^b": True}}, True, True),
        ({"anyOf": [{"required": ["b"]}, {"required": ["a"]}]}, True, True),
        ({"required": ["a", "b"]}, False, True),
    ],
    ids=str,
)
def test_arguments_that_are_not_listed(
    backend: LlguidanceBackend, more: dict[str, Any], fit_alone: bool, fit_with_another: bool
) -> None:
    """There are none, unless the schema says something about them."""
    grammar = text_of(FORMATS["hermes"].forced([Tool("f", {**LISTED, **more})], 1))
    for arguments, fits in (('{"a": 1}', fit_alone), ('{"a": 1, "b": 2}', fit_with_another)):
        text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
        assert accepts(backend, ByteTokenizer(), grammar, text) == fits, arguments


def test_a_name_is_written_as_json_writes_it(backend: LlguidanceBackend) -> None:
    grammar = text_of(FORMATS["hermes"].forced([Tool('quo"te ::= é', None)], 1))
    text = HERMES_NOW.replace('"now"', json.dumps('quo"te ::= é', ensure_ascii=False))
    assert accepts(backend, ByteTokenizer(), grammar, text)
    assert calls_in("hermes", text) == [('quo"te ::= é', {})]


def test_an_unsupported_schema_is_refused_by_its_field() -> None:
    with pytest.raises(RequestError, match=r"tools\[3\]: at /properties/a/\$ref"):
        FORMATS["hermes"].forced([Tool("f", {"properties": {"a": {"$ref": "#/no"}}}, "tools[3]")], 1)


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
    odd: list[Any] = ["no message"]
    assert len(with_generic_tools(odd, tools, roles)) == 2


MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({"role": "assistant", "tool_calls": ["no call"]}, r"messages\[1\]\.tool_calls\[0\] has no function with a name"),
    ({"role": "user", "content": "a", "tool_calls": [{"id": 1}]}, r"tool_calls\[0\] has no function with a name"),
    ({"role": "assistant", "tool_calls": 5}, r"messages\[1\]\.tool_calls is int, expected a list"),
    (
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
        r"tool_calls\[0\]\.function\.arguments: expected a JSON object, or a string with one",
    ),
    ({"role": "tool"}, r"messages\[1\] has no content"),
    ({"role": "tool", "content": [{"type": "image_url", "image_url": {}}]}, "this model takes text only"),
]


@pytest.mark.parametrize(("message", "said"), MALFORMED)
def test_malformed_calls_and_results_are_refused_before_they_become_text(message: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        with_generic_tools([{"role": "user", "content": "Hi"}, message], None, "")
