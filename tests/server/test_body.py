"""Request bodies: what is refused, how the error names the input, and what an error may repeat of it."""

import asyncio
import base64
import json
import random
import typing
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec import UNSET, Struct
from starlette.requests import Request

from pagoda.base.errors import RequestError
from pagoda.base.request_limits import RequestLimits
from pagoda.base.sampling_params import SamplingParams
from pagoda.base.server_config import AnswerDefaults, ServerConfig
from pagoda.loading.generation_config import DEFAULTS
from pagoda.server import body_reader
from pagoda.server.app import ENDPOINTS
from pagoda.server.body import Body, words_of
from pagoda.server.body_reader import BodyReader, parse_body
from pagoda.server.dialects.openai.chat import ChatCompletionRequest
from pagoda.server.dialects.openai.completions import CompletionRequest
from pagoda.server.embeddings import EmbeddingRequest
from pagoda.server.operations import AbortRequest
from pagoda.server.request_state import RequestState
from pagoda.server.routing import json_schemas, parts_of
from pagoda.server.state import ServerState
from pagoda.server.tokens import DetokenizeRequest, TokenizeRequest

LIMITS = RequestLimits()
USER = {"role": "user", "content": "hi"}
CHAT = {"messages": [USER]}


def refused(kind: type[Body], body: Any) -> RequestError:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(RequestError) as caught:
        parse_body(data, kind, LIMITS)
    return caught.value


@pytest.mark.parametrize(
    ("kind", "body", "param", "message"),
    [
        (CompletionRequest, {"prompt": [1, -1]}, "prompt[1]", "prompt[1]: expected an integer >= 0"),
        (CompletionRequest, {"prompt": [[1], [2, "x"]]}, "prompt[1][1]", "expected an integer, got a string"),
        (CompletionRequest, {"prompt": [1, "x"]}, "prompt[1]", "a token id, as in prompt[0], got a string"),
        (CompletionRequest, {"prompt": ["a", 5]}, "prompt[1]", "a string, as in prompt[0], got a token id"),
        (CompletionRequest, {"prompt": ["a", "b", [5]]}, "prompt[2]", "a string, as in prompt[0], got a list of"),
        (CompletionRequest, {"prompt": []}, "prompt", "is empty"),
        (CompletionRequest, {}, "prompt", "prompt: is required"),
        (CompletionRequest, {"prompt": "x", "n": 1000}, "n", "expected an integer <= 128"),
        (CompletionRequest, {"prompt": "x", "logit_bias": {"5": "x"}}, "logit_bias[...]", "expected a number"),
        (CompletionRequest, {"prompt": "x", "n": 3, "best_of": 2}, "best_of", "at least n, which is 3"),
        (CompletionRequest, {"prompt": "x", "best_of": 2, "stream": True}, "best_of", "set stream to false"),
        (CompletionRequest, {"prompt": "x", "best_of": 2, "use_beam_search": True}, "best_of", "set only n"),
        (CompletionRequest, {"prompt": "x", "stop": ["a", 5]}, "stop[1]", "stop[1]: expected a string, got an integer"),
        (CompletionRequest, {"prompt": "x", "request_id": "a b"}, "request_id", "expected a string matching"),
        (CompletionRequest, b'{"prompt": "x", "stop": ["a", "\\ud800"]}', "stop[1]", "half of a surrogate pair"),
        (CompletionRequest, b'{"prompt": "x", "temperature": NaN}', None, "not valid JSON"),
        (CompletionRequest, b'{"prompt": "x", "temperature": 1e999}', "temperature", "number out of range"),
        (CompletionRequest, b'{"prompt": "\xff"}', None, "invalid UTF-8"),
        (ChatCompletionRequest, {"messages": []}, "messages", "expected a list of length >= 1"),
        (ChatCompletionRequest, {"messages": [USER, {"content": "x"}]}, "messages[1].role", "is required"),
        (ChatCompletionRequest, {"messages": [{**USER, "content": [3]}]}, "messages[0].content[0]", "an object"),
        (ChatCompletionRequest, {"messages": [{**USER, "content": 3}]}, "messages[0].content", "a string, a list or"),
        (ChatCompletionRequest, {**CHAT, "tools": [{"function": {}}]}, "tools[0].function.name", "is required"),
        (ChatCompletionRequest, {**CHAT, "tool_choice": "auto"}, "tool_choice", "needs tools"),
        (
            ChatCompletionRequest,
            {**CHAT, "tool_choice": "some"},
            "tool_choice",
            "'none', 'auto' or 'required', got 'some'",
        ),
        (ChatCompletionRequest, {**CHAT, "tool_choice": 3}, "tool_choice", "expected a string, an object or null"),
        (ChatCompletionRequest, {**CHAT, "tool_choice": "a" * 65}, "tool_choice", "a string of length <= 64"),
        (ChatCompletionRequest, {**CHAT, "response_format": {"type": "x"}}, "response_format.type", "'json_schema' or"),
        (
            ChatCompletionRequest,
            {**CHAT, "response_format": {"type": "a - at `$.b`"}},
            "response_format.type",
            "got 'a - ",
        ),
        (ChatCompletionRequest, {**CHAT, "top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        (TokenizeRequest, {}, "prompt", "either prompt or messages"),
        (DetokenizeRequest, {"tokens": [1, 2**31]}, "tokens[1]", "expected an integer <="),
        (AbortRequest, {"request_ids": [1]}, "request_ids[0]", "expected a string, got an integer"),
        (AbortRequest, [], None, "not a JSON object"),
    ],
)
def test_an_error_names_the_innermost_input(kind: type[Body], body: Any, param: str | None, message: str) -> None:
    error = refused(kind, body)
    assert error.param == param
    assert message in str(error)


NESTED = {"[": "]", '{"a":': "}"}


@pytest.mark.parametrize("opening", NESTED)
def test_deep_nesting_is_an_error_of_the_caller(opening: str) -> None:
    inner = opening * 50_000 + "1" + NESTED[opening] * 50_000
    error = refused(
        ChatCompletionRequest,
        f'{{"messages": [{json.dumps(USER)}], "chat_template_kwargs": {{"a": {inner}}}}}'.encode(),
    )
    assert "nested too deeply" in str(error)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "x", "stop": {"y" * 2**20: 1}},
        {"prompt": "x", "response_format": {"type": "y" * 2**20}},
        {"prompt": "x", "logit_bias": {"y" * 2**20: 1}},
        {"prompt": "x", "logit_bias": {"1": "y" * 2**20}},
        {"prompt": "x", "request_id": "y" * 2**20},
        {"prompt": "x", "temperature": "y" * 2**20},
    ],
)
def test_an_error_never_repeats_the_callers_megabytes(body: dict[str, Any]) -> None:
    def ask() -> None:
        parsed = parse_body(json.dumps(body).encode(), CompletionRequest, LIMITS)
        parsed.sampling_params(1, None, None, {})

    with pytest.raises(RequestError) as caught:
        ask()
    assert len(str(caught.value)) < 500
    assert len(caught.value.param or "") < 250


def test_null_means_not_given_where_a_field_is_not_served() -> None:
    body = parse_body(b'{"prompt": "x", "audio": null, "best_of": null}', CompletionRequest, LIMITS)
    assert body.prompts() == ["x"]


def test_of_many_unknown_fields_the_event_loop_looks_at_few(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {f"é{number}": 1 for number in range(5_000)}
    looked_at: list[str] = []
    monkeypatch.setattr(body_reader, "_HEADER_NAME", SimpleNamespace(fullmatch=looked_at.append))

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps({"prompt": "x", **names}).encode()}

    state = RequestState()
    headers = [(b"content-type", b"application/json")]
    http = Request({"type": "http", "method": "POST", "path": "/x", "headers": headers, "state": state}, receive)  # type: ignore[arg-type]
    asyncio.run(BodyReader(LIMITS).read(http, CompletionRequest))
    assert len(looked_at) < 1_000
    assert state.ignored_fields == "+5000"


def test_messages_keep_the_fields_that_templates_may_read() -> None:
    sent = [{"role": "tool", "content": "4", "tool_call_id": "a", "weight": 3, "name": None}]
    body = parse_body(json.dumps({"messages": sent}).encode(), ChatCompletionRequest, LIMITS)
    del sent[0]["name"]  # null is as if not given
    assert body.messages == sent


def test_every_reference_on_the_openapi_page_is_defined() -> None:
    schemas = json_schemas(ENDPOINTS)
    text = json.dumps(schemas)
    for name in text.split('"#/components/schemas/')[1:]:
        assert name.partition('"')[0] in schemas


BODIES = dict.fromkeys(one.body for one in ENDPOINTS if one.body is not None)


@pytest.mark.parametrize("kind", [*BODIES, *parts_of(BODIES)])
def test_every_field_of_a_body_is_explained(kind: type[Body]) -> None:
    fields = json_schemas(ENDPOINTS)[kind.__name__]["properties"]
    assert [name for name, described in fields.items() if not described.get("description")] == []


@pytest.mark.parametrize("kind", [*BODIES, *parts_of(BODIES)])
def test_null_is_as_if_a_field_was_not_given(kind: type[Body]) -> None:
    for field in msgspec.structs.fields(kind):
        if not field.required and field.default is not UNSET:
            hint = typing.get_type_hints(kind, include_extras=True)[field.name]
            assert msgspec.convert(None, hint) is None, field.name
            assert field.default is None or issubclass(kind, Body), field.name  # a Body puts the default in its place
            assert field.default_factory is msgspec.NODEFAULT, field.name


def test_null_becomes_the_default() -> None:
    fields: dict[str, Any] = {"input": "x", "encoding_format": None, "embed_dtype": None, "endianness": None}
    body = parse_body(json.dumps(fields).encode(), EmbeddingRequest, LIMITS)
    assert (body.encoding_format, body.embed_dtype, body.endianness) == ("float", "float32", "native")
    assert "got 'x'" in str(refused(EmbeddingRequest, {"input": "x", "encoding_format": "x"}))


def test_a_body_that_would_be_slow_to_decode_is_refused() -> None:
    """Values and brackets by their number, numbers beyond a double's fast conversions by their exponent."""
    many = b'{"messages":[],"metadata":{"a":[' + b",".join([b"[]"] * 600_000) + b"]}}"
    assert "1200007 commas, colons and brackets" in str(refused(ChatCompletionRequest, many))
    for number in (b"1e300", b"1E-310", b"1e+308"):
        slow = b'{"prompt":"x","metadata":[' + b",".join([number] * 10_001) + b"]}"
        assert "10001 numbers with large exponents" in str(refused(CompletionRequest, slow))


def test_ordinary_large_bodies_are_not_taken_for_slow_ones() -> None:
    embeds = base64.b64encode(random.Random(1).randbytes(12 * 2**20)).decode()
    ids = list(range(200_000))
    for body in (
        {"prompt_embeds": embeds},
        {"prompt": ids},
        {"prompt": "Well, that is 1e5 or 2e300: so what? " * 9_000},
    ):
        parse_body(json.dumps(body).encode(), CompletionRequest, LIMITS)


def test_no_default_that_may_be_set_is_lost() -> None:
    values: dict[str, Any] = {
        "temperature": 0.3, "top_p": 0.4, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.5, "max_tokens": 9,
        "no_repeat_ngram_size": 3, "forced_eos_token_id": 2, "min_tokens": 4, "presence_penalty": 0.5, "seed": 7,
        "frequency_penalty": 0.6, "stop": ("x",), "stop_token_ids": (8,), "bad_words": ("y",),
        "logit_bias": ((5, 1.0),),
    }  # fmt: skip
    assert set(values) == set(DEFAULTS)
    params = parse_body(b'{"prompt": "x"}', CompletionRequest, LIMITS).sampling_params(None, None, None, values)
    assert {name: getattr(params, name) for name in values} == values


def test_the_models_defaults_fill_what_a_request_leaves_open() -> None:
    defaults = {"temperature": 0.2, "top_k": 5, "max_tokens": 9}

    def params_of(body: bytes, asked: int | None = None) -> SamplingParams:
        return parse_body(body, CompletionRequest, LIMITS).sampling_params(asked, None, None, defaults)

    open_ = params_of(b'{"prompt": "x", "temperature": null}')
    assert (open_.temperature, open_.top_k, open_.max_tokens) == (0.2, 5, 9)
    given = params_of(b'{"prompt": "x", "temperature": 1, "top_k": 0}', asked=3)
    assert (given.temperature, given.top_k, given.max_tokens) == (1.0, 0, 3)
    assert params_of(b'{"prompt": "x", "use_beam_search": true}', asked=3).top_k == 0


@pytest.mark.parametrize(
    ("asked", "of_server", "written"), [(None, True, True), (False, True, False), (True, False, True)]
)
def test_a_request_says_whether_tokens_are_written_as_ids_or_the_server_does(
    asked: bool | None, of_server: bool, written: bool
) -> None:
    data = json.dumps({"prompt": "x", "return_tokens_as_token_ids": asked}).encode()
    defaults = AnswerDefaults(return_tokens_as_token_ids=of_server)
    state: Any = SimpleNamespace(config=ServerConfig(answer_defaults=defaults))
    assert ServerState.writes_ids(state, parse_body(data, CompletionRequest, LIMITS)) is written


def test_only_bodies_have_fields_of_words() -> None:
    """Nothing checks the words of another struct."""

    def kinds(of: type[Struct]) -> Iterator[type[Struct]]:
        for kind in of.__subclasses__():
            yield kind
            yield from kinds(kind)

    with_words: dict[str, type[Struct]] = {
        kind.__name__: kind for kind in kinds(Struct) if kind.__module__.startswith("pagoda.server") and words_of(kind)
    }
    assert "InputMessage" in with_words
    assert [name for name, kind in with_words.items() if not issubclass(kind, Body)] == []
