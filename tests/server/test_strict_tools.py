"""Forced and strict tool calls: valid by construction, from an engine whose tokens are random otherwise."""

import json
from types import SimpleNamespace
from typing import Any

import jsonschema
import msgspec
import openai
import pytest

from pagoda.base.sampling_params import SamplingParams
from pagoda.engine.answers.tool_parsers import TOOL_PARSERS
from pagoda.server.dialects.openai.chat import ChatCompletionRequest
from pagoda.server.tool_choice import ToolUse
from tests.server.live import LiveServer
from tests.server.test_tools import HERMES, LLAMA

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Zürich", "Bern"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
SUM = {
    "$defs": {"number": {"type": "integer", "minimum": 0, "maximum": 99}},
    "properties": {"a": {"$ref": "#/$defs/number"}, "b": {"$ref": "#/$defs/number"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {"weather": CITY, "add-up": SUM, "now": {"type": "object", "maxProperties": 0}}


def tools_of(*names: str, strict: bool | None = None) -> list[Any]:
    functions = [{"name": name, "description": f"of {name}", "parameters": SCHEMAS[name]} for name in names]
    functions = [{**one, "strict": strict} if strict is not None else one for one in functions]
    return [{"type": "function", "function": one} for one in functions]


BARE = HERMES.replace("</tool_call>", "")
TEMPLATES = {
    "generic": {},
    "hermes": {"chat_template": HERMES},
    "llama_json": {"chat_template": LLAMA},
    "mistral": {"chat_template": BARE.replace("<tool_call>", "[TOOL_CALLS]")},
    "pythonic": {"chat_template": BARE.replace("<tool_call>", "[func_name1(params_name1=params_value1)]")},
    "deepseek_v3": {"chat_template": BARE.replace("<tool_call>", "<｜tool▁calls▁begin｜>\n```json\n")},
    "deepseek_v31": {"chat_template": BARE.replace("<tool_call>", "<｜tool▁calls▁begin｜>")},
    "granite": {"chat_template": BARE.replace("<tool_call>", "<|tool_call|>")},
}
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Zürich?"}], "max_tokens": 900, "temperature": 0.7}


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    return [
        (one["function"]["name"], json.loads(one["function"]["arguments"])) for one in message.get("tool_calls") or []
    ]


@pytest.mark.parametrize("template", TEMPLATES)
def test_required_calls_obey_their_schemas(fake_server: LiveServer, template: str) -> None:
    names: set[str] = set()
    for seed in range(6):
        body = {**ASK, **TEMPLATES[template], "seed": seed, "tools": tools_of(*SCHEMAS), "tool_choice": "required"}
        status, answer = fake_server.post("/v1/chat/completions", body)
        assert status == 200, answer
        choice = answer["choices"][0]
        calls = calls_of(choice["message"])
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        assert 1 <= len(calls) <= 16
        for name, arguments in calls:
            jsonschema.validate(arguments, SCHEMAS[name])
            names.add(name)
    assert len(names) > 1


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_named_tool_is_called_once(fake_server: LiveServer, template: str) -> None:
    choice = {"type": "function", "function": {"name": "add-up"}}
    body = {**ASK, **TEMPLATES[template], "tools": tools_of(*SCHEMAS), "tool_choice": choice, "n": 3, "seed": 1}
    answer = fake_server.post("/v1/chat/completions", body)[1]
    for one in answer["choices"]:
        ((name, arguments),) = calls_of(one["message"])
        assert name == "add-up"
        jsonschema.validate(arguments, SUM)


@pytest.mark.parametrize("template", TEMPLATES)
def test_one_call_where_parallel_calls_are_off(fake_server: LiveServer, template: str) -> None:
    for seed in range(4):
        body = {**ASK, **TEMPLATES[template], "seed": seed, "tools": tools_of(*SCHEMAS), "tool_choice": "required"}
        answer = fake_server.post("/v1/chat/completions", {**body, "parallel_tool_calls": False})[1]
        assert len(calls_of(answer["choices"][0]["message"])) == 1


def test_a_streamed_call_is_the_whole_one(fake_server: LiveServer) -> None:
    client = openai.OpenAI(base_url=f"{fake_server.url}/v1", api_key="none", max_retries=0)
    asked: dict[str, Any] = {"model": "smollm2-135m", "seed": 2, **ASK, "tools": tools_of("weather", "add-up")}
    asked["tool_choice"] = "required"
    whole = client.chat.completions.create(**asked).choices[0].message.tool_calls or []
    parts: dict[int, list[str]] = {}
    for chunk in client.chat.completions.create(**asked, stream=True):
        for call in chunk.choices[0].delta.tool_calls or []:
            assert call.function is not None
            part = parts.setdefault(call.index, ["", ""])
            part[0] += call.function.name or ""
            part[1] += call.function.arguments or ""
    assert [part for _, part in sorted(parts.items())] == [[one.function.name, one.function.arguments] for one in whole]


@pytest.mark.parametrize("template", TEMPLATES)
def test_optional_strict_calls_obey_their_schemas(fake_server: LiveServer, template: str) -> None:
    """Random text hardly ever begins a call, but the grammar is there, and text comes through."""
    tools = tools_of("weather", strict=True) + tools_of("now", strict=False)
    body = {**ASK, **TEMPLATES[template], "tools": tools, "max_tokens": 40, "seed": 3}
    status, answer = fake_server.post("/v1/chat/completions", body)
    assert status == 200, answer
    assert answer["choices"][0]["message"]["content"]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_schema_that_cannot_be_held_is_no_error_unless_it_has_to_be(fake_server: LiveServer, template: str) -> None:
    """Claude Code's tools have such schemas."""
    names = {"type": "object", "propertyNames": {"type": "string"}}
    parameters = {"type": "object", "properties": {"metadata": names}}
    tool = {"type": "function", "function": {"name": "note", "parameters": parameters}}
    body = {**ASK, **TEMPLATES[template], "tools": [tool, *tools_of("now")], "max_tokens": 9, "seed": 3}
    assert fake_server.post("/v1/chat/completions", body)[0] == 200
    tool["function"]["strict"] = True  # type: ignore[index]
    for more in ({}, {"tool_choice": "required"}):
        status, answer = fake_server.post("/v1/chat/completions", {**body, **more})
        assert (status, answer["error"]["param"]) == (400, "tools[0].function.parameters")
        assert "at /properties/metadata/propertyNames: is not supported" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("more", "param", "said"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice", "no tool 'no'"),
        ({"tool_choice": {"type": "function", "function": {}}}, "tool_choice", "no tool None"),
    ],
)
def test_impossible_tool_choices_are_refused(
    fake_server: LiveServer, more: dict[str, Any], param: str, said: str
) -> None:
    status, answer = fake_server.post("/v1/chat/completions", {**ASK, "tools": tools_of("now"), **more})
    assert (status, answer["error"]["param"]) == (400, param)
    assert said in answer["error"]["message"]


@pytest.mark.parametrize("asked", ["auto", "kimi", "glm", "qwen3_coder", "mistral3"])
def test_a_required_call_has_a_grammar_though_the_models_own_format_has_none(asked: str) -> None:
    body = msgspec.convert({**ASK, "tools": tools_of("now"), "tool_choice": "required"}, ChatCompletionRequest)
    state: Any = SimpleNamespace(tool_parser=asked, tool_parser_for=lambda _: "kimi" if asked == "auto" else asked)
    assert ToolUse.of(body.conversation, state, HERMES).has_grammar(SamplingParams())


def test_properties_that_are_no_mapping_say_nothing_of_the_arguments() -> None:
    function = {"name": "f", "parameters": {"properties": [1]}}
    body = msgspec.convert({**ASK, "tools": [{"type": "function", "function": function}]}, ChatCompletionRequest)
    state: Any = SimpleNamespace(tool_parser="glm", tool_parser_for=lambda _: "glm")
    parser = TOOL_PARSERS["glm"](ToolUse.of(body.conversation, state, HERMES).argument_types())
    assert parser.feed("<tool_call>f\n<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>").calls


def test_an_unsupported_tool_schema_is_refused_with_its_place(fake_server: LiveServer) -> None:
    parameters = {"type": "object", "properties": {"a": {"uniqueItems": True}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    status, answer = fake_server.post("/v1/chat/completions", {**ASK, "tools": tools, "tool_choice": "required"})
    assert status == 400
    assert answer["error"]["message"].startswith("tools[0].function.parameters: at /properties/a/uniqueItems:")


def test_a_conversation_with_calls_goes_back_to_a_model_without_tools(fake_server: LiveServer) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    turns = [
        {"role": "system", "content": "Be short."},
        *ASK["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "snow"}]},
    ]
    asked = {"messages": turns, "tools": tools_of("weather")}
    tokens = fake_server.post("/tokenize", asked)[1]["tokens"]
    text = fake_server.post("/detokenize", {"tokens": tokens})[1]["prompt"]
    assert text.count('<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>') == 2
    assert "<tool_response>\nrain\n</tool_response>\n<tool_response>\nsnow\n</tool_response>" in text
    assert text.index("Be short.") < text.index('"description": "of weather"') < text.index("Zürich?")
    assert text.count("<|im_start|>user") == 2
    status, answer = fake_server.post("/v1/chat/completions", {**ASK, "messages": turns, "max_tokens": 5})
    assert status == 200, answer


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_that_is_cut_off_leaves_nothing_in_the_content(fake_server: LiveServer, stream: bool) -> None:
    for max_tokens in (1, 4, 8, 20, 40):
        asked = {**ASK, "max_tokens": max_tokens, "tools": tools_of("weather"), "tool_choice": "required", "seed": 3}
        client = openai.OpenAI(base_url=f"{fake_server.url}/v1", api_key="none", max_retries=0)
        if not stream:
            message = client.chat.completions.create(model="smollm2-135m", **asked).choices[0].message
            assert not message.content
            continue
        deltas = [
            part.choices[0].delta for part in client.chat.completions.create(**asked, model="smollm2-135m", stream=True)
        ]
        assert not "".join(delta.content or "" for delta in deltas)
