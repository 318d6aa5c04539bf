"""Streams of random turns in OpenAI's and Ollama's APIs: their order, and that they make the whole answer.

Those of Anthropic's API and of OpenAI's Responses are in test_messages.py and test_responses.py.
"""

import functools
import json
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
from msgspec import UNSET

from pagoda.base.request_limits import RequestLimits
from pagoda.base.server_config import ServerConfig
from pagoda.server.body_reader import parse_body
from pagoda.server.dialects.ollama.dialect import CHAT as OLLAMA_CHAT
from pagoda.server.dialects.ollama.dialect import GENERATE
from pagoda.server.dialects.openai.chat import CHAT
from pagoda.server.dialects.openai.completions import COMPLETIONS
from tests.server.random_turns import Events, random_text, random_turn, turn_of
from tests.server.turn_apis import BODIES, Turn, asked, events_of

NUM_TURNS = 200
STATE: Any = SimpleNamespace(writes_ids=lambda _: False, config=ServerConfig())


def turns(
    path: str,
    dialect: Any,
    choices: Callable[[random.Random], dict[str, Any]],
    check: Any,
    make_text: Callable[[random.Random], str] = random_text,
) -> set[str]:
    """Check random turns in a dialect; return what they consisted of.

    choices: fields of the body.   check: of the reason of the end, the events, the whole answer and the fields.
    """
    dice, turn = random.Random(7), turn_of()
    turn.generation.requests = [None]
    turn.generation.arrived_s = 0.0
    turn.generation.figures = SimpleNamespace(prefill_ms=UNSET, decode_ms=1.0)
    seen: set[str] = set()
    for _ in range(NUM_TURNS):
        fields = choices(dice)
        data = msgspec.json.encode({**asked(path, Turn("Hi", 9), stream=True), **fields})
        body = parse_body(data, BODIES[path], RequestLimits())
        new_answer = functools.partial(dialect.answer, body, turn, STATE)
        reason, events, whole = random_turn(dice, new_answer, make_text(dice), events_of)
        seen |= check(reason, events, whole, fields)
    return seen


def test_chunks_of_a_chat_begin_with_the_role_and_end_with_the_reason() -> None:
    def choices(dice: random.Random) -> dict[str, Any]:
        usage = dice.random() < 0.5
        shown = {"include_reasoning": dice.random() < 0.5, "echo": dice.random() < 0.2}
        return {**shown, "stream_options": {"include_usage": usage}}

    def check(reason: str, events: Events, whole: dict[str, Any], fields: dict[str, Any]) -> set[str]:
        if fields["stream_options"]["include_usage"]:
            *events, last = events
            assert (last["choices"], last["usage"]) == ([], whole["usage"])
        first, *deltas = [event["choices"][0] for event in events]
        echoed = "Hi" if fields["echo"] else ""
        assert first["delta"] == {"role": "assistant", "content": echoed}
        assert [one["finish_reason"] is None for one in (first, *deltas)] == [True] * len(deltas) + [False]
        said: dict[str, str] = {"content": echoed, "reasoning": "", "reasoning_content": ""}
        calls: list[dict[str, Any]] = []
        for delta in (one["delta"] for one in deltas):
            assert delta.keys() <= {*said, "tool_calls"}
            assert not ("reasoning" in delta and (said["content"] != echoed or calls)), (
                "a thought after the answer has begun"
            )
            for name in said.keys() & delta.keys():
                said[name] += delta[name]
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(calls):
                    calls.append({"type": call["type"], "name": call["function"]["name"], "arguments": ""})
                    assert call["id"]
                else:
                    assert call["index"] == len(calls) - 1, "pieces of two calls take turns"
                    assert call.keys() == {"index", "function"}
                calls[-1]["arguments"] += call["function"]["arguments"]
        (choice,) = whole["choices"]
        message = choice["message"]
        assert {name: message[name] or "" for name in said} == said
        assert said["reasoning"] == said["reasoning_content"]
        assert fields["include_reasoning"] or not said["reasoning"]
        given = [{"type": one["type"], **one["function"]} for one in message.get("tool_calls", ())]
        assert given == calls
        assert all(isinstance(json.loads(one["arguments"]), dict) for one in calls)
        expected = "tool_calls" if calls and reason == "stop" else reason
        assert deltas[-1]["finish_reason"] == choice["finish_reason"] == expected
        return {name for name, text in {**said, "calls": calls}.items() if text}

    seen = turns("/v1/chat/completions", CHAT, choices, check)
    assert seen == {"content", "reasoning", "reasoning_content", "calls"}


def test_chunks_of_a_completion_are_its_text() -> None:
    def check(reason: str, events: Events, whole: dict[str, Any], fields: dict[str, Any]) -> set[str]:
        chunks = [event["choices"][0] for event in events]
        (choice,) = whole["choices"]
        assert "".join(one["text"] for one in chunks) == choice["text"]
        assert [one["finish_reason"] for one in chunks] == [None] * (len(chunks) - 1) + [reason]
        assert choice["finish_reason"] == reason
        return {reason}

    assert turns("/v1/completions", COMPLETIONS, lambda _: {}, check) == {"stop", "length", "abort"}


def check_lines(reason: str, lines: Events, whole: dict[str, Any], fields: dict[str, Any]) -> set[str]:
    """Check lines of Ollama's API: the last has no text, but the reason and the counts."""
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert all("done_reason" not in line for line in lines[:-1])
    assert lines[-1]["done_reason"] == whole["done_reason"] == reason
    for name in ("eval_count", "prompt_eval_count", "eval_duration", "prompt_eval_duration", "load_duration"):
        assert lines[-1][name] == whole[name]
    text_name = "content" if "message" in whole else "response"
    *parts, last, one = [line.get("message", line) for line in (*lines, whole)]
    assert (last[text_name], "thinking" in last) == ("", False)
    assert [part for part in parts if not (part[text_name] or part.get("thinking") or part.get("tool_calls"))] == []
    for name in (text_name, "thinking"):
        assert "".join(part.get(name, "") for part in parts) == one.get(name, "")
    calls = [
        [(call["index"], call["function"]) for part in some for call in part.get("tool_calls", ())]
        for some in ([*parts, last], [one])
    ]
    assert calls[0] == calls[1]
    assert [index for index, _ in calls[0]] == list(range(len(calls[0])))
    assert fields["think"] is not False or "thinking" not in one
    return {name for name in ("content", "response", "thinking", "tool_calls") if one.get(name)}


def choose_thinking(dice: random.Random) -> dict[str, Any]:
    return {"think": dice.choice([False, None])}


def test_lines_of_an_ollama_chat_end_with_the_counts() -> None:
    assert turns("/api/chat", OLLAMA_CHAT, choose_thinking, check_lines) == {"content", "thinking", "tool_calls"}


def test_lines_of_an_ollama_text_end_with_the_counts() -> None:
    def without_calls(dice: random.Random) -> str:
        return random_text(dice).replace("<tool_call>", "")

    seen = turns("/api/generate", GENERATE, choose_thinking, check_lines, without_calls)
    assert seen == {"response", "thinking"}
