"""Budgets of reasoning in every API, on a server whose template opens a thought in each prompt."""

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from pagoda.server.dialects.messages.bodies import MessagesRequest
from pagoda.server.thinking import EFFORT_BUDGETS, Thinking
from tests.server.live import FAKE_FLAGS, LiveServer, serving
from tests.server.test_tools import TOOLS
from tests.server.turn_apis import events_of, summary

TEMPLATE = """{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{% if tools %}<tool_call>{"name":, "arguments":}</tool_call> {{ tools | tojson }}{% endif %}
{% if add_generation_prompt %}assistant: <think>
{% endif %}{# </think> #}"""
CLOSING = "\n</think>\n\n"
MESSAGES = [{"role": "user", "content": "Hello"}]
CHAT: dict[str, Any] = {
    "messages": MESSAGES,
    "max_tokens": 60,
    "seed": 3,
    "ignore_eos": True,
    "thinking_token_budget": 12,
    "return_token_ids": True,
}


@pytest.fixture(scope="module")
def thinking_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder: Path = tmp_path_factory.mktemp("thinking")
    (folder / "template.jinja").write_text(TEMPLATE)
    flags = ("--chat-template", str(folder / "template.jinja"), "--ollama")
    with serving(folder, *FAKE_FLAGS, *flags, stepped=True) as server:
        yield server


@pytest.fixture(scope="module")
def closing(thinking_server: LiveServer) -> list[int]:
    asked = {"prompt": CLOSING, "add_special_tokens": False}
    return thinking_server.post("/tokenize", asked)[1]["tokens"]


def asked(server: LiveServer, path: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    status, answer = server.post(path, body)
    assert status == 200, answer
    return answer


def num_until_end(server: LiveServer, tokens: list[int]) -> int:
    """Tokens up to the one that completes </think>."""
    for count in range(len(tokens)):
        if "</think>" in asked(server, "/detokenize", tokens=tokens[:count])["prompt"]:
            return count
    raise AssertionError("the reasoning has no end")


def test_reasoning_ends_at_its_budget(thinking_server: LiveServer, closing: list[int]) -> None:
    answer = asked(thinking_server, **CHAT, n=2)
    num_reasoning = 0
    for choice in answer["choices"]:
        tokens, message = choice["token_ids"], choice["message"]
        assert tokens[12 : 12 + len(closing)] == closing
        assert len(tokens) == 60
        thought = asked(thinking_server, "/detokenize", tokens=tokens[:12])["prompt"]
        assert message["reasoning"] == thought + "\n"
        assert message["content"]
        num_reasoning += num_until_end(thinking_server, tokens)
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == num_reasoning
    free = asked(thinking_server, **{**CHAT, "thinking_token_budget": -1})["choices"][0]
    assert free["token_ids"][:12] == answer["choices"][0]["token_ids"][:12]
    assert free["message"]["content"] == ""


def test_a_stream_says_the_same(thinking_server: LiveServer) -> None:
    async def both() -> tuple[dict[str, Any], dict[str, Any]]:
        async with aiohttp.ClientSession(thinking_server.url) as session:
            more = {"stream": True, "stream_options": {"include_usage": True}}
            async with session.post("/v1/chat/completions", json={**CHAT, **more}) as response:
                return summary(events_of(await response.read())), asked(thinking_server, **CHAT)

    streamed, whole = asyncio.run(both())
    message = whole["choices"][0]["message"]
    said = {name: text for name, text in streamed.items() if ".delta." in name}
    for name in ("reasoning", "content"):
        assert next(text for place, text in said.items() if place.endswith(f".{name}")) == message[name]
    place = ".usage.completion_tokens_details.reasoning_tokens"
    assert streamed[place] == whole["usage"]["completion_tokens_details"]["reasoning_tokens"]


def test_a_budget_of_zero_closes_at_once(thinking_server: LiveServer, closing: list[int]) -> None:
    for more in ({"thinking_token_budget": 0}, {"thinking_token_budget": None, "reasoning_effort": "none"}):
        tokens = asked(thinking_server, **{**CHAT, **more})["choices"][0]["token_ids"]
        assert tokens[: len(closing)] == closing
    opened = [*MESSAGES, {"role": "assistant", "content": "<think>\nOh"}]
    continued = {"messages": opened, "continue_final_message": True, "add_generation_prompt": False}
    tokens = asked(thinking_server, **{**CHAT, **continued, "thinking_token_budget": 0})["choices"][0]["token_ids"]
    assert tokens[: len(closing)] == closing


def test_what_the_answer_must_be_begins_after_the_reasoning(thinking_server: LiveServer) -> None:
    form = {"structured_outputs": {"choice": ["yes", "perhaps"]}, "ignore_eos": False}
    message = asked(thinking_server, **{**CHAT, **form})["choices"][0]["message"]
    assert message["reasoning"]
    assert message["content"].strip() in ("yes", "perhaps")
    call = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 300, "ignore_eos": False}
    choice = asked(thinking_server, **{**CHAT, **call})["choices"][0]
    assert choice["message"]["reasoning"]
    assert choice["finish_reason"] in ("tool_calls", "length")
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"


@pytest.mark.parametrize(
    ("prompt", "at"),
    [("Q: 1 + 1?\nA: <think>\n", 5), ("<think>\nHm", 5), ("<think>Hm</think>No.", None), ("Hello", None)],
)
def test_a_text_is_continued_from_its_open_thought(
    thinking_server: LiveServer, closing: list[int], prompt: str, at: int | None
) -> None:
    body = {"prompt": prompt, "max_tokens": 30, "seed": 1, "ignore_eos": True, "return_token_ids": True}
    tokens = asked(thinking_server, "/v1/completions", **body, thinking_token_budget=5)["choices"][0]["token_ids"]
    found = [start for start in range(30) if tokens[start : start + len(closing)] == closing]
    assert found == ([] if at is None else [at])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_model_without_reasoning_has_no_budget(fake_server: LiveServer, path: str) -> None:
    body = {"messages": MESSAGES} if "chat" in path else {"prompt": "Hello"}
    status, answer = fake_server.post(path, {**body, "max_tokens": 4, "thinking_token_budget": 5})
    assert (status, answer["error"]["param"]) == (400, "thinking_token_budget")
    status, answer = fake_server.post(path, {**body, "max_tokens": 4, "thinking_token_budget": -2})
    assert (status, answer["error"]["param"]) == (400, "thinking_token_budget")


def test_efforts_are_ignored_where_there_is_no_reasoning(fake_server: LiveServer) -> None:
    plain = asked(fake_server, messages=MESSAGES, max_tokens=4, seed=1)
    low = asked(fake_server, messages=MESSAGES, max_tokens=4, seed=1, reasoning_effort="low")
    assert plain["choices"] == low["choices"]
    thinking = {"type": "enabled", "budget_tokens": 1024}
    asked(fake_server, "/v1/messages", model="smollm2-135m", messages=MESSAGES, max_tokens=4, thinking=thinking)


def test_anthropics_budget(thinking_server: LiveServer) -> None:
    def blocks(**more: Any) -> dict[str, str]:
        body = {"model": "smollm2-135m", "messages": MESSAGES, "max_tokens": 60, "seed": 3, **more}
        content = asked(thinking_server, "/v1/messages", **body)["content"]
        return {block["type"]: block.get("thinking") or block.get("text") for block in content}

    message = asked(thinking_server, **{**CHAT, "ignore_eos": False})["choices"][0]["message"]
    found = blocks(thinking={"type": "enabled", "budget_tokens": 12})
    assert found == {"thinking": message["reasoning"], "text": message["content"]}
    closed = asked(thinking_server, **{**CHAT, "thinking_token_budget": 0, "ignore_eos": False})["choices"][0]
    assert blocks(thinking={"type": "disabled"}) == {"text": closed["message"]["content"]}
    assert list(blocks(thinking={"type": "adaptive"})) == ["thinking"]


def test_ollamas_think(thinking_server: LiveServer) -> None:
    def message(think: Any) -> dict[str, str]:
        options = {"num_predict": 60, "seed": 3}
        body = {"model": "smollm2-135m", "messages": MESSAGES, "options": options, "stream": False, "think": think}
        return asked(thinking_server, "/api/chat", **body)["message"]

    closed = asked(thinking_server, **{**CHAT, "thinking_token_budget": 0, "ignore_eos": False})["choices"][0]
    assert message(False) == {"role": "assistant", "content": closed["message"]["content"]}
    assert message("low")["thinking"] == message(True)["thinking"]  # shorter than its budget
    assert message("low")["content"] == ""


def test_the_effort_of_responses(thinking_server: LiveServer) -> None:
    body = {"input": "Hello", "max_output_tokens": 60, "seed": 3, "reasoning": {"effort": "none"}}
    answer = asked(thinking_server, "/v1/responses", **body)
    closed = asked(thinking_server, **{**CHAT, "thinking_token_budget": 0, "ignore_eos": False})
    (message,) = [item for item in answer["output"] if item["type"] == "message"]
    assert message["content"][0]["text"] == closed["choices"][0]["message"]["content"]
    num_reasoning = closed["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == num_reasoning


R1 = "<think> </think>"
QWEN = "{% if enable_thinking %}<think>{% endif %}</think>"
DEEPSEEK = "{% set thinking = thinking if thinking is defined else false %}</think>"
OSS = (
    "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}"
    "<|channel|>analysis<|message|>"
)


@pytest.mark.parametrize(
    ("thinking", "limits"),
    [  # of R1, QWEN, DEEPSEEK, OSS, and a template without reasoning
        (Thinking(), (None, None, None, None, None)),
        (Thinking(is_on=True), (None, None, None, None, None)),
        (Thinking(is_on=False), (0, None, None, 0, None)),
        (Thinking(effort="none"), (0, None, None, 0, None)),
        (Thinking(effort="low"), (1024, 1024, 1024, None, None)),
        (Thinking(effort="high"), (24_576, 24_576, 24_576, None, None)),
        (Thinking(effort="xhigh"), (None, None, None, None, None)),
        (Thinking(effort="low", budget=7), (7, 7, 7, 7, None)),
        (Thinking(is_on=True, budget=0), (0, 0, 0, 0, None)),
    ],
)
def test_efforts_become_variables_or_budgets(thinking: Thinking, limits: tuple[int | None, ...]) -> None:
    assert tuple(thinking.limit(template) for template in (R1, QWEN, DEEPSEEK, OSS, "{{ messages }}")) == limits
    assert thinking.limit(None) is None


def test_efforts_switch_reasoning_on_and_off() -> None:
    assert Thinking().variables == {}
    off = {"enable_thinking": False, "thinking": False}
    assert Thinking(effort="none").variables == {**off, "reasoning_effort": "none"}
    assert Thinking(is_on=False).variables == off
    assert Thinking(effort="low").variables["enable_thinking"] is True
    assert list(EFFORT_BUDGETS.values()) == sorted(EFFORT_BUDGETS.values())


def test_anthropics_efforts_hold_where_no_budget_is_said() -> None:
    def thinking(**fields: Any) -> Thinking:
        body = {"model": "m", "messages": MESSAGES, "max_tokens": 5, **fields}
        return msgspec.convert(body, MessagesRequest).thinking_asked

    effort = {"output_config": {"effort": "low"}}
    assert thinking(**effort) == Thinking()
    assert thinking(thinking={"type": "adaptive"}, **effort) == Thinking(True, "low")
    assert thinking(thinking={"type": "enabled", "budget_tokens": 9}, **effort) == Thinking(True, "low", 9)
    assert thinking(thinking={"type": "disabled"}, **effort) == Thinking(False)


def test_a_killed_engine_counts_on(thinking_server: LiveServer) -> None:
    """It dies within a thought, and the next one within the closing."""
    expected = asked(thinking_server, **CHAT)["choices"][0]

    async def killed() -> dict[str, Any]:
        async with aiohttp.ClientSession(thinking_server.url) as session:
            task = asyncio.create_task(_post(session, CHAT))
            for number in range(2):
                await asyncio.to_thread(thinking_server.steps.wait_held)
                assert not task.done()
                await asyncio.to_thread(thinking_server.kill_engine)
                if number:
                    thinking_server.steps.release()
                else:
                    thinking_server.steps.hold_next_engine_after(8)
                await asyncio.to_thread(thinking_server.wait_restarts, number + 1)
            return await task

    thinking_server.steps.hold_after(8)
    with contextlib.closing(contextlib.ExitStack()) as cleanup:
        cleanup.callback(thinking_server.steps.release)
        answer = asyncio.run(killed())
    assert answer["choices"][0] == expected


async def _post(session: aiohttp.ClientSession, body: dict[str, Any]) -> dict[str, Any]:
    async with session.post("/v1/chat/completions", json=body) as response:
        return json.loads(await response.read())
