"""Tool calls and reasoning through the whole server, from a model that spells them token by token."""

import contextlib
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from pagoda.assembly.engine_setup import resolve_engine
from pagoda.base.config import EngineConfig
from pagoda.engine.tokenizers.load_tokenizer import load_tokenizer
from tests.server.live import FAKE_FLAGS, LiveServer, serving

HERMES = """{% if tools %}<|im_start|>system
Call a tool with <tool_call>{"name": ..., "arguments": ...}</tool_call>. Tools: {{ tools | tojson }}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAMA = HERMES.replace("<tool_call>", "").replace("</tool_call>", "") + '{# {"name":, "parameters": {}} #}'
CONTINUED = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{# </think> #}"
THINKING = HERMES + "{# <think> </think> #}"

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Zürich", "days": 2}}</tool_call>'
SAID = [
    f"Let me look.\n{CALL}\n{CALL.replace('Zürich', 'Bern')}",
    '{"name": "weather", "parameters": {"city": "Zürich", "days": 2}}',
    f"<think>\nWhere? 2 < 3, so Zürich.\n</think>\n\n{CALL}",
    "No <tool is needed: <tool_call>not JSON</tool_call>",
    "Bern is near.\n</think>\n\nIt rains.",
]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
MESSAGES: list[Any] = [{"role": "user", "content": "Weather in Zürich?"}]


@contextlib.contextmanager
def scripted_server(folder: Path, template: str, *more: str) -> Iterator[LiveServer]:
    """A server whose answer to a request with seed i is SAID[i].   more: flags."""
    setup = resolve_engine(EngineConfig.from_options(distributed_executor_backend="fake"))
    tokenizer = load_tokenizer(setup.files, None, None)
    end = tokenizer.facts.eos_token_ids[0]
    scripts, file = folder / "scripts.json", folder / "template.jinja"
    scripts.write_text(json.dumps([[*tokenizer.encode(text, False), end] for text in SAID]))
    file.write_text(template)
    env = {"ENGINE_SCRIPTS": str(scripts), "PYTHONPATH": os.getcwd()}
    flags = (*FAKE_FLAGS, "--chat-template", str(file), *more)
    with serving(folder, *flags, env=env, engine="tests.engine.scripted_engine") as server:
        yield server


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with scripted_server(tmp_path_factory.mktemp("tools"), HERMES) as server:
        yield server


@pytest.fixture
def client(scripted: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0)


Calls = list[tuple[str, dict[str, Any]]]


def whole(client: openai.OpenAI, seed: int, **more: Any) -> tuple[str, Calls, str, str]:
    """(content, calls, reasoning, finish reason)"""
    choice = client.chat.completions.create(
        model="smollm2-135m", messages=MESSAGES, seed=seed, tools=TOOLS, **more
    ).choices[0]
    calls = [(c.function.name, json.loads(c.function.arguments)) for c in choice.message.tool_calls or []]
    thought = getattr(choice.message, "reasoning_content", None) or ""
    return choice.message.content or "", calls, thought, choice.finish_reason


def streamed(client: openai.OpenAI, seed: int, **more: Any) -> tuple[str, Calls, str, str]:
    """The same, put together from deltas as a client does."""
    content = thought = reason = ""
    parts: dict[int, list[str]] = {}
    ids: set[str] = set()
    for chunk in client.chat.completions.create(
        model="smollm2-135m", messages=MESSAGES, seed=seed, tools=TOOLS, stream=True, **more
    ):
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        thought += getattr(choice.delta, "reasoning_content", None) or ""
        reason = choice.finish_reason or reason
        for call in choice.delta.tool_calls or []:
            part = parts.setdefault(call.index, ["", ""])
            if call.id:
                ids.add(call.id)
            part[0] += call.function.name or ""
            part[1] += call.function.arguments or ""
    assert len(ids) == len(parts)
    return content, [(parts[i][0], json.loads(parts[i][1])) for i in sorted(parts)], thought, reason


ZURICH = ("weather", {"city": "Zürich", "days": 2})
BERN = ("weather", {"city": "Bern", "days": 2})


@pytest.mark.parametrize("ask", [whole, streamed])
def test_hermes_calls(client: openai.OpenAI, ask: Any) -> None:
    assert ask(client, 0) == ("Let me look.", [ZURICH, BERN], "", "tool_calls")
    assert ask(client, 0, parallel_tool_calls=False) == ("Let me look.", [ZURICH], "", "tool_calls")
    content, calls, _, reason = ask(client, 0, tool_choice="none")
    assert (content, calls, reason) == (SAID[0], [], "stop")


@pytest.mark.parametrize("ask", [whole, streamed])
def test_the_parser_is_that_of_the_requests_own_template(client: openai.OpenAI, ask: Any) -> None:
    assert ask(client, 1) == (SAID[1], [], "", "stop")
    assert ask(client, 1, extra_body={"chat_template": LLAMA}) == ("", [ZURICH], "", "tool_calls")


@pytest.mark.parametrize("ask", [whole, streamed])
def test_an_answer_in_the_requests_own_format_is_not_a_call(client: openai.OpenAI, ask: Any) -> None:
    for form in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"regex": r"\{.*"}}):
        assert ask(client, 1, extra_body={"chat_template": LLAMA, **form}) == (SAID[1], [], "", "stop")


@pytest.mark.parametrize("ask", [whole, streamed])
def test_reasoning_comes_apart_from_calls(client: openai.OpenAI, ask: Any) -> None:
    thinking = {"chat_template": THINKING}
    assert ask(client, 2, extra_body=thinking) == ("", [ZURICH], "Where? 2 < 3, so Zürich.\n", "tool_calls")
    silent = ask(client, 2, extra_body={**thinking, "include_reasoning": False})
    assert silent == ("", [ZURICH], "", "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
def test_the_rest_of_a_continued_thought_is_reasoning(client: openai.OpenAI, stream: bool) -> None:
    turns: Any = [*MESSAGES, {"role": "assistant", "content": "<think>\nLet me see. "}]
    more = {"chat_template": CONTINUED, "continue_final_message": True, "add_generation_prompt": False}
    asked: Any = {"model": "smollm2-135m", "messages": turns, "seed": 4, "extra_body": more}
    if stream:
        parts: list[Any] = [part.choices[0].delta for part in client.chat.completions.create(**asked, stream=True)]
        thought = "".join(getattr(part, "reasoning", None) or "" for part in parts)
        content = "".join(part.content or "" for part in parts)
    else:
        message: Any = client.chat.completions.create(**asked).choices[0].message
        thought, content = message.reasoning, message.content
    assert (thought, content) == ("Bern is near.\n", "It rains.")


def test_reasoning_has_both_names_and_its_tokens_are_counted(scripted: LiveServer, client: openai.OpenAI) -> None:
    given = scripted.post("/tokenize", {"prompt": SAID[2], "add_special_tokens": False, "return_token_strs": True})[1]
    written = list(itertools.accumulate(given["token_strs"]))  # as the vocabulary has them
    expected = next(index for index, text in enumerate(written) if "</think>" in text) + 1
    asked: Any = {"model": "smollm2-135m", "messages": MESSAGES, "seed": 2, "extra_body": {"chat_template": THINKING}}
    whole = client.chat.completions.create(**asked)
    message: Any = whole.choices[0].message
    assert message.reasoning == message.reasoning_content == "Where? 2 < 3, so Zürich.\n"
    parts = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    deltas: list[Any] = [choice.delta for part in parts for choice in part.choices]
    for name in ("reasoning", "reasoning_content"):
        assert "".join(getattr(delta, name, None) or "" for delta in deltas) == message.reasoning
    for usage in (whole.usage, parts[-1].usage):
        assert usage is not None
        assert usage.completion_tokens_details is not None
        count = usage.completion_tokens_details.reasoning_tokens
        assert count == expected < usage.completion_tokens
    plain = client.chat.completions.create(model="smollm2-135m", messages=MESSAGES, seed=2)
    assert plain.usage is not None
    assert plain.usage.completion_tokens_details is None


@pytest.mark.parametrize("ask", [whole, streamed])
def test_text_that_is_not_a_call_stays_text(client: openai.OpenAI, ask: Any) -> None:
    content, calls, _, reason = ask(client, 3)
    assert (content, calls, reason) == (SAID[3], [], "stop")


def test_calls_go_back_into_the_template(scripted: LiveServer) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    answer = scripted.post("/tokenize", {"messages": turns, "tools": TOOLS, "return_token_strs": True})[1]
    text = "".join(answer["token_strs"])
    assert "<tool_call>" in text
    assert "rain" in text


def test_tools_that_the_template_cannot_show_are_described_in_a_message(scripted: LiveServer) -> None:
    """And the calls that come back are read as Hermes writes them."""
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    body = {"messages": MESSAGES, "tools": TOOLS, "chat_template": plain, "seed": 0, "n": 1}
    answer = scripted.post("/v1/chat/completions", body)[1]
    assert [one["function"]["name"] for one in answer["choices"][0]["message"]["tool_calls"]] == ["weather"] * 2
