"""Bounds over HTTP: a 400 that names the field and the bound, for every route; operators' own bounds; what is kept."""

import json
from pathlib import Path
from typing import Any

import pytest

from pagoda.base.errors import RequestError
from pagoda.base.request_limits import RequestLimits, describe_limits
from pagoda.server.body import Body
from pagoda.server.body_reader import parse_body
from pagoda.server.dialects.openai.chat import ChatCompletionRequest
from pagoda.server.dialects.openai.completions import CompletionRequest
from pagoda.server.embeddings import EmbeddingRequest
from pagoda.server.scores import RerankRequest
from pagoda.server.tokens import TokenizeRequest
from tests.server.live import FAKE_FLAGS, LiveServer, serving
from tests.server.test_routes import events

LIMITS = RequestLimits()
USER = {"role": "user", "content": "hi"}
PART = {"type": "text", "text": "x"}
TOOL = {"function": {"name": "f"}}


def deep(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


def chat(**more: Any) -> dict[str, Any]:
    return {"messages": [USER], **more}


CASES: list[tuple[str, type[Body], dict[str, Any], str]] = [
    ("tokenized_chars", TokenizeRequest, {"prompt": "x" * 1_048_577}, "prompt"),
    (
        "tokenized_chars",
        CompletionRequest,
        {"prompt": ["x" * 600_000] * 2, "truncate_prompt_tokens": 5},
        "prompt",
    ),
    (
        "tokenized_chars",
        RerankRequest,
        {"query": "x", "documents": ["x" * 600_000, {"text": "x" * 600_000}], "max_tokens_per_doc": 1},
        "documents",
    ),
    ("stop_strings", CompletionRequest, {"prompt": "x", "stop": ["a"] * 65}, "stop"),
    ("stop_chars", CompletionRequest, {"prompt": "x", "stop": "a" * 60_000}, "stop"),
    ("stop_token_ids", CompletionRequest, {"prompt": "x", "stop_token_ids": [1] * 1025}, "stop_token_ids"),
    ("bad_words", CompletionRequest, {"prompt": "x", "bad_words": ["a"] * 1025}, "bad_words"),
    ("bad_words_chars", ChatCompletionRequest, chat(bad_words=["a" * 20_000]), "bad_words"),
    ("logit_bias", ChatCompletionRequest, chat(logit_bias={str(i): 1 for i in range(1025)}), "logit_bias"),
    ("allowed_token_ids", ChatCompletionRequest, chat(allowed_token_ids=[1] * 65_537), "allowed_token_ids"),
    ("prompts", CompletionRequest, {"prompt": ["x"] * 1025}, "prompt"),
    (
        "list_entries",
        CompletionRequest,
        {"prompt": ["x"] * 99, "allowed_token_ids": [1] * 49_000},
        "allowed_token_ids",
    ),
    ("list_entries", CompletionRequest, {"prompt": ["x"] * 128, "stop": ["a" * 8_000]}, "stop"),
    ("outputs", CompletionRequest, {"prompt": ["x"] * 9, "n": 128}, "prompt"),
    ("inputs", EmbeddingRequest, {"input": ["x"] * 2049}, "input"),
    ("messages", ChatCompletionRequest, {"messages": [USER] * 4097}, "messages"),
    ("messages", TokenizeRequest, {"messages": [USER] * 4097}, "messages"),
    ("content_parts", ChatCompletionRequest, {"messages": [{**USER, "content": [PART] * 2049}] * 2}, "messages"),
    ("tools", ChatCompletionRequest, chat(tools=[TOOL] * 513), "tools"),
    ("template_chars", TokenizeRequest, chat(chat_template="x" * 131_073), "chat_template"),
    (
        "template_kwargs",
        ChatCompletionRequest,
        chat(chat_template_kwargs=dict.fromkeys(map(str, range(65)), 1)),
        "chat_template_kwargs",
    ),
    ("name_chars", ChatCompletionRequest, chat(user="x" * 257), "user"),
    ("name_chars", CompletionRequest, {"prompt": "x", "model": "x" * 5000}, "model"),
    ("name_chars", ChatCompletionRequest, chat(reasoning_effort="x" * 257), "reasoning_effort"),
    ("name_chars", ChatCompletionRequest, {"messages": [USER, {**USER, "name": "x" * 257}]}, "messages[1].name"),
    ("json_depth", ChatCompletionRequest, chat(chat_template_kwargs=deep(65)), "chat_template_kwargs"),
    ("json_depth", ChatCompletionRequest, chat(documents=[deep(64)]), "documents"),
    ("json_depth", ChatCompletionRequest, {"messages": [{**USER, "x": deep(65)}]}, "messages"),
    ("json_depth", ChatCompletionRequest, chat(tools=[{"function": {"name": "f", "parameters": deep(65)}}]), "tools"),
    ("json_depth", CompletionRequest, {"prompt": "x", "structured_outputs": deep(65)}, "structured_outputs"),
    (
        "json_depth",
        CompletionRequest,
        {"prompt": "x", "response_format": {"type": "json_schema", "json_schema": deep(65)}},
        "response_format",
    ),
    ("grammar_chars", CompletionRequest, {"prompt": "x", "guided_regex": "a" * 262_145}, "guided_regex"),
    ("grammar_chars", CompletionRequest, {"prompt": "x", "guided_choice": ["a" * 200_000] * 2}, "guided_choice"),
    (
        "grammar_chars",
        ChatCompletionRequest,
        chat(response_format={"type": "json_schema", "json_schema": {"schema": {"enum": ["a" * 262_145]}}}),
        "response_format",
    ),
    ("json_values", ChatCompletionRequest, chat(documents=[{"x": [1] * 131_072}]), "documents"),
    ("json_chars", ChatCompletionRequest, chat(documents=[{"x": ["a" * 2_100_000] * 2}]), "documents"),
    ("json_chars", ChatCompletionRequest, chat(documents=[{"a" * 4_200_000: 1}]), "documents"),
    ("json_chars", TokenizeRequest, chat(chat_template_kwargs={"x": "a" * 4_200_000}), "chat_template_kwargs"),
]


@pytest.mark.parametrize(("limit", "kind", "body", "param"), CASES)
def test_every_limit_is_a_400_that_names_it(limit: str, kind: type[Body], body: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_body(json.dumps(body).encode(), kind, LIMITS)
    assert caught.value.param == param
    assert f"more than the limit of {getattr(LIMITS, limit)} ({limit})" in str(caught.value)
    assert len(str(caught.value)) < 300


def test_the_lists_of_a_chat_have_a_common_bound_as_those_of_a_text_completion() -> None:
    lists = {"allowed_token_ids": [1] * 60, "stop_token_ids": [1] * 50}
    for kind, body in ((ChatCompletionRequest, chat(**lists)), (CompletionRequest, {"prompt": "x", **lists})):
        parse_body(json.dumps(body).encode(), kind, RequestLimits(list_entries=110))
        with pytest.raises(RequestError, match="list_entries"):
            parse_body(json.dumps(body).encode(), kind, RequestLimits(list_entries=109))


def test_every_bound_has_a_case() -> None:
    # Those of a prompt are in test_request_limits.py, those of images in test_image_prompts.py, those of sounds in
    # engine/transcription.
    in_python = {
        "max_logprobs",
        "logprob_entries",
        "prompt_logprob_entries",
        "answer_prompt_logprobs",
        "output_tokens",
        "output_logprobs",
        "text_bytes",
        "images",
        "image_bytes",
        "image_pixels",
        "audio_s",
        "audio_bytes",
    }
    assert {limit for limit, *_ in CASES} | in_python == {name for name, _, _ in describe_limits()}


def test_generous_requests_pass() -> None:
    body = chat(
        messages=[{**USER, "content": [PART] * 20}] * 200,
        tools=[TOOL] * 128,
        stop=["x" * 100] * 16,
        logit_bias={str(i): 1 for i in range(300)},
        chat_template_kwargs=deep(60),
    )
    parse_body(json.dumps(body).encode(), ChatCompletionRequest, LIMITS)


def test_the_server_lists_its_limits_and_operators_set_them(tmp_path: Path) -> None:
    flags = ("--request-limits.prompts", "2", "--enable-force-include-usage")
    with serving(tmp_path, *FAKE_FLAGS, *flags) as server:
        assert server.post("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 1})[0] == 200
        for path, body, param in (
            ("/v1/completions", {"prompt": ["a", "b", "c"]}, "prompt"),
            ("/v1/completions", {"prompt": "x", "stop": "a" * 60_000}, "stop"),
            ("/v1/chat/completions", {"messages": [USER], "tools": [TOOL] * 513}, "tools"),
        ):
            status, answer = server.post(path, body)
            assert (status, answer["error"]["param"]) == (400, param)
            assert "more than the limit of" in answer["error"]["message"]
        for options, is_along in (({}, True), ({"stream_options": {"include_usage": False}}, False)):
            # every stream ends with its usage
            *chunks, last = events(server, "/v1/completions", {"prompt": "x", "max_tokens": 2, **options})
            assert last["usage"]["completion_tokens"] == 2
            assert {chunk["usage"] is not None for chunk in chunks} == {is_along}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"messages": [{**USER, "content": "x" * 1_100_000}]}),
        ("/tokenize", {"messages": [USER], "chat_template": "{{ 'x' * 1100000 }}"}),
        ("/v1/chat/completions", {"messages": [{**USER, "content": "x" * 1_100_000}], "truncate_prompt_tokens": 5}),
    ],
)
def test_what_a_template_renders_is_bounded_too(fake_server: LiveServer, path: str, body: dict[str, Any]) -> None:
    status, answer = fake_server.post(path, body)
    assert (status, answer["error"]["param"]) == (400, "messages")
    assert "more than the limit of 1048576 (tokenized_chars)" in answer["error"]["message"]


def peak_mib(server: LiveServer) -> float:
    for line in Path(f"/proc/{server.process.pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmHWM")


def test_the_longest_stop_strings_cost_little_memory(fake_server: LiveServer) -> None:
    stop = ["".join(chr(0x4E00 + (i * 131 + j) % 20_000) for j in range(128)) for i in range(64)]
    body = {"prompt": "x", "max_tokens": 4, "n": 128, "ignore_eos": True}
    assert fake_server.post("/v1/completions", body)[0] == 200
    before = peak_mib(fake_server)
    assert fake_server.post("/v1/completions", {**body, "stop": stop})[0] == 200
    assert peak_mib(fake_server) < before + 60


@pytest.mark.parametrize(
    ("more", "param", "name"),
    [
        ({"prompt": ["x"] * 1_000, "logprobs": 20}, "logprobs", "output_logprobs"),
        ({"prompt": ["x"] * 32, "n": 16, "logprobs": 5}, "logprobs", "output_logprobs"),
        ({"prompt": ["x"] * 32, "n": 16, "logprobs": 5, "max_tokens": 3}, "", ""),
    ],
)
def test_what_a_request_may_come_to_hold_is_bounded_before_it_starts(
    fake_server: LiveServer, more: dict[str, Any], param: str, name: str
) -> None:
    """A token with 20 log-probabilities takes 4 kB: 1,000 outputs as long as the context would take 8 GB."""
    body = {"max_tokens": None, "temperature": 1.0, **more}
    status, answer = fake_server.post("/v1/completions", body)
    if not name:
        assert status == 200
        return
    error = answer["error"]
    assert (status, error["param"]) == (400, param)
    assert "`max_tokens` times `logprobs` + 1) are more than the limit of 4194304" in error["message"]
    assert name in error["message"]
    fake_server.wait_idle()
