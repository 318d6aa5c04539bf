"""Strings that UTF-8 cannot encode are a 400 wherever they enter, and leave the server as it was."""

import copy
import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.live import LiveServer

LONE = "\ud800"
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"a": {"enum": ["b"]}}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT: dict[str, Any] = {
    "model": "smollm2-135m",
    "messages": [
        {"role": "user", "content": "hi", "name": "n"},
        {"role": "user", "content": [{"type": "text", "text": "t"}]},
        {"role": "assistant", "content": "x", "tool_calls": [CALL]},
        {"role": "tool", "content": "4", "tool_call_id": "c"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "stop": ["a", "b"],
    "bad_words": ["c"],
    "cache_salt": "s",
    "request_id": "r",
    "user": "u",
    "chat_template": "{{ messages[0].content }}",
    "chat_template_kwargs": {"k": {"x": ["v"]}},
    "metadata": {"m": "v"},
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "reasoning_effort": "low",
    "service_tier": "auto",
    "response_format": {"type": "json_schema", "json_schema": {"name": "j"}},
    "structured_outputs": {"choice": ["a"]},
    "logit_bias": {"5": 1},
    "max_tokens": 1,
}
COMPLETION: dict[str, Any] = {
    **{name: CHAT[name] for name in ("model", "stop", "bad_words", "cache_salt", "request_id", "user", "logit_bias")},
    "prompt": ["p", "q"],
    "max_tokens": 1,
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/tokenize": {name: CHAT[name] for name in ("model", "messages", "tools", "chat_template", "chat_template_kwargs")},
    "/detokenize": {"model": "smollm2-135m", "tokens": [1, 2]},
    "/abort_requests": {"request_ids": ["a", "b"]},
}


def spoiled(value: Any) -> Iterator[Any]:
    """Copies of a JSON value, each with a lone surrogate in one of its strings or keys."""
    match value:
        case str():
            yield value + LONE
        case list():
            for index, item in enumerate(value):
                for bad in spoiled(item):
                    yield [*value[:index], bad, *value[index + 1 :]]
        case dict():
            for key, item in value.items():
                for bad in spoiled(item):
                    yield {**value, key: bad}
            yield {**value, "x" + LONE: 1}
        case _:
            pass


@pytest.mark.parametrize("path", BODIES)
def test_every_string_of_every_route(fake_server: LiveServer, path: str) -> None:
    before = fake_server.wait_idle()
    num_bodies = 0
    for body in spoiled(copy.deepcopy(BODIES[path])):
        status, answer = fake_server.post(path, body)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error"), body
        assert "half of a surrogate pair" in answer["error"]["message"]
        num_bodies += 1
    assert num_bodies >= 2
    after = fake_server.wait_idle()
    assert after["engine_restarts"] == before["engine_restarts"]


def test_the_fifty_bytes_that_ended_the_server(fake_server: LiveServer) -> None:
    for stop in (rb'"\ud800"', rb'["\udfff"]', b'"\xed\xa0\x80"', b'"\xff"'):
        status, answer = fake_server.post("/v1/completions", b'{"prompt":"hi","max_tokens":2,"stop":' + stop + b"}")
        assert (status, answer["error"]["code"]) == (400, 400)
    assert fake_server.wait_idle()["live_tokens"] == 0
    assert fake_server.post("/v1/completions", {"prompt": "hi", "max_tokens": 2, "stop": "\U0001f600"})[0] == 200


def raw(server: LiveServer, method: str, path: bytes, headers: dict[str, bytes], body: bytes = b"") -> int:
    connection = http.client.HTTPConnection("127.0.0.1", int(server.url.rsplit(":", 1)[1]), timeout=10)
    connection._http_vsn_str = "HTTP/1.1"  # type: ignore[attr-defined]
    connection.connect()
    assert connection.sock is not None
    lines = [method.encode() + b" " + path + b" HTTP/1.1", b"Host: x", b"Content-Length: %d" % len(body)]
    lines += [name.encode() + b": " + value for name, value in headers.items()]
    connection.sock.sendall(b"\r\n".join(lines) + b"\r\n\r\n" + body)
    response = http.client.HTTPResponse(connection.sock)
    response.begin()
    connection.close()
    return response.status


def test_headers_paths_and_queries_of_any_bytes(fake_server: LiveServer) -> None:
    body = json.dumps({"prompt": "hi", "max_tokens": 2}).encode()
    plain = {"Content-Type": b"application/json"}
    for name in ("X-Request-Id", "Authorization", "User-Agent", "X-Other", "Accept", "Cookie"):
        for value in (b"\xff\xfe", b"\xed\xa0\x80", "é\u4e00".encode(), b"\\ud800"):
            assert raw(fake_server, "POST", b"/v1/completions", {**plain, name: value}, body) == 200, (name, value)
    assert raw(fake_server, "POST", b"/v1/completions", {"Content-Type": b"application/\xff"}, body) == 400
    for path in (b"/v1/models/%ff%fe", b"/v1/models/%ed%a0%80", b"/%00", b"/v1/models/\xff"):
        assert raw(fake_server, "GET", path, {}) in (400, 404)
    assert raw(fake_server, "POST", b"/reset_prefix_cache?reset_running_requests=%ff", {}) in (400, 422)
    fake_server.wait_idle()
