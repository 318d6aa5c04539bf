"""Fields of requests: what is served is obeyed, what is neutral is accepted, the rest is refused in words."""

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest

from pagoda.server.dialects.openai.body import CHAT_ONLY, TEXT_ONLY, UNSERVED
from pagoda.server.dialects.openai.chat import ChatCompletionRequest
from pagoda.server.dialects.openai.completions import CompletionRequest
from tests.server.live import FAKE_FLAGS, LiveServer, serving
from tests.server.test_tools import HERMES, TOOLS

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "seed": 1}
TEXT: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 4, "seed": 1}

NEUTRAL: dict[str, list[Any]] = {
    "modalities": [None, ["text"], []],
    "verbosity": [None, "medium"],
    "use_beam_search": [None, False],
    "length_penalty": [None, 1.0],
    "early_stopping": [None, False],
    "best_of": [1],
    "functions": [[]],
    "function_call": ["none"],
    "kv_transfer_params": [None, {}],
    "thinking_token_budget": [None, -1],
    "logits_processors": [[]],
    "suffix": ["", None],
    "response_format": [None, {"type": "text"}],
    "structured_outputs": [None, {}, {"json": None}],
    "bad_words": [None, []],
    "stop": [None, []],
    "stop_token_ids": [None, []],
    "logit_bias": [None, {}],
    "n": [None],
    "stream": [None],
    "stream_options": [None],
    "priority": [None],
    "min_tokens": [None, 0],
    "no_repeat_ngram_size": [None, 0],
    "truncate_prompt_tokens": [None, -1],
    "truncation_side": [None, "left", "right"],
    "session_id": [None, "s"],
    **{name: [None] for name in ("temperature", "top_p", "top_k", "min_p", "seed", "user", "cache_salt", "request_id")},
    **{name: [None, False] for name in ("ignore_eos", "include_stop_str_in_output", "echo", "return_token_ids")},
    **{name: [None, True] for name in ("skip_special_tokens", "spaces_between_special_tokens")},
    "return_tokens_as_token_ids": [None, False],
    "return_timings": [None, False],
}
OF_CHAT: dict[str, list[Any]] = {
    "documents": [None, []],
    "tools": [None, []],
    "tool_choice": [None, "none"],
    "parallel_tool_calls": [None, True],
    "logprobs": [None, False],
    "top_logprobs": [None, 0],
    "metadata": [None, {}],
    "store": [None, False],
    "service_tier": [None, "auto"],
    "prompt_cache_retention": [None, "24h"],
    "reasoning_effort": [None, "low"],
    "chat_template": [None],
    "chat_template_kwargs": [None, {}],
    "add_generation_prompt": [None, True],
    "add_special_tokens": [None, False],
    "continue_final_message": [None, False],
    "include_reasoning": [None, True],
    "max_completion_tokens": [None],
}
OF_TEXT: dict[str, list[Any]] = {
    "add_special_tokens": [None, True],
    "logprobs": [None, False],
    "max_completion_tokens": [None],
    "messages": [None, []],
    "reasoning_effort": [None],
    # as in chats
    **{name: OF_CHAT[name] for name in CHAT_ONLY if name not in ("messages", "reasoning_effort")},
}


def cases(*tables: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    return [(name, value) for table in tables for name, values in table.items() for value in values]


def test_neutral_values_change_nothing(fake_server: LiveServer) -> None:
    for path, plain, tables in (
        ("/v1/chat/completions", CHAT, (NEUTRAL, OF_CHAT)),
        ("/v1/completions", TEXT, (NEUTRAL, OF_TEXT)),
    ):
        status, expected = fake_server.post(path, plain)
        assert status == 200
        for name, value in cases(*tables):
            status, answer = fake_server.post(path, {**plain, name: value})
            assert status == 200, (path, name, value, answer)
            if name != "seed":
                assert answer["choices"] == expected["choices"], (path, name, value)
                assert answer["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]


ASKING: dict[str, Any] = {
    "modalities": ["text", "audio"],
    "functions": [{"name": "f"}],
    "function_call": "auto",
    "kv_transfer_params": {"a": 1},
    "guided_decoding_backend": "xgrammar",
}


@pytest.mark.parametrize("name", ASKING)
def test_what_is_not_served_is_named(fake_server: LiveServer, name: str) -> None:
    for path, plain in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
        status, answer = fake_server.post(path, {**plain, name: ASKING[name]})
        assert status == 400, answer
        assert "support" in answer["error"]["message"]
        assert name in (answer["error"]["param"], "structured_outputs")


@pytest.mark.parametrize(
    ("field", "param", "message"),
    [
        (b'"audio":1e999', "audio", "audio: number out of range"),
        (b'"audio":[{"a":-1e999}]', "audio[0][...]", "audio[0][...]: number out of range"),
        (b'"audio":' + b"1" * 5000, "audio", "audio: integer value out of range"),
        (b'"audio":"a\\ud83d"', "audio", "audio: not valid Unicode: half of a surrogate pair"),
        (b'"audio":"\xed\xa0\x80"', None, "the body is not valid JSON: invalid UTF-8"),
        (b'"audio":{"\xc0\x80":1}', None, "the body is not valid JSON: invalid UTF-8"),
        (b'"\xc0\x80":1', None, "the body is not valid JSON: invalid UTF-8"),
        (b'"response_format":{"type":"text","\xc0":1}', None, "the body is not valid JSON: invalid UTF-8"),
        (b'"audio":' + b"[" * 5000 + b"]" * 5000, None, "the body is nested too deeply"),
    ],
)
def test_what_cannot_be_decoded_is_refused_in_fields_that_are_not_declared(
    fake_server: LiveServer, field: bytes, param: str | None, message: str
) -> None:
    for path, plain in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
        status, answer = fake_server.post(path, json.dumps(plain).encode()[:-1] + b"," + field + b"}")
        assert (status, answer["error"]["param"], answer["error"]["message"]) == (400, param, message)


@pytest.mark.parametrize("name", CHAT_ONLY)
def test_a_text_completion_names_a_field_of_chats(fake_server: LiveServer, name: str) -> None:
    for value in ([{"a": 1}], "x", 5):
        status, answer = fake_server.post("/v1/completions", {**TEXT, name: value})
        assert (status, answer["error"]["param"]) == (400, name)
        assert "/v1/chat/completions" in answer["error"]["message"]


def test_every_unserved_field_has_a_message() -> None:
    for kind, own, others in (
        (ChatCompletionRequest, CHAT_ONLY, TEXT_ONLY),
        (CompletionRequest, TEXT_ONLY, CHAT_ONLY),
    ):
        assert kind.unserved.keys() == UNSERVED.keys() | others.keys()
        assert not set(kind.unserved) & set(kind.__struct_fields__)
        assert set(own) <= set(kind.__struct_fields__)


def test_an_answer_longer_than_the_context_is_refused_or_reported_as_cut(fake_server: LiveServer) -> None:
    for path, plain in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
        for name in ("max_tokens", "max_completion_tokens"):
            status, answer = fake_server.post(path, {**plain, name: 2049})
            assert (status, answer["error"]["param"]) == (400, name)
            assert "2048" in answer["error"]["message"]
        status, answer = fake_server.post(path, {**plain, "min_tokens": 5000, "max_tokens": None})
        assert (status, answer["error"]["param"]) == (400, "min_tokens")
        status, answer = fake_server.post(path, {**plain, "max_tokens": 2048, "ignore_eos": True})
        assert status == 200
        assert answer["usage"]["total_tokens"] == 2048
        assert answer["choices"][0]["finish_reason"] == "length"


def test_max_completion_tokens_is_the_limit_on_both_routes(fake_server: LiveServer) -> None:
    for path, plain in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
        answer = fake_server.post(path, {**plain, "max_completion_tokens": 7, "ignore_eos": True})[1]
        assert answer["usage"]["completion_tokens"] == 7
    scored = fake_server.post("/v1/completions", {"prompt": "a b", "max_completion_tokens": 0, "echo": True})
    assert scored[1]["choices"][0]["text"] == "a b"
    assert scored[1]["usage"]["completion_tokens"] == 0


def test_a_prompt_that_is_only_scored_may_fill_the_context(fake_server: LiveServer) -> None:
    body = {"prompt": [5] * 2048, "max_tokens": 0, "echo": True, "return_token_ids": True}
    before = fake_server.metric("prompt_tokens_total")
    status, answer = fake_server.post("/v1/completions", body)
    assert status == 200, answer
    assert answer["choices"][0]["prompt_token_ids"] == body["prompt"]
    assert answer["choices"][0]["token_ids"] == []
    assert fake_server.metric("prompt_tokens_total") == before + 2048
    for change in ({"prompt": [5] * 2049}, {"max_tokens": 1}, {"max_tokens": None}):
        status, answer = fake_server.post("/v1/completions", {**body, **change})
        assert (status, answer["error"]["param"]) == (400, "prompt")
        assert "2048 tokens" in answer["error"]["message"]


def test_all_logprobs_of_many_prompts_count_against_the_limit_of_an_answer(fake_server: LiveServer) -> None:
    body = {"prompt": ["a " * 1000] * 128, "max_tokens": 1, "prompt_logprobs": -1}
    status, answer = fake_server.post("/v1/completions", body)
    assert (status, answer["error"]["param"]) == (400, "prompt_logprobs")


def test_add_special_tokens_is_obeyed(gemma_server: LiveServer) -> None:
    """Gemma's tokenizer puts a beginning before each text; its template does too."""

    def prompt_ids(path: str, body: dict[str, Any]) -> list[int]:
        status, answer = gemma_server.post(path, {**body, "max_tokens": 1, "return_token_ids": True})
        assert status == 200, answer
        return answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"]

    for prompt in ("Hello", ["Hello"]):
        with_bos = prompt_ids("/v1/completions", {"prompt": prompt})
        assert prompt_ids("/v1/completions", {"prompt": prompt, "add_special_tokens": False}) == with_bos[1:]
    chat = {"messages": CHAT["messages"], "chat_template": "<start_of_turn>{{ messages[0].content }}"}
    plain = prompt_ids("/v1/chat/completions", chat)
    assert prompt_ids("/v1/chat/completions", {**chat, "add_special_tokens": True}) == [with_bos[0], *plain]
    asked = {"messages": CHAT["messages"], "chat_template": chat["chat_template"]}
    assert gemma_server.post("/tokenize", asked)[1]["tokens"] == plain
    assert gemma_server.post("/tokenize", {**asked, "add_special_tokens": True})[1]["tokens"] == [with_bos[0], *plain]


CALLED: list[Any] = [
    {"role": "user", "content": "Weather in Bern?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Bern"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "rain"},
]


def rendered(server: LiveServer, body: dict[str, Any]) -> str:
    status, answer = server.post("/tokenize", body)
    assert status == 200, answer
    return server.post("/detokenize", {"tokens": answer["tokens"]})[1]["prompt"]


def test_calls_and_results_reach_templates_that_know_them(fake_server: LiveServer) -> None:
    text = rendered(fake_server, {"messages": CALLED, "chat_template": HERMES})
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>' in text
    assert "tool\nrain" in text


def test_calls_and_tools_are_text_where_the_template_has_no_place_for_them(fake_server: LiveServer) -> None:
    text = rendered(fake_server, {"messages": CALLED, "tools": TOOLS})
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>' in text
    assert "<tool_response>\nrain\n</tool_response>" in text
    assert "You may call these functions" in text


def test_calls_are_refused_where_the_template_drops_them(fake_server: LiveServer) -> None:
    deaf = "{% for m in messages if m.role != 'tool' %}{{ m.content }}{{ m.tool_calls }}{% endfor %}"
    status, answer = fake_server.post("/tokenize", {"messages": CALLED, "chat_template": deaf})
    assert (status, answer["error"]["param"]) == (400, "messages[2].role")


@pytest.mark.parametrize("arguments", ["{", "[1]", "5"])
def test_arguments_that_are_not_an_object_are_refused_by_name(fake_server: LiveServer, arguments: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [CALLED[0], {"role": "assistant", "tool_calls": [call]}]
    status, answer = fake_server.post("/tokenize", {"messages": messages, "chat_template": HERMES})
    assert (status, answer["error"]["param"]) == (400, "messages[1].tool_calls[0].function.arguments")


def test_template_variables(fake_server: LiveServer) -> None:
    template = "{{ reasoning_effort }} {% for d in documents or [] %}{{ d.text }}{% endfor %}{{ messages[0].content }}"
    body = {**CHAT, "chat_template": template, "return_token_ids": True}
    documents = [{"title": "t", "text": "D"}]

    def prompt(**more: Any) -> str:
        ids = fake_server.post("/v1/chat/completions", {**body, **more})[1]["prompt_token_ids"]
        return fake_server.post("/detokenize", {"tokens": ids})[1]["prompt"]

    assert prompt(reasoning_effort="low", documents=documents) == "low DHello"
    assert prompt(reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"}) == "high Hello"
    status, answer = fake_server.post("/v1/chat/completions", {**CHAT, "documents": documents})
    assert (status, answer["error"]["param"]) == (400, "documents")


def test_what_the_openai_client_sends_by_itself(fake_server: LiveServer) -> None:
    client = openai.OpenAI(base_url=f"{fake_server.url}/v1", api_key="none", max_retries=0)
    answer = client.chat.completions.create(
        model="smollm2-135m",
        messages=CHAT["messages"],
        modalities=["text"],
        verbosity="medium",
        max_completion_tokens=3,
        response_format={"type": "text"},
        service_tier="auto",
        store=False,
        extra_body={"use_beam_search": False, "documents": [], "kv_transfer_params": None},
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


def asked(server: LiveServer, path: str, body: dict[str, Any]) -> tuple[int, str | None, dict[str, Any]]:
    """The status, the header x-ignored-fields and the answer."""
    sent = urllib.request.Request(server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(sent, timeout=30) as response:
            return response.status, response.headers["x-ignored-fields"], json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, error.headers["x-ignored-fields"], json.load(error)


def test_unknown_fields_are_ignored_named_in_a_header_and_logged_once(fake_server: LiveServer) -> None:
    for path, plain in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT), ("/tokenize", {"prompt": "x"})):
        assert asked(fake_server, path, plain)[:2] == (200, None)
        assert asked(fake_server, path, {**plain, "frobnicate": 1, "x.y-z": {}})[:2] == (200, "frobnicate, x.y-z")
    nested = {**CHAT, "stream": False, "response_format": {"type": "text", "foo": 1}}
    assert asked(fake_server, "/v1/chat/completions", nested)[:2] == (200, "response_format.foo")
    assert fake_server.log.read_text().count("frobnicate") == 1


def test_the_header_of_ignored_fields_is_bounded(fake_server: LiveServer) -> None:
    many = {f"unknown_{i}": 1 for i in range(25)} | {"bad name": 1, "漢": 1, "x" * 65: 1, "a\r\nb": 1}
    status, header, _ = asked(fake_server, "/v1/completions", {**TEXT, **many})
    assert status == 200
    assert header == ", ".join([*(f"unknown_{i}" for i in range(20)), "+9"])


def test_hosted_tools_are_left_out_and_named_in_the_header(fake_server: LiveServer) -> None:
    model = json.loads(fake_server.get("/v1/models")[1])["data"][0]["id"]
    own = {"type": "function", "name": "look", "parameters": {}}
    bodies = {
        "/v1/responses": {"input": "Hi", "max_output_tokens": 3, "tools": [own, {"type": "web_search"}]},
        "/v1/messages": {
            "model": model,
            "max_tokens": 3,
            "messages": CHAT["messages"],
            "tools": [
                {"name": "look", "input_schema": {"type": "object"}},
                {"type": "web_search_20250305", "name": "web_search"},
            ],
        },
    }
    for path, body in bodies.items():
        assert asked(fake_server, path, body)[:2] == (200, "tools.web_search")
        assert asked(fake_server, path, {**body, "odd": 1})[:2] == (200, "odd, tools.web_search")


def test_hints_are_ignored_in_silence(fake_server: LiveServer) -> None:
    hints = {
        "prediction": {"type": "content", "content": "x"},
        "verbosity": "low",
        "store": True,
        "metadata": {"a": "b"},
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "service_tier": "flex",
    }
    tool = {**TOOLS[0], "cache_control": {"type": "ephemeral"}}
    part = {"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}
    message = {"role": "user", "content": [part], "cache_control": {"type": "ephemeral"}}
    body = {**CHAT, **hints, "messages": [message], "tools": [tool], "tool_choice": "none"}
    assert asked(fake_server, "/v1/chat/completions", body)[:2] == (200, None)
    assert asked(fake_server, "/v1/completions", {**TEXT, **hints})[:2] == (200, None)


def test_strict_fields_refuses_unknown_ones_but_not_hints(tmp_path: Path) -> None:
    with serving(tmp_path, *FAKE_FLAGS, "--strict-fields") as server:
        status, _, answer = asked(server, "/v1/chat/completions", {**CHAT, "frobnicate": 1})
        assert (status, answer["error"]["param"]) == (400, "frobnicate")
        assert asked(server, "/v1/chat/completions", {**CHAT, "store": True, "metadata": {}})[0] == 200
