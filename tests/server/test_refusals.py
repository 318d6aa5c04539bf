"""Unknown paths and methods: clients understand the answers."""

import http.client
import json
from collections.abc import Mapping
from typing import Any

from tests.server.live import LiveServer


def ask(server: LiveServer, method: str, path: str, body: bytes = b"") -> tuple[int, Any, Mapping[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", int(server.url.rsplit(":", 1)[1]), timeout=10)
    connection.request(method, path, body)
    response = connection.getresponse()
    text = response.read()
    connection.close()
    return response.status, json.loads(text) if text else None, response.headers


def test_unknown_paths_and_methods_have_openais_shape(fake_server: LiveServer) -> None:
    for method, path, status, kind in (
        ("POST", "/v1/nowhere", 404, "not_found_error"),
        ("GET", "/", 404, "not_found_error"),
        ("POST", "/v1/fine_tuning/jobs", 404, "not_found_error"),
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
            allowed = sorted(headers["Allow"].split(", "))  # of a set, in any order
            assert error["message"].endswith(f"use {', '.join(allowed)}")
