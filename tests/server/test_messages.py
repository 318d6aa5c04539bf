"""Anthropic's API: the anthropic package, the order of events, and how conversations reach the template."""

import asyncio
import functools
import json
import random
import re
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from starlette.types import Message

from pagoda.base.errors import RequestError
from pagoda.base.request_limits import RequestLimits
from pagoda.base.text import encodable_json
from pagoda.server.body_reader import parse_body
from pagoda.server.dialects.messages.bodies import CountTokensRequest, MessagesRequest, conversation_of
from pagoda.server.dialects.messages.dialect import MessagesDialect, MessageWriter
from pagoda.server.errors import ApiError
from pagoda.server.request_state import RequestState
from pagoda.server.sending import EventStream
from tests.server.in_process import served
from tests.server.live import LiveServer
from tests.server.random_turns import events_of, new_reader, piece, random_text, random_turn, turn_of
from tests.server.test_tools import SAID, THINKING, scripted_server

PYTHON = Path(f"{sys.prefix}-clients") / "bin" / "python"
SCRIPT = Path(__file__).parent / "client_scripts" / "anthropic_client.py"


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with scripted_server(tmp_path_factory.mktemp("messages"), THINKING) as server:
        yield server


@pytest.fixture(scope="module")
def saw(thinking: LiveServer) -> dict[str, Any]:
    """What the anthropic package has seen."""
    if not PYTHON.exists():
        pytest.skip(f"no {PYTHON}; install it with: make .venv-clients/.installed")
    done = subprocess.run([str(PYTHON), str(SCRIPT), thinking.url], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen


def test_the_anthropic_package_sees_the_same_whole_and_streamed(saw: dict[str, Any]) -> None:
    for name in ("calls", "thought", "hidden", "text", "cut", "stopped", "forced", "one"):
        whole, streamed = saw[name]
        for block in (*whole["content"], *streamed["content"]):
            block.pop("signature", None)
        assert whole == streamed, name
    place = {"city": "Zürich", "days": 2}
    call = {"type": "tool_use", "name": "weather", "input": place}
    thought = {"type": "thinking", "thinking": "Where? 2 < 3, so Zürich.\n"}
    text = {"type": "text", "text": SAID[3]}
    assert saw["calls"][0]["content"] == [
        {"type": "text", "text": "Let me look."},
        call,
        {**call, "input": {**place, "city": "Bern"}},
    ]
    assert saw["calls"][0]["stop"] == ["tool_use", None]
    assert saw["one"][0]["content"] == [{"type": "text", "text": "Let me look."}, call]
    assert saw["thought"][0]["content"] == [thought, call]
    assert saw["hidden"][0]["content"] == [call]
    assert (saw["text"][0]["content"], saw["text"][0]["stop"]) == ([text], ["end_turn", None])
    assert (saw["cut"][0]["stop"], saw["cut"][0]["output"]) == (["max_tokens", None], 4)
    assert saw["stopped"][0]["stop"] == ["stop_sequence", "needed"]


def test_an_agent_of_the_anthropic_package_goes_on_after_its_calls(saw: dict[str, Any]) -> None:
    num_calls, second, num_cached = saw["agent"]
    assert num_calls == 2
    assert second["content"] == [{"type": "text", "text": SAID[3]}]
    assert num_cached > 0
    assert saw["counted"][0] == saw["counted"][1]
    assert (saw["models"], saw["model"]) == (["smollm2-135m"], "smollm2-135m")


def test_errors_of_the_anthropic_package_name_its_own_fields(saw: dict[str, Any]) -> None:
    refused = {"model": (404, "not_found_error", "unknown model 'other'"), "temperature": (400, None, "temperature")}
    refused |= {
        "stop": (400, None, "stop_sequences"),
        "block": (400, None, "messages[0].content[0]: this server does not support blocks of type 'video'"),
        "image": (400, None, "messages[0]"),
        "schema": (400, None, "tools[1].input_schema: at /properties/a/uniqueItems"),
    }
    for name, (status, kind, text) in refused.items():
        given, shape, given_kind, message = saw["errors"][name]
        assert (given, shape, given_kind) == (status, "error", kind or "invalid_request_error"), name
        assert text in message, name


def body_of(kind: Any = MessagesRequest, **fields: Any) -> Any:
    given = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}], **fields}
    return parse_body(msgspec.json.encode(given), kind, RequestLimits())


def messages_of(*messages: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    return conversation_of(body_of(CountTokensRequest, messages=list(messages), **fields))[0].messages


def block(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


IMAGE = block("image", source={"type": "base64", "media_type": "image/png", "data": "AAAA"})


def test_results_of_tools_come_before_what_the_user_says_and_their_images_with_it() -> None:
    results = [
        block("tool_result", tool_use_id="a", content=[block("text", text="rain"), IMAGE]),
        block("tool_result", tool_use_id="b", content="sun"),
        block("text", text="And now?"),
    ]
    call = block("tool_use", id="a", name="f", input={"x": "ü"})
    turns = messages_of(
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [block("thinking", thinking="Hm", signature="s"), call]},
        {"role": "user", "content": results},
    )
    assert turns[1]["reasoning_content"] == "Hm"
    assert turns[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": "ü"}'}
    assert turns[2:] == [
        {"role": "tool", "tool_call_id": "a", "content": "rain"},
        {"role": "tool", "tool_call_id": "b", "content": "sun"},
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
                {"type": "text", "text": "And now?"},
            ],
        },
    ]


def test_documents_are_their_texts_and_images_and_a_pdf_is_refused_by_name() -> None:
    def document(**source: Any) -> dict[str, Any]:
        return block("document", title="T", source=source)

    parts = [document(type="text", media_type="text/plain", data="one "), document(type="content", content="two ")]
    parts.append(document(type="content", content=[block("text", text="three"), IMAGE]))
    texts = messages_of({"role": "user", "content": parts})
    assert [part.get("text") for part in texts[0]["content"]] == ["one ", "two ", "three", None]
    (_, result) = messages_of(
        {"role": "assistant", "content": [block("tool_use", id="a", name="f", input={})]},
        {"role": "user", "content": [block("tool_result", tool_use_id="a", content=[parts[1], parts[0]])]},
    )
    assert result["content"] == "two \none "
    for source, said in (
        ({"type": "base64", "media_type": "application/pdf", "data": "AAAA"}, "PDF documents are not read; send"),
        ({"type": "url", "url": "http://a/b.pdf"}, "PDF documents are not read"),
        ({"type": "content", "content": [1]}, "source.content: expected a text or a list of blocks"),
        ({"type": "text", "data": None}, "source.data: expected a text"),
        ({"type": "file", "file_id": "f"}, "type 'document' with a source of type 'file'"),
    ):
        with pytest.raises(RequestError, match=re.escape(said)) as refused:
            messages_of({"role": "user", "content": [document(**source)]})
        assert str(refused.value).startswith("messages[0].content[0]")


def test_the_number_in_a_billing_header_does_not_reach_the_prompt() -> None:
    for nonce in ("1a", "2b"):
        header = f"x-anthropic-billing-header: cc_version=2; cch={nonce};"
        for system in ([block("text", text=header), block("text", text="Be short.")], f"{header}\nBe short."):
            (first, _) = messages_of({"role": "user", "content": "Hi"}, system=system)
            assert first == {"role": "system", "content": "Be short."}


def test_a_system_message_in_mid_conversation_is_a_marked_part_of_the_users_turn() -> None:
    turns = messages_of(
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Go on"},
    )
    assert [turn["role"] for turn in turns] == ["user", "assistant", "user"]
    assert "".join(part["text"] for part in turns[2]["content"]) == "<system>\nBe short.\n</system>\nGo on"


def test_the_answer_continues_a_last_message_of_the_assistant() -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well,"}]
    assert conversation_of(body_of(messages=turns))[0].continue_final_message
    assert not conversation_of(body_of())[0].continue_final_message


def test_messages_of_the_assistant_that_follow_each_other_are_one() -> None:
    """A client sends back the beginning that it gave, or that was paused, and the answer that continued it."""
    _, answer, _ = messages_of(
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [block("thinking", thinking="Hm"), block("text", text="It ra")]},
        {"role": "assistant", "content": "ins."},
        {"role": "assistant", "content": [block("tool_use", id="a", name="f", input={})]},
        {"role": "user", "content": "And now?"},
    )
    assert (answer["content"], answer["reasoning_content"]) == ("It rains.", "Hm")
    assert [call["function"]["name"] for call in answer["tool_calls"]] == ["f"]
    with pytest.raises(RequestError, match=r"messages\[1\].content\[0\]: expected a text block"):
        messages_of({"role": "assistant", "content": "a"}, {"role": "assistant", "content": [block("image")]})


def test_keys_of_either_header_open_the_server(keyed_server: LiveServer) -> None:
    asked = {"model": "smollm2-135m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    headers: Any
    for headers in ({"x-api-key": "one"}, {"Authorization": "Bearer two"}, {"x-api-key": "two", "Authorization": "x"}):
        assert keyed_server.post("/v1/messages?beta=true", asked, **headers)[0] == 200
    for headers in ({}, {"x-api-key": "three"}, {"Authorization": "Basic one"}):
        status, answer = keyed_server.post("/v1/messages", asked, **headers)
        assert (status, answer["type"], answer["error"]["type"]) == (401, "error", "authentication_error")


def test_a_role_is_one_of_three() -> None:
    with pytest.raises(RequestError, match=r"messages\[0\].role: expected 'user', 'assistant' or 'system', got 'tool'"):
        messages_of({"role": "tool", "content": "Hi"})


def test_clients_of_this_api_get_its_errors_from_every_route() -> None:
    async def test(http: httpx.AsyncClient) -> None:
        missing = {"/v1/models/other": 404, "/v1/messages/batches": 404, "/v1/chat/completions": 405}
        for path, status in missing.items():
            answer = await http.get(path, headers={"anthropic-version": "2023-06-01"})
            assert (answer.status_code, answer.json()["type"], answer.json()["error"].keys()) == (
                status,
                "error",
                {"type", "message"},
            )
            assert "code" in (await http.get(path)).json()["error"]

    served(test)


def test_an_answer_may_be_asked_for_that_is_longer_than_the_context(fake_server: LiveServer) -> None:
    """Claude Code asks every model for 32,000 tokens."""
    asked = {"model": "smollm2-135m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 32_000}
    status, answer = fake_server.post("/v1/messages", asked)
    assert status == 200, answer
    assert answer["stop_reason"] in ("end_turn", "model_context_window_exceeded")


def test_a_prompt_that_is_too_long_is_called_that(fake_server: LiveServer) -> None:
    """Claude Code says so to its user, where it knows the words."""
    for text, sizes in (("word " * 2100, r"2\d\d\d tokens > 2048"), ("word " * 90_000, "2048 tokens > 2047")):
        asked = {"model": "smollm2-135m", "messages": [{"role": "user", "content": text}], "max_tokens": 2}
        status, answer = fake_server.post("/v1/messages", asked)
        said = answer["error"]["message"]
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
        assert re.match(rf"prompt is too long: {sizes} maximum\. .*Please reduce the length", said), said


# ---- the order of events


DELTAS = {"text": {"text_delta"}, "thinking": {"thinking_delta", "signature_delta"}, "tool_use": {"input_json_delta"}}


def checked(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The content that events make; fails if they are not in their order, or if two blocks are open."""
    begin, *inner, delta, end = events
    assert (begin["type"], delta["type"], end["type"]) == ("message_start", "message_delta", "message_stop")
    assert begin["message"]["usage"]["input_tokens"] == 3
    content: list[dict[str, Any]] = []
    arguments, is_open = "", False
    for event in inner:
        if event["type"] == "content_block_start":
            assert not is_open
            assert event["index"] == len(content)
            content.append(event["content_block"])
            arguments, is_open = "", True
            continue
        assert is_open
        assert event["index"] == len(content) - 1
        last = content[-1]
        if event["type"] == "content_block_delta":
            given = dict(event["delta"])
            assert given.pop("type") in DELTAS[last["type"]]
            for name, value in given.items():
                if name == "partial_json":
                    arguments += value
                else:
                    last[name] += value
            continue
        assert event["type"] == "content_block_stop"
        is_open = False
        if last["type"] == "tool_use":
            last["input"] = encodable_json(arguments)
        if last["type"] == "thinking":
            assert last["signature"]
    assert not is_open
    return content


def test_events_of_random_turns_are_in_their_order_and_make_the_whole_answer() -> None:
    dice = random.Random(7)
    kinds: set[str] = set()
    for number in range(200):
        body = body_of(thinking={"type": dice.choice(["enabled", "disabled"])})
        text = random_text(dice)
        new_answer = functools.partial(MessagesDialect().answer, body, turn_of(), turn_of())
        reason, events, whole = random_turn(dice, new_answer, text, reasons=("stop", "length"))
        content = checked(events)
        for one in (*content, *whole["content"]):
            one.pop("id", None)
        assert whole["content"] == content, (number, text)
        assert (whole["stop_reason"] == "tool_use") == (
            reason == "stop" and any(one["type"] == "tool_use" for one in content)
        )
        kinds |= {one["type"] for one in content}
    assert kinds == set(DELTAS)


def test_a_turn_without_any_output_has_a_beginning_and_an_end() -> None:
    answer = MessagesDialect().answer(body_of(), turn_of(), turn_of())
    assert checked(events_of(answer.opening() + answer.closing())) == []


def test_an_answer_that_was_aborted_keeps_its_text_and_does_not_look_complete() -> None:
    stream, empty, whole = (MessagesDialect().answer(body_of(), turn_of(), turn_of()) for _ in range(3))
    stream.frames(piece(new_reader(), "so far", "abort"))
    with pytest.raises(ApiError, match="the request was aborted"):
        stream.closing()
    with pytest.raises(ApiError, match="the request was aborted"):
        empty.whole([piece(new_reader(), "", "abort")])
    answer = whole.whole([piece(new_reader(), "so far", "abort")])
    assert (answer.stop_reason, answer.stop_sequence) == ("pause_turn", None)
    assert msgspec.to_builtins(answer.content) == [{"type": "text", "text": "so far"}]


def test_half_a_character_in_the_arguments_of_a_call_is_replaced() -> None:
    text = r'<tool_call>{"name": "f", "arguments": {"a": ["\ud83d b", "\ud83d\ude00"]}}</tool_call>'
    whole = MessagesDialect().answer(body_of(), turn_of(), turn_of()).whole([piece(new_reader(), text, "stop")])
    assert msgspec.json.decode(msgspec.json.encode(whole))["content"][0]["input"] == {"a": ["\ufffd b", "\U0001f600"]}


def test_the_id_of_the_previous_message_is_bounded() -> None:
    with pytest.raises(RequestError, match=r"^diagnostics.previous_message_id: 300 characters"):
        body_of(diagnostics={"previous_message_id": "m" * 300})


def test_an_error_during_a_stream_is_the_last_event() -> None:
    sent: list[bytes] = []

    async def events() -> AsyncGenerator[bytes, None]:
        yield b""
        raise ApiError(503, "the engine is gone")

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message.get("body", b""))

    stream = EventStream(events(), lambda: None, MessageWriter.framing)
    asyncio.run(stream({"type": "http", "state": RequestState("r")}, receive, send))
    (last,) = events_of(b"".join(sent))
    assert last == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "the engine is gone"},
        "request_id": "r",
    }
