"""Real answers of every route are what the OpenAPI page describes: no field more, none of another type."""

import json
import re
import urllib.error
import urllib.request
from typing import Any

import httpx
import jsonschema
import pytest

from tests.server.live import LiveServer

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "seed": 1}
TEXT = {"prompt": "Once upon a time", "max_tokens": 8, "seed": 1}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
EVERYTHING = {"return_token_ids": True, "return_timings": True, "prompt_logprobs": 1, "n": 2, "temperature": 1.0}
USAGE = {"include_usage": True, "continuous_usage_stats": True}
CHUNKS = {
    "/v1/completions": "CompletionChunk",
    "/v1/chat/completions": "ChatCompletionChunk",
    "/v1/messages": "MessageEvent",
    "/v1/responses": "ResponseEvent",
}
MESSAGES = {**CHAT, "model": "smollm2-135m"}

REQUESTS: tuple[tuple[str, str, dict[str, Any] | None], ...] = (
    ("GET", "/health", None),
    ("GET", "/livez", None),
    ("GET", "/readyz", None),
    ("GET", "/ping", None),
    ("GET", "/version", None),
    ("GET", "/load", None),
    ("GET", "/metrics", None),
    ("GET", "/requests", None),
    ("GET", "/requests/{id}", None),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/{name}", None),
    ("GET", "/models", None),
    ("GET", "/props", None),
    ("GET", "/slots", None),
    ("GET", "/api/v0/models", None),
    ("GET", "/api/v0/models/{name}", None),
    ("GET", "/api/v1/models", None),
    ("GET", "/tokenizer_info", None),
    ("POST", "/tokenize", {"prompt": "Once upon a time"}),
    ("POST", "/tokenize", {"messages": CHAT["messages"], "return_token_strs": True}),
    ("POST", "/detokenize", {"tokens": [5, 6, 7]}),
    ("POST", "/abort_requests", {"request_ids": ["unknown"]}),
    ("POST", "/models/load", {"model": "smollm2-135m"}),
    ("POST", "/models/load", {"model": "unknown"}),
    ("POST", "/models/unload", {"model": "smollm2-135m"}),
    ("POST", "/reset_prefix_cache", {}),
    ("POST", "/restart_engines", {"model": "unknown"}),
    ("POST", "/v1/completions", TEXT),
    ("POST", "/v1/completions", {**TEXT, **EVERYTHING, "logprobs": 2, "echo": True}),
    ("POST", "/v1/completions", {**TEXT, **EVERYTHING, "logprobs": 2, "stream": True, "stream_options": USAGE}),
    ("POST", "/v1/completions", {**TEXT, "prompt": ["one", "two"], "stream": True}),
    ("POST", "/v1/completions", {**TEXT, "temperature": -1}),
    ("POST", "/v1/completions", {**TEXT, "model": "unknown"}),
    ("POST", "/v1/completions", {**TEXT, "guided_json": {"type": "object"}}),
    ("POST", "/infill", {"input_prefix": "def f(", "input_suffix": "return x"}),
    ("POST", "/v1/chat/completions", CHAT),
    ("POST", "/v1/chat/completions", {**CHAT, **EVERYTHING, "logprobs": True, "top_logprobs": 2}),
    ("POST", "/v1/chat/completions", {**CHAT, "tools": TOOLS, "stream": True}),
    (
        "POST",
        "/v1/chat/completions",
        {**CHAT, **EVERYTHING, "logprobs": True, "top_logprobs": 2, "stream": True, "stream_options": USAGE},
    ),
    ("POST", "/v1/chat/completions", {**CHAT, "top_logprobs": 1}),
    ("POST", "/v1/chat/completions/batch", {**CHAT, "messages": [CHAT["messages"]] * 2, "logprobs": True}),
    ("POST", "/v1/messages", MESSAGES),
    ("POST", "/v1/messages", {**MESSAGES, "stream": True}),
    ("POST", "/v1/messages", {**MESSAGES, "model": "unknown"}),
    ("POST", "/v1/messages", CHAT),
    ("POST", "/v1/messages/count_tokens", {"model": "smollm2-135m", "messages": CHAT["messages"]}),
    ("POST", "/v1/responses", {"input": "Hello", "max_output_tokens": 8, "top_logprobs": 2, "metadata": {"a": "b"}}),
    ("POST", "/v1/responses", {"input": "Hello", "max_output_tokens": 8, "top_logprobs": 2, "stream": True}),
    ("POST", "/v1/responses", {"input": "Hello", "model": "unknown"}),
    ("POST", "/v1/responses", {"input": "Hello" * 100_000}),
    ("POST", "/v1/responses", {"input": "Hello", "max_output_tokens": 8, "background": True}),
    ("POST", "/v1/responses", {"input": "Hello", "previous_response_id": "resp_1"}),
    ("POST", "/v1/responses/input_tokens", {"input": "Hello"}),
    ("GET", "/v1/responses/{response_id}", None),
    ("POST", "/v1/responses/{response_id}/cancel", {}),
    ("GET", "/v1/responses/{response_id}/input_items", None),
    ("DELETE", "/v1/responses/{response_id}", None),
    ("POST", "/v1/conversations", {"items": CHAT["messages"], "metadata": {"a": "b"}}),
    ("POST", "/v1/conversations", {"metadata": {"a": "b" * 1000}}),
    ("GET", "/v1/conversations/{conversation_id}", None),
    ("POST", "/v1/conversations/{conversation_id}", {"metadata": None}),
    ("GET", "/v1/conversations/{conversation_id}/items", None),
    ("POST", "/v1/conversations/{conversation_id}/items", {"items": CHAT["messages"]}),
    ("GET", "/v1/conversations/{conversation_id}/items/{item_id}", None),
    ("DELETE", "/v1/conversations/{conversation_id}/items/{item_id}", None),
    ("DELETE", "/v1/conversations/{conversation_id}", None),
    ("POST", "/v1/files", {}),
    ("GET", "/v1/files", None),
    ("GET", "/v1/files/{file_id}", None),
    ("GET", "/v1/files/{file_id}/content", None),
    ("DELETE", "/v1/files/{file_id}", None),
    ("POST", "/v1/batches", {}),
    ("GET", "/v1/batches", None),
    ("GET", "/v1/batches/{batch_id}", None),
    ("POST", "/v1/batches/{batch_id}/cancel", {}),
    ("POST", "/v1/embeddings", {"input": ["one", "two"]}),
    ("POST", "/v1/embeddings", {"input": "one", "encoding_format": "base64", "dimensions": 8}),
    ("POST", "/pooling", {"input": "one", "task": "token_embed"}),
    ("POST", "/classify", {"input": "one"}),
    ("POST", "/v1/score", {"text_1": "one", "text_2": ["two", "three"]}),
    ("POST", "/score", {"text_1": "one", "text_2": "two"}),
    ("POST", "/v1/rerank", {"query": "one", "documents": ["two", "three"]}),
    ("POST", "/v2/rerank", {"query": "one", "documents": ["two", "three"], "top_n": 1}),
    ("POST", "/rerank", {"query": "one", "documents": ["two"]}),
    ("POST", "/invocations", {}),
    ("POST", "/v1/audio/transcriptions", {}),
    ("POST", "/v1/audio/translations", {}),
    ("POST", "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "a"}),
    ("POST", "/v1/unload_lora_adapter", {"lora_name": "a"}),
)


def ask(server: LiveServer, method: str, path: str, body: object) -> tuple[int, str, str]:
    """Return the status, media type and text of an answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.headers.get_content_type(), response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers.get_content_type(), error.read().decode()


@pytest.fixture(scope="module")
def page(fake_server: LiveServer) -> dict[str, Any]:
    """The OpenAPI page, with every object closed: fields that it does not name are errors."""
    described: dict[str, Any] = json.loads(fake_server.get("/openapi.json")[1])
    for schema in described["components"]["schemas"].values():
        if "properties" in schema and schema["title"] != "TokenizerInfo":  # which may have more special tokens
            schema["additionalProperties"] = False
    return described


def check(page: dict[str, Any], schema: dict[str, Any], answer: object) -> None:
    jsonschema.Draft202012Validator({**schema, "components": page["components"]}).validate(answer)


def with_ids(server: LiveServer, path: str) -> str:
    """The path with ids of what is there: of new entries of the store, which a request may delete."""
    path = path.replace("{name}", json.loads(server.get("/v1/models")[1])["data"][0]["id"])
    if "{response_id}" in path:
        asked = {"input": "Hello", "max_output_tokens": 2, "background": True}
        path = path.replace("{response_id}", server.post("/v1/responses", asked)[1]["id"])
    if "{conversation_id}" in path:
        made = server.post("/v1/conversations", {"items": [{"id": "msg_1", **CHAT["messages"][0]}]})[1]
        path = path.replace("{conversation_id}", made["id"])
    if "{file_id}" in path or "{batch_id}" in path:
        line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": TEXT}
        form: Any = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", json.dumps(line))}}
        file = httpx.post(f"{server.url}/v1/files", **form).json()["id"]
        batch = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        made = server.post("/v1/batches", batch)[1]["id"] if "{batch_id}" in path else ""
        path = path.replace("{file_id}", file).replace("{batch_id}", made)
    return path.replace("{item_id}", "msg_1")


@pytest.mark.parametrize(("method", "path", "body"), REQUESTS, ids=lambda value: str(value)[:60])
def test_answers_are_as_described(
    fake_server: LiveServer, page: dict[str, Any], method: str, path: str, body: dict[str, Any] | None
) -> None:
    status, media_type, text = ask(fake_server, method, with_ids(fake_server, path), body)
    assert status == 200 or not re.search("{response_id}|{conversation_id}|{file_id}|{batch_id}", path)
    described = page["paths"][path][method.lower()]["responses"][str(status)]
    if not text:
        assert "content" not in described
    elif media_type == "application/json":
        check(page, described["content"][media_type]["schema"], json.loads(text))
    else:
        assert media_type in described["content"]
    if media_type == "text/event-stream":
        assert CHUNKS[path] in described["content"][media_type]["schema"]["description"]
        lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        assert len(lines) > 2
        if path in ("/v1/messages", "/v1/responses"):
            lines = [line.partition("\ndata: ")[2] for line in lines]
        else:
            assert lines.pop() == "[DONE]"
        for line in lines:
            check(page, page["components"]["schemas"][CHUNKS[path]], json.loads(line))


def test_every_route_is_asked(page: dict[str, Any]) -> None:
    asked = {(method.lower(), path) for method, path, _ in REQUESTS}
    served = {(method, path) for path, operations in page["paths"].items() for method in operations}
    assert served == asked


def test_an_unknown_path_answers_with_an_error(fake_server: LiveServer, page: dict[str, Any]) -> None:
    status, _, text = ask(fake_server, "POST", "/unknown", {})
    assert status == 404
    check(page, page["components"]["schemas"]["ErrorResponse"], json.loads(text))


def test_a_field_missing_from_the_openapi_page_is_found(page: dict[str, Any]) -> None:
    """The check itself can fail."""
    schema = page["components"]["schemas"]["VersionResponse"]
    check(page, schema, {"version": "1"})
    for wrong in ({"version": "1", "more": 1}, {"version": 1}, {}):
        with pytest.raises(jsonschema.ValidationError):
            check(page, schema, wrong)
