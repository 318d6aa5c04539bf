"""What the server does not have: planned routes, unknown paths, other methods; clients understand each of them."""

import http.client
import json
import time
from collections.abc import Mapping
from typing import Any

import openai
import pytest

from tests.server.live import LiveServer

PLANNED = [
    ("POST", "/v1/responses"),
    ("GET", "/v1/responses/resp_1"),
    ("POST", "/v1/responses/resp_1/cancel"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/files"),
    ("GET", "/v1/files"),
    ("GET", "/v1/files/file-1/content"),
    ("DELETE", "/v1/files/file-1"),
    ("POST", "/v1/batches"),
    ("GET", "/v1/batches/batch_1"),
    ("POST", "/v1/audio/transcriptions"),
    ("POST", "/v1/audio/translations"),
    ("GET", "/dashboard"),
    ("GET", "/trace"),
]


def ask(server: LiveServer, method: str, path: str, body: bytes = b"") -> tuple[int, Any, Mapping[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", int(server.url.rsplit(":", 1)[1]), timeout=10)
    connection.request(method, path, body)
    response = connection.getresponse()
    text = response.read()
    connection.close()
    return response.status, json.loads(text) if text else None, response.headers


@pytest.mark.parametrize(("method", "path"), PLANNED)
def test_planned_routes_answer_501_and_are_not_tried_again(fake_server: LiveServer, method: str, path: str) -> None:
    status, answer, headers = ask(fake_server, method, path, b"--x\r\nnot JSON" if method == "POST" else b"")
    assert status == 501
    assert answer["error"]["type"] == "not_implemented_error"
    assert "not available yet" in answer["error"]["message"]
    assert headers["x-should-retry"] == "false"


def test_the_openai_client_does_not_retry_planned_routes(fake_server: LiveServer) -> None:
    client = openai.OpenAI(base_url=f"{fake_server.url}/v1", api_key="none", max_retries=2)
    marked = {"X-Request-Id": "asks-once"}
    with pytest.raises(openai.InternalServerError, match="not available yet"):
        client.responses.create(model="smollm2-135m", input="x", extra_headers=marked)
    end = time.monotonic() + 5
    while (count := fake_server.log.read_text().count("asks-once")) < 1:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert count == 1


def test_unknown_paths_and_methods_have_openais_shape(fake_server: LiveServer) -> None:
    for method, path, status, kind in (
        ("POST", "/v1/nowhere", 404, "not_found_error"),
        ("GET", "/", 404, "not_found_error"),
        ("GET", "/" + "x" * 5000, 404, "not_found_error"),
        ("GET", "/v1/models/none", 404, "not_found_error"),
        ("GET", "/v1/chat/completions", 405, "invalid_request_error"),
        ("DELETE", "/health", 405, "invalid_request_error"),
        ("POST", "/metrics", 405, "invalid_request_error"),
    ):
        got, answer, headers = ask(fake_server, method, path)
        error = answer["error"]
        assert (got, error["code"], error["type"]) == (status, status, kind), path
        assert set(error) == {"message", "type", "param", "code"}
        assert (method in error["message"] and path[:100] in error["message"]) or error["param"] == "model"
        assert len(error["message"]) < 200
        if status == 405:
            assert headers["Allow"] in error["message"]
