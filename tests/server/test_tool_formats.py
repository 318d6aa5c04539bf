"""Every tool format on texts that are nearly right: nothing is lost, and arguments are always an object."""

import json
import random
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda.engine.answers.tool_parsers import TOOL_PARSERS
from pagoda.engine.answers.tool_parsers.argument_types import MAX_STEPS, ArgumentTypes, argument_types
from pagoda.engine.answers.tool_parsers.base import ToolCall, ToolParser, merged
from tests.server.test_parsers import MANY_FORMATS, WRITTEN

NAMED = {
    "f": "fun_xq",
    "s": "key_sq",
    "n": "key_nq",
    "o": "key_oq",
    "k": "key_kq",
    "a": "word_aq",
    "quoted": "word_qq",
    "line": "word_lq",
    "Look": "word_bq",
}
WORD = re.compile(r"(?:fun|key|word)_[a-z]q")


def read(parser: ToolParser, pieces: list[str]) -> tuple[str, list[ToolCall]]:
    parsed = [*map(parser.feed, pieces), parser.end()]
    return "".join(one.content for one in parsed), merged(call for one in parsed for call in one.calls)


def made(name: str, schema: Any = True) -> ToolParser:
    return TOOL_PARSERS[name](argument_types({"fun_xq": schema, "f": schema}))


def sample(name: str) -> str:
    """Two calls, and text where the format allows it. Its words are unlike any mark."""
    text = WRITTEN[name] if name == "pythonic" else f"Look {WRITTEN[name]}Look"
    for plain, word in NAMED.items():
        text = re.sub(rf"(?<![\w|▁\\]){plain}(?![\w|▁])", word, text)
    return text


def tokens_of(text: str) -> list[str]:
    """The words, tags and other characters of a text."""
    return re.findall(r"</?\w+[=>]|<[|｜][^>]*>|\[[A-Z_]+\]|\w+|\s+|.", text, re.DOTALL)


@pytest.mark.parametrize("name", list(TOOL_PARSERS))
@MANY_FORMATS
@given(data=st.data())
def test_nothing_is_lost_of_what_is_nearly_right(name: str, data: st.DataObject) -> None:
    """Tokens of a well-formed text are left out, doubled and exchanged, and it is cut; streamed equals whole."""
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    tokens = tokens_of(sample(name))
    for _ in range(rng.randint(0, 4)):
        at, other = rng.randrange(len(tokens)), rng.randrange(len(tokens))
        change = rng.choice(["drop", "double", "exchange"])
        if change == "drop":
            tokens[at] = ""
        elif change == "double":
            tokens[at] += tokens[at]
        else:
            tokens[at], tokens[other] = tokens[other], tokens[at]
    text = "".join(tokens)
    if rng.random() < 0.3:
        text = text[: rng.randrange(len(text) + 1)]
    content, calls = read(made(name), [text])
    cuts = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randint(0, 9))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(made(name), pieces) == (content, calls)
    assert read(made(name), list(text)) == (content, calls)
    shown = [content]
    for call in calls:
        assert isinstance(json.loads(call.arguments), dict)
        shown += call.name or "", call.arguments
    # A closing tag may have the name of an argument again, and the ids of calls are not the model's to give.
    opened = re.sub(r'</\w+|"(?:\w+_)?id": *"[^"]*"', "", text)
    for word in set(WORD.findall(opened)):
        assert sum(one.count(word) for one in shown) >= opened.count(word), (word, text, shown)


@pytest.mark.parametrize("name", list(TOOL_PARSERS))
def test_what_is_well_formed_is_read_as_calls(name: str) -> None:
    _, calls = read(made(name), [sample(name)])
    assert [call.name for call in calls] == ["fun_xq"] * 2
    assert all(set(json.loads(call.arguments)) == {"key_sq", "key_nq", "key_oq"} for call in calls)


def arguments(name: str, text: str, schema: Any = True) -> list[tuple[str | None, Any]]:
    whole = read(made(name, schema), [text])
    assert read(made(name, schema), list(text)) == whole
    return [(call.name, json.loads(call.arguments)) for call in whole[1]]


# ---- types that the text does not show

ZIP = {"Zip": {"type": "string"}, "MaybeZip": {"anyOf": [{"$ref": "#/$defs/Zip"}, {"type": "null"}]}}
TYPES: list[tuple[Any, str, Any]] = [
    ({"$ref": "#/$defs/Zip"}, "12345", "12345"),
    ({"$ref": "#/$defs/MaybeZip"}, "12345", "12345"),
    ({"$ref": "#/$defs/MaybeZip"}, "null", None),
    ({"$ref": "#/$defs/MaybeZip"}, "nullable", "nullable"),
    ({"type": ["string", "null"]}, "null", None),
    ({"type": ["string", "null"]}, "None", None),
    ({"type": "string"}, "null", "null"),
    ({"type": "string", "nullable": True}, "null", None),
    ({"allOf": [{"$ref": "#/$defs/Zip"}, {"minLength": 2}]}, "12345", "12345"),
    ({"oneOf": [{"$ref": "#/$defs/Zip"}, {"enum": ["x"]}]}, "7", "7"),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"enum": [1, 2]}, "1", 1),
    ({"const": "true"}, "true", "true"),
    ({"type": ["integer", "string"]}, "12345", 12345),
    ({"type": ["boolean", "string"]}, "12345", "12345"),
    ({"type": ["boolean", "string"]}, "True", True),
    ({"type": "number"}, "7", 7),
    ({"type": "number"}, "+7.5", 7.5),
    ({"type": "object"}, "{'a': (1, None), 'b': True}", {"a": [1, None], "b": True}),
    ({"$ref": "#/$defs/Nowhere"}, "7", 7),
    ({"$ref": "#/properties/x"}, "7", 7),
    (True, "[1, 2]", [1, 2]),
    ({}, "plain text", "plain text"),
]


@pytest.mark.parametrize("name", ["qwen3_coder", "glm"])
@pytest.mark.parametrize(("schema", "written", "value"), TYPES)
def test_a_value_has_the_type_that_its_schema_says(name: str, schema: Any, written: str, value: Any) -> None:
    whole = {"type": "object", "properties": {"x": schema}, "$defs": ZIP}
    text = {
        "qwen3_coder": f"<tool_call><function=f><parameter=x>\n{written}\n</parameter></function></tool_call>",
        "glm": f"<tool_call>f\n<arg_key>x</arg_key><arg_value>{written}</arg_value></tool_call>",
    }[name]
    for one in (whole, {"$ref": "#/$defs/All", "$defs": {**ZIP, "All": {"properties": {"x": schema}}}}):
        assert arguments(name, text, one) == [("f", {"x": value})]


def test_references_without_end_are_read_once() -> None:
    loop = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{(i + k) % 40}"} for k in (1, 2, 3)]} for i in range(40)}
    schema = {"properties": {"x": {"$ref": "#/$defs/d0"}}, "$defs": loop}
    text = "<tool_call>f\n<arg_key>x</arg_key><arg_value>7</arg_value></tool_call>"
    assert arguments("glm", text, schema) == [("f", {"x": 7})]


def test_a_schema_of_any_depth_and_size_is_looked_at_within_bounds() -> None:
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(500)} | {"d500": {"type": "string"}}
    text = "<tool_call>f\n<arg_key>x</arg_key><arg_value>7</arg_value></tool_call>"
    for ref in ("#/$defs/d0", f"#/anyOf/{'9' * 5000}"):
        assert arguments("glm", text, {"properties": {"x": {"$ref": ref}}, "$defs": chain}) == [("f", {"x": 7})]
    near = {"properties": {"x": {"$ref": "#/$defs/d450"}}, "$defs": chain}
    assert arguments("glm", text, near) == [("f", {"x": "7"})]
    nested: Any = {"type": "string"}
    for _ in range(500):
        nested = {"allOf": [nested]}
    assert arguments("glm", text, {"properties": {"x": nested}}) == [("f", {"x": 7})]
    wide = {"properties": {f"p{i}": {"type": "string"} for i in range(500)}, "anyOf": [{"title": "t"}] * 500}
    types = argument_types({"narrow": {"properties": {"x": {"type": "string"}}}, "wide": wide, "f": wide})
    assert sum(one.num_steps for one in types.values()) < 2 * MAX_STEPS
    assert types["narrow"].of("x") == types["wide"].of("p0") == {"string"} < types["wide"].of("p499")
    assert types["wide"].of("none") == types["f"].of("p0") == ArgumentTypes(True).of("p0")


def test_a_schema_is_looked_at_before_the_answer_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = made("glm", {"properties": {"x": {"type": "string"}}})
    monkeypatch.delattr(ArgumentTypes, "_types")
    text = "<tool_call>f\n<arg_key>x</arg_key><arg_value>7</arg_value></tool_call>"
    assert [call.arguments for call in read(parser, [text])[1]] == ['{"x": "7"}']


# ---- calls that are nearly right

CALL = '{"name": "f", "arguments": {"x": 1}}'
ROLE = "to=functions.f<|channel|>commentary json<|message|>"


def dsml(section: str, attribute: str) -> str:
    parameter = f'<｜DSML｜parameter name="x"{attribute and " " + attribute}>1</｜DSML｜parameter>'
    return f'<｜DSML｜{section}>\n<｜DSML｜invoke name="f">\n{parameter}\n</｜DSML｜invoke>\n</｜DSML｜{section}>'


def m3(*tags: str) -> str:
    return "]<]minimax[>[".join(["", "<tool_call>\n", '<invoke name="f">', *tags, "</invoke>\n", "</tool_call>"])


NEARLY: list[tuple[str, str, list[tuple[str, Any]], str]] = [
    ("qwen3_coder", "<function=f>\n<parameter=x>\n1\n</parameter>\n</function>", [("f", {"x": 1})], ""),
    (
        "qwen3_coder",
        "<tool_call><function=f></function><function=g></function></tool_call>",
        [("f", {}), ("g", {})],
        "",
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=x>\n1\n<parameter=y>\n2\n</function>\n</tool_call>",
        [("f", {"x": 1, "y": 2})],
        "",
    ),
    (
        "qwen3_coder",
        "<tool_call><function=f>why<parameter=x>1</parameter></parameter></function>",
        [("f", {"x": 1})],
        "why",
    ),
    (
        "glm",
        "<tool_call>f\n<arg_key>x</arg_key><arg_value>1<arg_key>y<arg_value>2</tool_call>",
        [("f", {"x": 1, "y": 2})],
        "",
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', [("f", {})], ""),
    ("hermes", '<tool_call>{"name": "f", "arguments": ""}</tool_call>', [("f", {})], ""),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', [("f", {"x": 1})], ""),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        [],
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
    ),
    ("hermes", "<tool_call>{'name': 'f', 'arguments': {'x': 1}}</tool_call>", [("f", {"x": 1})], ""),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"x": 1,}, "why": "z"}</tool_call>',
        [("f", {"x": 1})],
        '{"why": "z"}',
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1 y}}', [("f", {"x": 1})], " y}}"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": [1, {"y": "z', [("f", {"x": [1, {"y": "z"}]})], ""),
    ("mistral", f'[TOOL_CALLS] [{CALL[:-1]}, "id": "abc"}}]', [("f", {"x": 1})], ""),
    ("mistral3", "[TOOL_CALLS]f[ARGS]", [("f", {})], ""),
    ("mistral3", '[TOOL_CALLS]f{"x": 1}', [("f", {"x": 1})], ""),
    ("kimi", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|><|tool_call_end|>", [("f", {})], ""),
    ("deepseek_v31", "<｜tool▁call▁begin｜>f<｜tool▁sep｜><｜tool▁call▁end｜>", [("f", {})], ""),
    ("deepseek_v31", '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 1} why<｜tool▁call▁end｜>', [("f", {"x": 1})], "why"),
    ("granite", f"Look. <tool_call> [{CALL}]", [("f", {"x": 1})], "Look."),
    ("harmony", f" {ROLE}{{}}<|call|>", [("f", {})], ""),
    ("harmony", f'Look.<|start|>assistant {ROLE}{{"x": 1}}<|call|>', [("f", {"x": 1})], "Look."),
    ("harmony", "to=functions of time", [], "to=functions of time"),
    ("minimax_m1", f"<tool_calls>{CALL}{CALL}</tool_calls> so", [("f", {"x": 1})] * 2, "so"),
    ("minimax_m1", f'<tool_calls>\n{CALL}\n{{"a": 1}}\n</tool_calls>', [("f", {"x": 1})], '{"a": 1}'),
    ("minimax_m1", '<tool_calls>\n{"a": 1}</tool_calls>', [], '<tool_calls>\n{"a": 1}</tool_calls>'),
    ("deepseek_v32", dsml("function_calls", 'string="true"'), [("f", {"x": "1"})], ""),
    ("deepseek_v32", dsml("function_calls", 'string="false"'), [("f", {"x": 1})], ""),
    ("deepseek_v32", dsml("function_calls", ""), [("f", {"x": 1})], ""),
    ("deepseek_v4", dsml("tool_calls", 'string="true"'), [("f", {"x": "1"})], ""),
    ("minimax_m3", m3("<a>1", "</a>", "<b>", "<c>x", "</c>", "</b>"), [("f", {"a": 1, "b": {"c": "x"}})], ""),
    (
        "minimax_m3",
        m3("<l>", "<item>", "<c>1", "</c>", "</item>", "<item>2", "</item>", "</l>", "<d>x", "</d>"),
        [("f", {"l": [{"c": 1}, 2], "d": "x"})],
        "",
    ),
    ("minimax_m3", m3("<l>", "<item>a", "<b>c")[:-35], [("f", {"l": ["a"], "b": "c"})], ""),
    ("minimax_m3", m3("<a>", "</a>", "</b>", "why"), [("f", {"a": ""})], "]<]minimax[>[why"),
    ("llama_json", 'I look. {"name": "f", "parameters": {"x": 1}}', [("f", {"x": 1})], "I look."),
    ("llama_json", 'She is {"name": "Ann", "age": 5}.', [], 'She is {"name": "Ann", "age": 5}.'),
    ("pythonic", "[f(x=(1, 2), y=+5, z=-.5)]", [("f", {"x": [1, 2], "y": 5, "z": -0.5})], ""),
]


@pytest.mark.parametrize(("name", "text", "calls", "content"), NEARLY)
def test_calls_that_models_write_nearly_right(name: str, text: str, calls: Any, content: str) -> None:
    assert arguments(name, text) == calls
    assert read(made(name), [text])[0].strip() == content.strip()


@pytest.mark.parametrize(
    ("name", "text", "call_id"),
    [
        ("kimi", "<|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>{}<|tool_call_end|>", "functions.f:3"),
        ("mistral3", "[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}", "abcdefghi"),
        ("mistral3", "[TOOL_CALLS]f[ARGS]{}", None),
    ],
)
def test_the_ids_that_a_model_gives_its_calls_are_kept(name: str, text: str, call_id: str | None) -> None:
    for pieces in ([text], list(text)):
        assert read(made(name), pieces)[1] == [ToolCall("f", "{}", call_id)]
