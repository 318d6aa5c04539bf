"""Tool calls and reasoning out of streamed text: any cut of the stream gives the same result."""

import ast
import json
import re
import time

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pagoda.base.errors import ConfigError
from pagoda.engine.answers.reasoning import (
    REASONING_FORMATS,
    ReasoningSplitter,
    new_splitter,
    opens_reasoning,
    reasoning_of,
)
from pagoda.engine.answers.tool_parsers import TOOL_PARSERS, parser_for_template, parser_named
from pagoda.engine.answers.tool_parsers.argument_types import argument_types
from pagoda.engine.answers.tool_parsers.base import ToolParser, merged
from pagoda.engine.answers.tool_parsers.formats import HermesParser, LlamaJsonParser, NamedCallParser

MANY_FORMATS = settings(max_examples=settings().max_examples * 2 // 5)
"""Of a test that runs for each of many formats or texts: together they have seen ten times as many examples as one."""


def read(parser: ToolParser, pieces: list[str]) -> tuple[str, list[tuple[str, object]]]:
    content, calls = "", []
    for parsed in [*map(parser.feed, pieces), parser.end()]:
        content += parsed.content
        calls += parsed.calls
    return content, [(call.name or "", json.loads(call.arguments)) for call in merged(calls)]


def made(name: str) -> ToolParser:
    types = {"s": "string", "n": "integer", "o": "object"}
    properties = {key: {"type": kind} for key, kind in types.items()}
    return TOOL_PARSERS[name](argument_types({"f": {"type": "object", "properties": properties}}))


HERMES = [
    ("plain text", "plain text", []),
    ("a < b and <tool", "a < b and <tool", []),
    ('<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>', "", [("f", {"x": 1})]),
    ('I look. <tool_call>{"name": "f", "arguments": {}}</tool_call>', "I look.", [("f", {})]),
    (
        '<tool_call>{"name": "f", "arguments": {"s": "</tool>"}}</tool_call>\n'
        '<tool_call>{"name": "g", "arguments": {"y": [1]}}',
        "",
        [("f", {"s": "</tool>"}), ("g", {"y": [1]})],
    ),
    ("<tool_call>not json</tool_call>", "<tool_call>not json</tool_call>", []),
    ("<tool_call>not json", "<tool_call>not json", []),
    ('Look: \n <tool_call>\n{"name": 1}\n</tool_call> so', 'Look: \n <tool_call>\n{"name": 1}\n</tool_call> so', []),
    ("<tool_call></tool_call>", "<tool_call></tool_call>", []),
    (
        'a <tool_call>{"name": "f"}</tool_call> <tool_call>{"name" "g"}</tool_call>\n<tool_call>{"name": "h"}',
        'a <tool_call>{"name" "g"}</tool_call>',
        [("f", {}), ("h", {})],
    ),
    ("</tool_call> alone", "</tool_call> alone", []),
    (
        '<tool_call>{"name": "f", "arguments": {}}\n<tool_call>{"name": "g", "arguments": {}}</tool_call>',
        "",
        [("f", {}), ("g", {})],
    ),
    ('<tool_call>{"name": "f"}\n<tool_call>{"name": "g"}', "", [("f", {}), ("g", {})]),
    ('<tool_call>{"name": "f", "arguments": {}}\nThat is all.', "That is all.", [("f", {})]),
    ('<tool_call>{"name": "f", "arguments": {}}}\n</tool_call> Done.', " Done.", [("f", {})]),
    ('<tool_call>{"name": "f", "arguments": {}</tool_call> Done.', " Done.", [("f", {})]),
    (
        '<tool_call>{"name": "f", "arguments": {"s": "a</tool_call>\\"<tool_call>b"}}</tool_call>',
        "",
        [("f", {"s": 'a</tool_call>"<tool_call>b'})],
    ),
    (
        '<tool_call>{"arguments": {"s": "a</tool_call>b"}, "name": "f"}</tool_call>',
        "",
        [("f", {"s": "a</tool_call>b"})],
    ),
]

LLAMA = [
    ("an answer", "an answer", []),
    ('{"name": "f", "parameters": {"x": "a;b"}}', "", [("f", {"x": "a;b"})]),
    (
        '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"n": 2}}',
        "",
        [("f", {}), ("g", {"n": 2})],
    ),
    ('{"answer": 42}', '{"answer": 42}', []),
    ('{"name": "f", "para', '{"name": "f", "para', []),
    ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ('\n <|python_tag|> {"answer": 42}', '\n <|python_tag|> {"answer": 42}', []),
    (' {"name": "f", "para', ' {"name": "f", "para', []),
    ('{"name": "f"}; {"answer": 42} .', '; {"answer": 42} .', [("f", {})]),
    ('{"name": "f"} done', " done", [("f", {})]),
    ('{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
    ('{"name": "Bob"}', '{"name": "Bob"}', []),
    ('{"name": "f", "age": 3} .', '{"name": "f", "age": 3} .', []),
    ('<|python_tag|>{"name": "g"}', "", [("g", {})]),
    ('I call {"name": "f"}', "I call", [("f", {})]),
]


@pytest.mark.parametrize(("text", "content", "calls"), HERMES)
@MANY_FORMATS
@given(data=st.data())
def test_hermes_calls_in_any_chunks(text: str, content: str, calls: list[object], data: st.DataObject) -> None:
    assert read(HermesParser(), cut(text, data)) == (content, calls)


@pytest.mark.parametrize(("text", "content", "calls"), LLAMA)
@MANY_FORMATS
@given(data=st.data())
def test_llama_calls_in_any_chunks(text: str, content: str, calls: list[object], data: st.DataObject) -> None:
    assert read(made("llama_json"), cut(text, data)) == (content, calls)


@pytest.mark.parametrize("name", ["mistral", "granite"])
@given(data=st.data())
def test_a_list_of_objects_that_have_names_is_text_without_the_mark(name: str, data: st.DataObject) -> None:
    for text in (
        '[{"name": "Bob", "age": 3}, {"name": "Ann", "age": 5}]',
        '[{"name": "Bob"}]',
        '[{"name": "f", "n": 1}]',
    ):
        assert read(made(name), cut(text, data)) == (text, [])
    assert read(made(name), cut('[{"name": "f"}, {"name": "f"}]', data)) == ("", [("f", {})] * 2)
    assert read(made(name), cut(PIECES[name][0] + '[{"name": "g"}]', data)) == ("", [("g", {})])


@given(st.lists(st.sampled_from(["<tool_call>", "</tool_call>", " ", "\n", "{", "}", '"name"', ":", "1", "x", "<"])))
def test_a_hermes_answer_without_a_valid_call_loses_nothing(pieces: list[str]) -> None:
    text = "".join(pieces)  # a name is never a string here, so there is no valid call
    assert read(HermesParser(), pieces) == read(HermesParser(), [text]) == (text, [])


LLAMA_PIECES = ["<|python_tag|>", "<|python", ";", " ", "\n", "{", "}", '"name"', ":", "1", "x"]


@given(st.lists(st.sampled_from(LLAMA_PIECES)))
def test_a_llama_answer_without_a_valid_call_loses_nothing(pieces: list[str]) -> None:
    text = "".join(pieces)
    assume('"name":"name"' not in re.sub(r"\s", "", text))  # which can be a valid call
    assert read(LlamaJsonParser(), pieces) == read(LlamaJsonParser(), [text]) == (text, [])


NAMED = '{"name": "Bob", "age": 3}'
SHARED_PIECES = [*' \n[]{},;1"', '"x"', "prose", NAMED, "٢"]
CALL = '{"name": "f", "arguments": {"a": [1]}}'
SECTION = ["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool"]
M3 = "]<]minimax[>["
TAGS = ["<tool_call>", "</tool_call>", "<tool"]
PIECES: dict[str, list[str]] = {
    "hermes": ["<tool_call>", "</tool_call>", "<tool", CALL],
    "llama_json": [*LLAMA_PIECES[:2], CALL, '{"a": 1}', '{"name": "f"}'],
    "pythonic": ["[f(a=1)]", "[g()]", "[f(a='x]')", "f(a=1)", "a='", "[f(a=1٢)]"],
    "mistral": ["[TOOL_CALLS]", "[TOOL", f"[{CALL}]", f"[{CALL}, {CALL}]", '[{"a": 1}]'],
    "granite": ["<|tool_call|>", "<|tool", f"[{CALL}]", f"[{CALL}, {CALL}]", '[{"a": 1}]'],
    "deepseek_v3": [*SECTION, 'function<｜tool▁sep｜>f\n```json\n{"a": 1}\n```'],
    "deepseek_v31": [*SECTION, 'f<｜tool▁sep｜>{"a": 1}'],
    "harmony": [
        "<|channel|>commentary to=functions.",
        "f",
        " <|constrain|>json",
        "<|message|>",
        '{"a": 1}',
        "<|call|>",
        "<|start|>assistant",
        " to=functions.",
        "<|channel|>commentary json",
    ],
    "mistral3": ["[TOOL_CALLS]", "[TOOL", "f", "[ARGS]", '{"a": "]{"}'],
    "kimi": ["<|tool_call_begin|>", "functions.f:0", "<|tool_call_argument_begin|>", '{"a": 1}', "<|tool_call_end|>"],
    "qwen3_coder": [
        *TAGS,
        "<function=f>",
        "</function>",
        "<parameter=s>\n",
        "<parameter=n>",
        "\n",
        "</parameter>",
        "7",
    ],
    "apertus": ["<|tools_prefix|>", "<|tools_suffix|>", "<|tools_", '[{"f": {"n": 7}}', ', {"f": {}}', "]"],
    "cohere": [
        *("<|START_ACTION|>", "<|END_ACTION|>", "<|START", "]", '[{"tool_name": "f", "parameters": {"n": 7}}'),
        ', {"tool_call_id": "1", "tool_name": "f", "parameters": {}}',
    ],
    "gemma4": ["<|tool_call>", "<tool_call|>", "<|tool", "call:f", "{", '<|"|>', "n:7", "}", '<|"'],
    "lfm2": ["<|tool_call_start|>", "<|tool_call_end|>", "<|tool", "[f(n=7)", ", f()", "]", "f(s='x", "')"],
    "olmo3": ["<function_calls>", "</function_calls>", "<func", "f(n=7)", "f()", "f(s='x", "')", "\n"],
    "nemotron": ["<TOOLCALL>", "</TOOLCALL>", "<TOOL", f"[{CALL}]", f"[{CALL}, {CALL}]", '[{"a": 1}]'],
    "hunyuan": ["<tool_calls>", "</tool_calls>", "<tool", f"[{CALL}]", f"[{CALL}, {CALL}]", '[{"a": 1}]'],
    "seed": [
        *("<seed:tool_call>", "</seed:tool_call>", "<seed:", "<function=f>", "</function>", "<parameter=s>"),
        *("<parameter=n>", "</parameter>", "7"),
    ],
    "minimax": [
        *("<minimax:tool_call>", "</minimax:tool_call>", "<minimax:", '<invoke name="f">', "</invoke>"),
        *('<parameter name="s">', '<parameter name="n">', "</parameter>", "7"),
    ],
    "minimax_m1": ["<tool_calls>", "</tool_calls>", "<tool", CALL, f"{CALL}\n{CALL}", '{"a": 1}'],
    "minimax_m3": [
        *(M3, f"{M3}<tool_call>", f"{M3}</tool_call>", f'{M3}<invoke name="f">', f"{M3}</invoke>", "]<]mini"),
        *(f"{M3}<s>", f"{M3}</s>", f"{M3}<o>", f"{M3}</o>", f"{M3}<item>", f"{M3}</item>", "7"),
    ],
    "deepseek_v32": [
        *("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", "<｜DSML", '<｜DSML｜invoke name="f">'),
        *("</｜DSML｜invoke>", '<｜DSML｜parameter name="s"', ' string="true"', ' string="false"', ">"),
        *("</｜DSML｜parameter>", "7"),
    ],
    "deepseek_v4": [
        *("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", '<｜DSML｜invoke name="f">', "</｜DSML｜invoke>"),
        *('<｜DSML｜parameter name="s" string="true">', '<｜DSML｜parameter name="n">', "</｜DSML｜parameter>", "7"),
    ],
    "glm": [*TAGS, "f\n", "<arg_key>s</arg_key>", "<arg_key>n</arg_key>", "<arg_value>", "</arg_value>", "7", '"'],
}


@pytest.mark.parametrize("name", list(TOOL_PARSERS))
@MANY_FORMATS
@given(data=st.data())
def test_any_text_reads_the_same_in_any_cut(name: str, data: st.DataObject) -> None:
    """And a text without a call comes out as it was, but for the marks around names and sections."""
    pieces = data.draw(st.lists(st.sampled_from([*PIECES[name], *SHARED_PIECES]), max_size=8))
    text = "".join(pieces)
    whole = read(made(name), [text])
    assert read(made(name), list(text)) == read(made(name), pieces) == whole
    parser = TOOL_PARSERS[name]
    if issubclass(parser, NamedCallParser):
        marks = (parser.OPEN, *parser.OTHERS)
        assert whole[1] or without(marks, whole[0]) == without(marks, text)
    else:
        assert whole[1] or whole[0] == text


def without(marks: tuple[str, ...], text: str) -> str:
    """The text without marks and white space."""
    for mark in filter(None, marks):
        text = text.replace(mark, "")
    return "".join(text.split())


ARGUMENTS = {"s": 'a "quoted"\n\\ line', "n": 7, "o": {"k": [1, None]}}
_PYTHON = f"f(s={json.dumps(ARGUMENTS['s'])}, n=7, o={{'k': [1, None]}})"
CALLED = json.dumps({"name": "f", "arguments": ARGUMENTS})
_DSML = "<｜DSML｜{0}>\n{1}</｜DSML｜{0}>"
_DSML_CALL = (
    f'<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="s" string="true">{ARGUMENTS["s"]}</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="n" string="false">7</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="o" string="false">{"k": [1, null]}</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
)
WRITTEN: dict[str, str] = {
    "hermes": f'<tool_call>\n{{"name": "f", "arguments": {json.dumps(ARGUMENTS)}}}\n</tool_call>\n' * 2,
    "llama_json": "; ".join([json.dumps({"name": "f", "parameters": ARGUMENTS})] * 2),
    "pythonic": f"[f(s={json.dumps(ARGUMENTS['s'])}, n=7, o={{'k': [1, None]}}), "
    f'f(s=\'a "quoted"\\n\\\\ line\', n=7, o={{"k": [1, null]}})]',
    "mistral": f"[TOOL_CALLS] [{', '.join([json.dumps({'name': 'f', 'arguments': ARGUMENTS})] * 2)}]",
    "granite": f"<|tool_call|>[{', '.join([json.dumps({'name': 'f', 'arguments': ARGUMENTS})] * 2)}]",
    "deepseek_v3": "<｜tool▁calls▁begin｜>"
    + "\n".join(
        [f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{json.dumps(ARGUMENTS)}\n```<｜tool▁call▁end｜>"] * 2
    )
    + "<｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜>"
    + f"<｜tool▁call▁begin｜>f<｜tool▁sep｜>{json.dumps(ARGUMENTS)}<｜tool▁call▁end｜>" * 2
    + "<｜tool▁calls▁end｜>",
    "harmony": f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{json.dumps(ARGUMENTS)}<|call|>" * 2,
    "mistral3": f"[TOOL_CALLS]f[ARGS]{json.dumps(ARGUMENTS)}" * 2,
    "kimi": "<|tool_calls_section_begin|>"
    + f"<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{json.dumps(ARGUMENTS)}<|tool_call_end|>" * 2
    + "<|tool_calls_section_end|>",
    "qwen3_coder": (
        f"<tool_call>\n<function=f>\n<parameter=s>\n{ARGUMENTS['s']}\n</parameter>\n<parameter=n>\n7\n</parameter>\n"
        '<parameter=o>\n{"k": [1, null]}\n</parameter>\n</function>\n</tool_call>\n'
    )
    * 2,
    "apertus": f"<|tools_prefix|>[{', '.join([json.dumps({'f': ARGUMENTS})] * 2)}]<|tools_suffix|>",
    "cohere": "<|START_ACTION|>[\n"
    + ",\n".join(
        f'    {{"tool_call_id": "{i}", "tool_name": "f", "parameters": {json.dumps(ARGUMENTS)}}}' for i in range(2)
    )
    + "\n]<|END_ACTION|>",
    "gemma4": f'<|tool_call>call:f{{s:<|"|>{ARGUMENTS["s"]}<|"|>,n:7,o:{{<|"|>k<|"|>:[1,null]}}}}<tool_call|>' * 2,
    "lfm2": f"<|tool_call_start|>[{', '.join([_PYTHON] * 2)}]<|tool_call_end|>",
    "olmo3": f"<function_calls>\n{_PYTHON}\n{_PYTHON}\n</function_calls>",
    "nemotron": f"<TOOLCALL>[{', '.join([json.dumps({'name': 'f', 'arguments': ARGUMENTS})] * 2)}]</TOOLCALL>",
    "hunyuan": f"<tool_calls>[{', '.join([json.dumps({'name': 'f', 'arguments': ARGUMENTS})] * 2)}]</tool_calls>",
    "seed": (
        f"<seed:tool_call>\n<function=f>\n<parameter=s>{ARGUMENTS['s']}</parameter>\n<parameter=n>7</parameter>\n"
        '<parameter=o>{"k": [1, null]}</parameter>\n</function>\n</seed:tool_call>\n'
    )
    * 2,
    "minimax": (
        "<minimax:tool_call>\n"
        + (
            f'<invoke name="f">\n<parameter name="s">{ARGUMENTS["s"]}</parameter>\n<parameter name="n">7</parameter>\n'
            '<parameter name="o">{"k": [1, null]}</parameter>\n</invoke>\n'
        )
        * 2
        + "</minimax:tool_call>\n"
    ),
    "minimax_m1": f"<tool_calls>\n{CALLED}\n{CALLED}\n</tool_calls>",
    "minimax_m3": f"{M3}<tool_call>\n"
    + (
        f'|<invoke name="f">|<s>{ARGUMENTS["s"]}|</s>|<n>7|</n>|<o>|<k>|<item>1|</item>|<item>null|</item>|</k>|</o>'
        "|</invoke>\n"
    ).replace("|", M3)
    * 2
    + f"{M3}</tool_call>",
    "deepseek_v32": _DSML.format("function_calls", _DSML_CALL * 2),
    "deepseek_v4": _DSML.format("tool_calls", _DSML_CALL * 2),
    "glm": (
        f"<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>{ARGUMENTS['s']}</arg_value>\n<arg_key>n</arg_key>\n"
        '<arg_value>7</arg_value>\n<arg_key>o</arg_key>\n<arg_value>{"k": [1, null]}</arg_value>\n</tool_call>\n'
    )
    * 2,
}


@pytest.mark.parametrize("name", list(TOOL_PARSERS))
@MANY_FORMATS
@given(data=st.data())
def test_calls_in_every_format(name: str, data: st.DataObject) -> None:
    text = "" if name in ("llama_json", "pythonic") else "Look."  # calls are the whole answer
    assert read(made(name), cut(f"{text} {WRITTEN[name]}\n".lstrip(), data)) == (text, [("f", ARGUMENTS)] * 2)


@pytest.mark.parametrize(
    ("name", "closing"),
    [
        ("hermes", "</tool_call>"),
        ("glm", "</tool_call>"),
        ("qwen3_coder", "</tool_call>"),
        ("qwen3_coder", "</function>"),
        ("seed", "</seed:tool_call>"),
        ("apertus", "<|tools_suffix|>"),
        ("minimax", "</invoke>"),
        ("minimax_m1", "</tool_calls>"),
        ("minimax_m3", M3 + "</s>"),
        ("minimax_m3", M3 + "</invoke>"),
        ("deepseek_v32", "</｜DSML｜invoke>"),
        ("deepseek_v4", "</｜DSML｜tool_calls>"),
        ("kimi", "<|tool_call_end|>"),
        ("deepseek_v31", "<｜tool▁call▁end｜>"),
        ("cohere", "<|END_ACTION|>"),
        ("gemma4", "<tool_call|>"),
        ("lfm2", "<|tool_call_end|>"),
        ("olmo3", "</function_calls>"),
        ("nemotron", "</TOOLCALL>"),
        ("hunyuan", "</tool_calls>"),
    ],
)
@MANY_FORMATS
@given(data=st.data())
def test_a_missing_closing_mark_loses_no_call(name: str, closing: str, data: st.DataObject) -> None:
    text = WRITTEN[name].replace(closing, "")
    assert read(made(name), cut(text, data)) == ("", [("f", ARGUMENTS)] * 2)


@given(data=st.data())
def test_text_after_the_end_of_a_function_is_content(data: st.DataObject) -> None:
    text = "<tool_call><function=f><parameter=n>7</parameter></function>\nDone."
    assert read(made("qwen3_coder"), cut(text, data)) == ("\nDone.", [("f", {"n": 7})])


@pytest.mark.parametrize("name", ["kimi", "harmony", "mistral3", "deepseek_v31", "deepseek_v3", "gemma4"])
def test_marks_in_the_strings_of_arguments_are_text(name: str) -> None:
    parser = TOOL_PARSERS[name]
    assert issubclass(parser, NamedCallParser)
    quoted = "".join((parser.OPEN, *parser.OTHERS))
    text = WRITTEN[name].replace("quoted", quoted)
    expected = ARGUMENTS | {"s": ARGUMENTS["s"].replace("quoted", quoted)}  # type: ignore[attr-defined]
    assert read(made(name), list(text)) == read(made(name), [text]) == ("", [("f", expected)] * 2)


@pytest.mark.parametrize("name", list(TOOL_PARSERS))
def test_a_call_that_is_cut_off_leaves_no_text(name: str) -> None:
    text = WRITTEN[name]
    begins = text.index("quoted")
    for size in range(begins, begins + 40):
        content, calls = read(made(name), list(text[:size]))
        # but for the beginning of the next argument
        begins = r"[\s<,]*(]<]minimax\[>\[<)?(｜DSML｜)?(parameter=|parameter name=\x22|arg_key>)?\w?[=\x22]?"
        begins += r"(</arg_key>)?\s*(<arg_v\w*)?"
        assert re.fullmatch(begins, content), content
        assert [called for called, _ in calls] == ["f"]


STRINGS = [r"'it\'s \x41\u00e9\U0001F600'", r'"\ud83d\ude00 \q \\n"', r"'a\\'", r"'\x4'", "'line\nline'", "'\\\n'"]


@pytest.mark.parametrize("text", STRINGS)
@given(data=st.data())
def test_pythons_strings_become_json_as_they_are_written(text: str, data: st.DataObject) -> None:
    expected = {STRINGS[1]: r"😀 \q \n", STRINGS[3]: r"\x4", STRINGS[4]: "line\nline"}.get(text)
    expected = ast.literal_eval(text) if expected is None else expected
    assert read(made("pythonic"), cut(f"[f(a={text})]", data)) == ("", [("f", {"a": expected})])


def test_a_value_that_is_no_literal_of_python_becomes_a_string() -> None:
    text = "[f(x=1, y=bär, z=[a.b, 01], d=1٢)] hi"
    expected = {"x": 1, "y": "bär", "z": ["a.b", "01"], "d": "1٢"}
    assert read(made("pythonic"), list(text)) == read(made("pythonic"), [text]) == (" hi", [("f", expected)])


def test_what_follows_a_broken_python_call_is_text() -> None:
    assert read(made("pythonic"), list("[f(a=1), 5] and")) == (", 5] and", [("f", {"a": 1})])
    assert read(made("pythonic"), ["[f(a=1, a=2)] and"]) == (", a=2)] and", [("f", {"a": 1})])
    for text in ("[f(a)]", "[1, 2]", "[f(a=1", "[f", "[f(x) for x in y]"):
        content, calls = read(made("pythonic"), list(text))
        assert calls == [("f", {"a": 1})] if text == "[f(a=1" else content == text


@pytest.mark.parametrize("name", ["kimi", "harmony", "mistral3"])
def test_white_space_in_front_of_arguments_is_dropped_however_it_comes(name: str) -> None:
    for arguments in (" \n", ' \n{"a": 1}'):
        text = WRITTEN[name].partition("{")[0] + arguments
        assert read(made(name), list(text)) == read(made(name), [text])


@given(data=st.data())
def test_newlines_around_a_value_may_be_missing(data: st.DataObject) -> None:
    for value, read_as in {"v": "v", "\n": "", "": "", "\nv": "v", "v\n": "v", "\n\nv\n\n": "\nv\n"}.items():
        text = (
            f"<tool_call><function=f><parameter=s>{value}</parameter><parameter=n>7</parameter></function></tool_call>"
        )
        assert read(made("qwen3_coder"), cut(text, data)) == ("", [("f", {"s": read_as, "n": 7})])


@pytest.mark.parametrize(
    ("schema", "value", "read_as"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "12345", "12345"),
        ({"type": ["string", "null"]}, "true", "true"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "12345", 12345),
        ({"type": ["integer", "null"]}, "7", 7),
        ({}, "NaN", "NaN"),
        ({}, "-Infinity", "-Infinity"),
        ({}, "1e999", "1e999"),
        ({}, "1٢", "1٢"),
        ({"type": "integer"}, "٢", "٢"),
        ({}, "-१.5e१", "-१.5e१"),
        ({}, r'["\ud800"]', ["\ud800"]),
        ({}, r'{"é\udfff": "é"}', {"é\udfff": "é"}),
    ],
)
def test_the_schema_says_what_is_a_string_and_everything_is_json(schema: object, value: str, read_as: object) -> None:
    parser = TOOL_PARSERS["glm"](argument_types({"f": {"type": "object", "properties": {"x": schema}}}))
    text = f"<tool_call>f\n<arg_key>x</arg_key><arg_value>{value}</arg_value></tool_call>"
    pieces = parser.feed(text).calls
    assert json.loads("".join(piece.arguments for piece in pieces)) == {"x": read_as}
    for piece in pieces:
        piece.arguments.encode()


@pytest.mark.parametrize("name", list(TOOL_PARSERS))
def test_arguments_come_out_as_they_are_generated(name: str) -> None:
    parser, text = made(name), WRITTEN[name].replace("quoted", "q" * 5000)
    pieces = [piece for char in text for piece in parser.feed(char).calls]
    assert max(len(piece.arguments) for piece in pieces) < 60
    assert sum(piece.name is not None for piece in pieces) == 2


@pytest.mark.parametrize("name", list(TOOL_PARSERS))
def test_the_time_to_read_a_call_is_linear_in_its_length(name: str) -> None:
    def seconds(length: int) -> float:
        parser, text = made(name), WRITTEN[name].replace("quoted", "q" * length)
        began_s = time.process_time()
        for char in text:
            parser.feed(char)
        return time.process_time() - began_s

    most_s = 20 * min(seconds(2_500) for _ in range(3))  # quadratic: 64 times as long
    assert any(seconds(20_000) < most_s for _ in range(2))


@pytest.mark.parametrize("name", ["mistral", "granite"])
def test_a_list_of_calls_has_text_on_both_sides(name: str) -> None:
    marker = PIECES[name][0]
    text = f"Look. {marker} [{CALL}] Done. {marker}[{CALL}]\n"
    assert read(TOOL_PARSERS[name](), [text]) == ("Look. Done.", [("f", {"a": [1]})] * 2)
    text = f"[{CALL}] Done."  # the marker is a special token
    assert read(TOOL_PARSERS[name](), [text]) == (" Done.", [("f", {"a": [1]})])


REASONING = [
    ("just an answer", False, "", "just an answer"),
    ("<think>\nhm, 2 < 3\n</think>\n\nyes", False, "hm, 2 < 3\n", "yes"),
    ("still at it</think>done", True, "still at it", "done"),
    ("never ends </thi", True, "never ends </thi", ""),
    ("<thin", False, "", "<thin"),
    ("</think>\n\nyes", False, "", "yes"),
    ("</thin", False, "", "</thin"),
]


@pytest.mark.parametrize(("text", "inside", "thought", "answer"), REASONING)
@given(data=st.data())
def test_reasoning_in_any_chunks(text: str, inside: bool, thought: str, answer: str, data: st.DataObject) -> None:
    splitter = ReasoningSplitter(inside)
    parts = [*map(splitter.feed, cut(text, data)), splitter.end()]
    assert "".join(t for t, _ in parts) == thought
    assert "".join(a for _, a in parts) == answer


def cut(text: str, data: st.DataObject) -> list[str]:
    at = sorted(data.draw(st.sets(st.integers(1, max(1, len(text) - 1)), max_size=8)))
    return [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)]


def test_the_parser_follows_from_the_template() -> None:
    assert parser_for_template("... <tool_call> ...") == "hermes"
    assert parser_for_template("... <|python_tag|> ...") == "llama_json"
    asks = """{{ 'Respond in the format {"name": function name, "parameters": dictionary of argument names}.' }}"""
    writes = """{{ '{"name": "' + tool_call.name + '", ' }}{{ '"parameters": ' }}{{ tool_call.arguments | tojson }}"""
    assert parser_for_template(asks) == parser_for_template(writes) == "llama_json"
    tool = (
        """{"name": "{{ tool.name }}", "description": "{{ tool.description }}", "parameters": {{ tool.parameters }}}"""
    )
    assert parser_for_template(tool) is None, "it shows tools, not calls"
    assert parser_for_template('{"properties": {"parameters": {}}}') is None
    assert parser_for_template("'<seed:tool_call>\n<function=' ~ name ~ '>\n<parameter='") == "seed"
    assert parser_for_template("{%- set opens = '<minimax:tool_call>' -%}'<invoke name='") == "minimax"
    assert parser_for_template("{{ messages }}") is None
    assert parser_for_template(None) is None


def test_parsers_have_vllms_names_too() -> None:
    names = ("hermes", "llama3_json", "llama4_json", "llama4_pythonic")
    assert [parser_named(name) for name in names] == ["hermes", "llama_json", "llama_json", "pythonic"]
    with pytest.raises(ConfigError, match="did you mean 'hermes'"):
        parser_named("hermez")


def test_an_open_think_tag_in_the_prompt_is_recognised() -> None:
    assert opens_reasoning("<|assistant|>\n<think>\n")
    assert not opens_reasoning("<think>x</think>")


def test_a_continued_thought_is_open_until_it_ends() -> None:
    assert opens_reasoning("<think>a</think><|assistant|>\n<think>\nLet me see.", "<think>\nLet me see. ")
    assert not opens_reasoning("<|user|><think>?<|assistant|>\nLet me see.", "Let me see. ")  # a caller's text
    assert not opens_reasoning("<|assistant|><think>\na\n</think>So", "<think>\na\n</think>So")


@pytest.mark.parametrize("escape", [r"\ud800", r"x\udfff"])
@pytest.mark.parametrize("place", ["name", "arguments"])
def test_a_call_that_utf8_cannot_encode_comes_out_as_text(escape: str, place: str) -> None:
    call = {"name": "f", "arguments": {"a": "b"}, place: "ESCAPE"}
    text = f"<tool_call>{json.dumps(call)}</tool_call>".replace("ESCAPE", escape)
    parser = HermesParser()
    parsed = parser.feed(text)
    assert parsed.calls == []
    parsed.content.encode()
    assert escape in parsed.content


def test_a_call_nested_too_deeply_comes_out_as_text() -> None:
    inner = "[" * 100_000
    parser = HermesParser()
    text = f"<tool_call>{inner}</tool_call>"
    assert parser.feed(text).content == text
    llama = LlamaJsonParser()
    text = '{"a":' + inner
    assert llama.feed(text).content + llama.end().content == text


@pytest.mark.parametrize("name", [name for name in REASONING_FORMATS if not REASONING_FORMATS[name].has_channels])
def test_every_reasoning_format_is_split_wherever_its_text_is_cut(name: str) -> None:
    tags = REASONING_FORMATS[name]
    text = f"{tags.begin}\nSo 1 < 2.\n{tags.end}\n\nIt is [so]."
    assert reasoning_of(f"{{{{ x }}}}{tags.end}") is tags
    for size in range(1, len(text)):
        splitter = ReasoningSplitter(tags=tags)
        parts = [*(splitter.feed(text[at : at + size]) for at in range(0, len(text), size)), splitter.end()]
        assert tuple("".join(part) for part in zip(*parts, strict=True)) == ("So 1 < 2.\n", "It is [so].")


def test_a_prompt_that_ends_inside_a_thought_opens_it_in_the_format_of_its_template() -> None:
    tags = REASONING_FORMATS["mistral"]
    assert opens_reasoning("a [THINK]", tags=tags)
    assert not opens_reasoning("a [THINK] b [/THINK]", tags=tags)
    assert not opens_reasoning("a <think>", tags=tags)


FINAL = "<|start|>assistant<|channel|>final<|message|>"
CHANNELS = [
    ("an answer", False, "", "an answer", []),
    ("to be", False, "", "to be", []),
    ('{"a": 1}', False, "", '{"a": 1}', []),
    ("<|channel|>final<|message|>1 < 2, <|e", False, "", "1 < 2, <|e", []),
    (f"<|channel|>analysis<|message|>hm, 2 < 3<|end|>{FINAL}yes<|return|>", False, "hm, 2 < 3", "yes", []),
    (f"go on<|end|>{FINAL}yes", True, "go on", "yes", []),
    ("<|channel|>analysis<|message|>never ends <|en", False, "never ends <|en", "", []),
    ("<|channel|>analysis<|message|>so<|end|>yes", False, "so", "yes", []),
    ("<|channel|>analysis<|message|>so<|end|><|start|>assist", False, "so", "", []),
    ("<|channel|>" + "x" * 600, False, "", "<|channel|>" + "x" * 600, []),
    ("<|start|>" + "x" * 600, False, "", "<|start|>" + "x" * 600, []),
    (
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary<|message|>Look. <|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>b<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.f <|constrain|>json<|message|>{"x": "<|end"}<|call|>',
        False,
        "ab",
        "Look.",
        [("f", {"x": "<|end"})],
    ),
    (' to=functions.f<|channel|>commentary json<|message|>{"x": 1}', False, "", "", [("f", {"x": 1})]),
    (
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant to=functions.f<|channel|>commentary json<|message|>"
        '{"x": 1}<|call|>',
        False,
        "a",
        "",
        [("f", {"x": 1})],
    ),
]


@pytest.mark.parametrize(("text", "inside", "thought", "answer", "calls"), CHANNELS)
def test_messages_in_channels_are_read_wherever_they_are_cut(
    text: str, inside: bool, thought: str, answer: str, calls: list[tuple[str, object]]
) -> None:
    template = "{{ '<|channel|>analysis<|message|>' }}<|channel|>commentary to=functions.{{ name }}<|call|>"
    tags = reasoning_of(template)
    assert tags is not None
    assert tags is REASONING_FORMATS["harmony"]
    assert parser_for_template(template) == "harmony"
    cuts = [[text[:at], text[at:]] for at in range(len(text) + 1)]
    for pieces in (list(text), *cuts):
        splitter = new_splitter(tags, inside)
        parts = [*map(splitter.feed, pieces), splitter.end()]
        assert "".join(part for part, _ in parts) == thought
        assert read(made("harmony"), [part for _, part in parts]) == (answer, calls)


HEADERS = ["<|start|>assistant", "<|channel|>analysis", "<|channel|>final", " to=functions.f", "<|message|>", "x" * 600]


@given(data=st.data())
def test_any_messages_in_channels_read_the_same_in_any_cut(data: st.DataObject) -> None:
    marks = [*HEADERS, "<|end|>", "<|return|>", "<|call|>", "<|", "{}", "a ", "\n"]
    text = "".join(data.draw(st.lists(st.sampled_from(marks), max_size=10)))

    def split(pieces: list[str]) -> tuple[str, ...]:
        splitter = new_splitter(REASONING_FORMATS["harmony"], inside=False)
        parts = [*map(splitter.feed, pieces), splitter.end()]
        return tuple("".join(part) for part in zip(*parts, strict=True))

    assert split(list(text)) == split(cut(text, data)) == split([text])
