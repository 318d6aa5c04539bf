"""The next turn costs its new tokens alone: what was sampled is found again, through the whole server."""

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import openai
import pytest

from pagoda.server.dialects.messages.bodies import InputMessage, ToolParam
from pagoda.server.dialects.messages.cache_diagnosis import digest
from tests.engine.inputs.test_sampled_messages import TEMPLATE
from tests.server.live import LiveServer
from tests.server.test_tools import TOOLS, scripted_server

BLOCK = 16
LONG = "Plan a week of walks around the lake, with the weather of each day and what to bring along. " * 4


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    keys = ("--api-key", "one", "--api-key", "two")
    with scripted_server(tmp_path_factory.mktemp("history"), TEMPLATE, *keys) as server:
        yield server


def chat(server: LiveServer, messages: list[Any], seed: int, key: str = "one", **more: Any) -> tuple[Any, int, int]:
    """The message, and how many tokens its prompt has, and how many of them were cached."""
    body = {"model": "smollm2-135m", "messages": messages, "seed": seed, "tools": TOOLS, **more}
    status, answer = server.post("/v1/chat/completions", body, Authorization=f"Bearer {key}")
    assert status == 200, answer
    usage = answer["usage"]
    return answer["choices"][0]["message"], usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def reordered(message: dict[str, Any]) -> dict[str, Any]:
    """A message as many clients send it back: without white space at the ends, and with JSON of their own."""
    sent = {"role": "assistant", "content": (message.get("content") or "").strip()}
    if message.get("reasoning_content"):
        sent["reasoning_content"] = message["reasoning_content"].strip()
    for call in message.get("tool_calls") or ():
        arguments = json.loads(call["function"]["arguments"])
        written = json.dumps(dict(reversed(arguments.items())), separators=(",", ":"))
        sent.setdefault("tool_calls", []).append({**call, "function": {"name": "weather", "arguments": written}})
    return sent


NUMBERS = itertools.count()


def begin(text: str = LONG) -> list[Any]:
    """A conversation that no other test has."""
    return [{"role": "user", "content": f"{next(NUMBERS)}: {text}"}]


def after(messages: list[Any], message: dict[str, Any], text: str = LONG) -> list[Any]:
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "rain"} for call in message.get("tool_calls") or ()
    ]
    return [*messages, message, *results, {"role": "user", "content": text}]


def least(num_prompt_tokens: int, num_output_tokens: int) -> int:
    """How many tokens of the next prompt are cached if all of this turn is used: full blocks without the last token."""
    return (num_prompt_tokens + num_output_tokens - 1) // BLOCK * BLOCK


def test_calls_that_come_back_in_other_json_cost_nothing(server: LiveServer) -> None:
    messages = begin()
    for _ in range(3):
        body = {"model": "smollm2-135m", "messages": messages, "seed": 0, "tools": TOOLS}
        answer = server.post("/v1/chat/completions", body, Authorization="Bearer one")[1]
        usage = answer["usage"]
        messages = after(messages, reordered(answer["choices"][0]["message"]))
        _, _, num_cached = chat(server, messages, 0)
        assert num_cached >= least(usage["prompt_tokens"], usage["completion_tokens"])


def test_thoughts_in_anthropics_api_cost_nothing_either(server: LiveServer) -> None:
    tools = [{"name": "weather", "input_schema": {"type": "object"}}]
    first = {"role": "user", "content": f"{next(NUMBERS)}: {LONG}"}
    common = {"model": "smollm2-135m", "max_tokens": 200, "seed": 2, "tools": tools}
    common["thinking"] = {"type": "enabled", "budget_tokens": 100}
    key = {"Authorization": "Bearer two"}
    answer = server.post("/v1/messages", {**common, "messages": [first]}, **key)[1]
    thought, call = answer["content"]
    assert (thought["type"], call["type"]) == ("thinking", "tool_use")
    sent = [
        {**thought, "thinking": thought["thinking"].strip()},
        {**call, "input": dict(reversed(call["input"].items()))},
    ]
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call["id"], "content": "rain"}]}
    body = {**common, "messages": [first, {"role": "assistant", "content": sent}, result]}
    counted = server.post("/v1/messages/count_tokens", {**body, "max_tokens": None}, **key)[1]["input_tokens"]
    usage, second = answer["usage"], server.post("/v1/messages", body, **key)[1]["usage"]
    assert second["cache_read_input_tokens"] >= least(usage["input_tokens"], usage["output_tokens"])
    assert counted == second["input_tokens"] + second["cache_read_input_tokens"]


def test_what_responses_encrypt_is_what_was_sampled(server: LiveServer) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="one", max_retries=0)
    tools: Any = [{"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}]
    items: list[Any] = begin()
    asked: Any = {"model": "smollm2-135m", "tools": tools, "extra_body": {"seed": 2}, "reasoning": {"effort": "high"}}
    asked["include"] = ["reasoning.encrypted_content"]
    *_, last = client.responses.create(input=items, stream=True, **asked)
    assert last.type == "response.completed"
    thought, call = last.response.output
    assert (thought.type, call.type) == ("reasoning", "function_call")
    assert len(thought.encrypted_content or "") > 40
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    items += [thought.model_dump(), {**call.model_dump(), "arguments": ' {"days":2, "city": "Zürich"}'}, result]
    usage, second = last.response.usage, client.responses.create(input=items, **asked).usage
    assert usage is not None
    assert second is not None
    assert second.input_tokens_details.cached_tokens >= least(usage.input_tokens, usage.output_tokens)


def test_a_mark_that_moves_is_no_change_of_a_message() -> None:
    """Clients put `cache_control` at another block in each turn; it changes no token."""
    mark = {"cache_control": {"type": "ephemeral"}}
    block = {"type": "text", "text": "Why?"}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "4"}
    alike: list[tuple[type, list[dict[str, Any]]]] = [
        (InputMessage, [{"role": "user", "content": content} for content in ("Why?", [block], [block | mark])]),
        (InputMessage, [{"role": "user", "content": [one]} for one in (result, result | mark | {"content": [block]})]),
        (ToolParam, [{"name": "weather", "input_schema": {}}, {"name": "weather", "input_schema": {}, **mark}]),
    ]
    alike[1][1][1]["content"][0]["content"][0] = {"type": "text", "text": "4", **mark}
    for kind, written in alike:
        assert len({digest(msgspec.convert(one, kind)) for one in written}) == 1
    tools = [{"name": "x", "input_schema": {"properties": properties}} for properties in ({}, mark)]
    assert len({digest(msgspec.convert(tool, ToolParam)) for tool in tools}) == 2  # an argument of this name


def test_anthropics_diagnostics_say_what_has_changed(server: LiveServer) -> None:
    key = {"Authorization": "Bearer one"}
    body: dict[str, Any] = {"model": "smollm2-135m", "max_tokens": 100, "seed": 3, "system": LONG}
    body["tools"] = [{"name": "weather", "input_schema": {"type": "object"}}]

    def ask(previous: str | None, **changed: Any) -> dict[str, Any]:
        asked = {**body, **changed, "diagnostics": {"previous_message_id": previous}}
        return server.post("/v1/messages", asked, **key)[1]

    body["messages"] = begin()
    first = ask(None)
    assert first["diagnostics"] is None
    assert "diagnostics" not in server.post("/v1/messages", body, **key)[1]
    body["messages"] += [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": "Why?"}]
    assert ask(first["id"])["diagnostics"] is None
    assert ask("msg_1")["diagnostics"] == {"cache_miss_reason": {"type": "previous_message_not_found"}}
    other_tools = [{"name": "other", "input_schema": {"type": "object"}}]
    other_messages = [{"role": "user", "content": "Other"}, *body["messages"][1:]]
    for kind, changed in (
        ("system_changed", {"system": "Other."}),
        ("tools_changed", {"tools": other_tools}),
        ("messages_changed", {"messages": other_messages}),
        ("messages_changed", {"messages": other_messages[:1]}),
    ):
        answer = ask(first["id"], **changed)
        reason = answer["diagnostics"]["cache_miss_reason"]
        assert reason["type"] == kind
        assert (reason["cache_missed_input_tokens"] > 50) is (len(changed.get("messages", [1, 2, 3])) == 3)
    log = server.log.read_text()
    changed = re.escape(f"compared with {first['id']!r}: messages_changed, messages[0]; it differs from ")
    told = re.search(rf"{changed}\S+ from token \d+ on \(block \d+\): '\w+' here, '\w+' there, after '(.+)'", log)
    assert told is not None, log
    assert told[1].endswith("user\\n")


def test_what_was_changed_is_not_taken_from_the_history(server: LiveServer) -> None:
    messages = begin()
    message, num_prompt, _ = chat(server, messages, 0)
    for changed in (
        {**reordered(message), "content": "Let me think."},
        {**reordered(message), "tool_calls": reordered(message)["tool_calls"][:1]},
        {"role": "assistant", "content": "No."},
    ):
        _, _, num_cached = chat(server, after(messages, changed), 0)
        assert num_cached <= num_prompt + 4


def test_other_keys_have_another_history(server: LiveServer) -> None:
    messages = begin()
    message, _, _ = chat(server, messages, 0)
    shapes = [chat(server, after(messages, reordered(message)), 3, key)[1] for key in ("one", "two", "two")]
    assert shapes[0] != shapes[1] == shapes[2]  # the second key's prompt has the template's own tokens


def test_a_continued_message_is_one(server: LiveServer) -> None:
    messages = [*begin(), {"role": "assistant", "content": "No <tool"}]
    message, num_prompt, _ = chat(server, messages, 3, add_generation_prompt=False, continue_final_message=True)
    whole = {"role": "assistant", "content": "No <tool" + message["content"]}
    _, _, num_cached = chat(server, after(messages[:1], whole), 3)
    assert num_cached >= least(num_prompt, 0)


def test_a_prompt_of_sampled_tokens_has_the_answer_of_these_tokens(real_server: LiveServer) -> None:
    """What was cached is what a new engine would compute of the same ids."""
    body: dict[str, Any] = {"messages": begin("Name three cities."), "max_tokens": 24, "temperature": 1, "seed": 5}
    body |= {"return_token_ids": True, "min_p": 0.0}
    first = real_server.post("/v1/chat/completions", body)[1]
    choice = first["choices"][0]
    body["messages"] = after(
        body["messages"], {**choice["message"], "content": choice["message"]["content"] + " "}, "Why?"
    )
    second = real_server.post("/v1/chat/completions", body)[1]
    ids, before = second["prompt_token_ids"], [*first["prompt_token_ids"], *choice["token_ids"]]
    assert ids[: len(before)] == before
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= least(len(before), 0)
    asked = {name: body[name] for name in ("max_tokens", "temperature", "seed", "return_token_ids", "min_p")}
    again = real_server.post("/v1/completions", {**asked, "prompt": ids, "cache_salt": "none of this is cached"})[1]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["choices"][0]["token_ids"] == second["choices"][0]["token_ids"]
