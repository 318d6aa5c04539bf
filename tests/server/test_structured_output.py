"""Structured output over HTTP: every field that asks for it, and every way to ask wrongly."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import pytest
from pydantic import BaseModel

from tests.server.live import LiveServer

SCHEMA = {
    "type": "object",
    "properties": {"size": {"type": "integer", "minimum": 0, "maximum": 99}, "tag": {"enum": ["a", "b"]}},
    "required": ["size", "tag"],
    "additionalProperties": False,
}
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f=g>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f="],
}
CHAT = {"messages": [{"role": "user", "content": "Describe it"}], "max_tokens": 200, "temperature": 0.8}
TEXT = {"prompt": "It is", "max_tokens": 200, "temperature": 0.8}
AS_JSON: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}},
    {"structured_outputs": {"json": SCHEMA, "disable_fallback": True}},
    {"structured_outputs": {"json": json.dumps(SCHEMA), "disable_any_whitespace": True}},
    {"guided_json": SCHEMA, "guided_decoding_backend": "guidance"},
    {"guided_json": json.dumps(SCHEMA), "guided_whitespace_pattern": " ?"},
]


def texts_of(server: LiveServer, fields: dict[str, Any]) -> list[str]:
    """What chat and text completions answer, whole and streamed; all must have stopped on their own."""
    status, chat = server.post("/v1/chat/completions", {**CHAT, **fields, "n": 2, "seed": 3})
    assert status == 200, chat
    status, text = server.post("/v1/completions", {**TEXT, **fields, "seed": 4})
    assert status == 200, text
    assert {choice["finish_reason"] for choice in (*chat["choices"], *text["choices"])} == {"stop"}
    return [*(one["message"]["content"] for one in chat["choices"]), *(one["text"] for one in text["choices"])]


@pytest.mark.parametrize("fields", AS_JSON, ids=[json.dumps(one)[:40] for one in AS_JSON])
def test_a_schema_is_obeyed(fake_server: LiveServer, fields: dict[str, Any]) -> None:
    for text in texts_of(fake_server, fields):
        jsonschema.validate(json.loads(text), SCHEMA)


def test_choices_expressions_and_grammars_are_obeyed(fake_server: LiveServer) -> None:
    for choice in ({"guided_choice": ["yes", "no"]}, {"structured_outputs": {"choice": ["yes", "no"]}}):
        assert set(texts_of(fake_server, choice)) <= {"yes", "no"}
    for regex in ({"guided_regex": "[0-9]{3}"}, {"structured_outputs": {"regex": "[0-9]{3}"}}):
        assert all(text.isdecimal() and len(text) == 3 for text in texts_of(fake_server, regex))
    for grammar in ({"guided_grammar": 'start: "a" | "b" start'}, {"guided_grammar": 'root ::= "a" | "b" root'}):
        assert all(text.rstrip("b") == "" or text.strip("b") == "a" for text in texts_of(fake_server, grammar))


def test_any_object_and_tags(fake_server: LiveServer) -> None:
    body = {**CHAT, "response_format": {"type": "json_object"}, "max_tokens": 600}
    answers = [fake_server.post("/v1/chat/completions", {**body, "seed": seed})[1] for seed in range(4)]
    for choice in (answer["choices"][0] for answer in answers):
        text = choice["message"]["content"]
        assert text.startswith("{")
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(text), dict)
    status, answer = fake_server.post("/v1/chat/completions", {**CHAT, "response_format": TAG})
    assert status == 200, answer


STREAMED: list[dict[str, Any]] = [
    AS_JSON[0],
    {"guided_json": SCHEMA},
    {"guided_regex": "([0-9]{3} ){9}"},
    {"guided_choice": ["a long answer", "another long answer"]},
    {"guided_grammar": 'start: ("ab" | "c")+'},
    {"guided_grammar": 'root ::= item+\nitem ::= "- " [a-z]+ "\\n"'},
    {"response_format": TAG},
    {"structured_outputs": {"structural_tag": TAG}},
]


@pytest.mark.parametrize("form", STREAMED, ids=[json.dumps(one)[:40] for one in STREAMED])
def test_a_stream_says_the_same_as_a_whole_answer(fake_server: LiveServer, form: dict[str, Any]) -> None:
    client = openai.OpenAI(base_url=f"{fake_server.url}/v1", api_key="none", max_retries=0)
    fields: dict[str, Any] = {"model": "smollm2-135m", "seed": 5, "max_tokens": 60, "extra_body": form}
    messages: Any = CHAT["messages"]
    whole = client.chat.completions.create(messages=messages, **fields).choices[0].message.content
    stream = client.chat.completions.create(messages=messages, **fields, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == whole
    stream = client.completions.create(prompt="It is", **fields, stream=True)
    text = "".join(chunk.choices[0].text for chunk in stream)
    assert text == client.completions.create(prompt="It is", **fields).choices[0].text


def test_each_trigger_in_a_text_is_followed_by_its_tag(fake_server: LiveServer) -> None:
    """A trigger that random text has often: the letter e."""
    tag = {**TAG, "structures": [{"begin": "e=", "schema": SCHEMA, "end": ";"}], "triggers": ["e"]}
    num_tags = 0
    for seed in range(4):
        body = {**TEXT, "response_format": tag, "seed": seed}
        answer = fake_server.post("/v1/completions", body)[1]
        _, *rest = answer["choices"][0]["text"].split("e=")
        assert "e" not in "".join(piece.rpartition("};")[2] for piece in rest[:-1])
        for piece in rest[:-1]:  # the last tag may be cut off
            jsonschema.validate(json.loads(piece[: piece.index("};") + 1]), SCHEMA)
        num_tags += len(rest)
    assert num_tags > 10


def test_the_openai_client_parses_into_a_class(fake_server: LiveServer) -> None:
    class Thing(BaseModel):
        size: int
        ready: bool

    client = openai.OpenAI(base_url=f"{fake_server.url}/v1", api_key="none", max_retries=0)
    parsed = client.chat.completions.parse(
        model="smollm2-135m", messages=[{"role": "user", "content": "x"}], response_format=Thing, max_tokens=200
    )
    assert isinstance(parsed.choices[0].message.parsed, Thing)


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema.schema"),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "structures"),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "sequence", "elements": []}}},
            "response_format",
            "at format/elements: must be a list",
        ),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "response_format", "exclude each other"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "got regex and choice"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs", "did you mean 'regex'"),
        ({"guided_choice": []}, "guided_choice", "at least one string"),
        ({"guided_regex": "((("}, "guided_regex", "regex"),
        ({"guided_grammar": "start: x"}, "guided_grammar", "unknown name"),
        (
            {"guided_json": {"properties": {"a": {"uniqueItems": True}}}},
            "guided_json",
            "at /properties/a/uniqueItems: is not supported",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"items": {"pattern": "("}}}}},
            "response_format",
            "regex parse error: unclosed group",
        ),
        ({"guided_json": {"$ref": "https://a.example/b"}}, "guided_json", "external schemas are not fetched"),
        ({"guided_regex": "a" * 300_000}, "guided_regex", "262144"),
        ({"guided_json": {"format": {}}}, "guided_json", "Expected string for 'format'"),
        ({"guided_json": {"uniqueItems": True, "maxItems": None}}, "guided_json", "at /uniqueItems: is not supported"),
        ({"guided_json": {"anyOf": [{}], "properties": "x"}}, "guided_json", "properties must be an object"),
        ({"guided_json": {"$ref": "http://[x"}}, "guided_json", "external schemas are not fetched"),
        ({"guided_json": {"$id": "http://[x", "$ref": "y"}}, "guided_json", "external schemas are not fetched"),
        ({"guided_json": '{"minLength": 1e400}'}, "guided_json", "out of range"),
        ({"guided_json": {"enum": [1], "maxLength": 10**400}}, "guided_json", "out of range"),
    ],
)
def test_an_invalid_response_format_is_refused(
    fake_server: LiveServer, fields: dict[str, Any], param: str, said: str
) -> None:
    for path, plain in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
        for stream in (False, True):
            status, answer = fake_server.post(path, {**plain, **fields, "stream": stream})
            assert (status, answer["error"]["param"]) == (400, param), answer
            assert said in answer["error"]["message"]


def test_a_grammar_that_exceeds_a_limit_of_the_library_is_refused(fake_server: LiveServer) -> None:
    """At once, if no output gets past the limit; else by the request that does, with an error about its grammar."""
    many = " | ".join(json.dumps(f"{i} item") for i in range(3000))
    for begin, said in (("", "guided_grammar: "), ("/[a-z]{200}/ ", "the grammar cannot be followed after ")):
        for path, plain in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
            body = {**plain, "guided_grammar": f"start: {begin}({many})", "max_tokens": 300}
            status, answer = fake_server.post(path, body)
            assert status == 400, answer
            assert answer["error"]["message"].startswith(said)
            assert "max is 2000" in answer["error"]["message"]
            assert len(answer["error"]["message"]) < 600
    client = openai.OpenAI(base_url=f"{fake_server.url}/v1", api_key="none", max_retries=0)
    stream = client.completions.create(
        model="smollm2-135m",
        prompt="It is",
        max_tokens=300,
        stream=True,
        extra_body={"guided_grammar": body["guided_grammar"]},
    )
    pieces: list[str] = []
    with pytest.raises(openai.APIError, match="the grammar cannot be followed after .* tokens of output"):
        pieces.extend(chunk.choices[0].text for chunk in stream)
    assert len("".join(pieces)) > 150
    assert fake_server.wait_idle()["engine_restarts"] == 0


def test_reasoning_is_not_constrained_by_a_structure(fake_server: LiveServer) -> None:
    """The prompt ends with an open <think>: the form holds from </think> on."""
    template = "{{ messages[0].content }}{# </think> #}<think>\n"
    body = {**CHAT, "chat_template": template, "guided_choice": ["yes"], "max_tokens": 12}
    status, answer = fake_server.post("/v1/chat/completions", body)
    assert status == 200, answer
    message = answer["choices"][0]["message"]
    assert len(message["reasoning_content"]) > 12
    assert message["content"] == ""
    closed = {**body, "chat_template": "{{ messages[0].content }}{# </think> #}"}
    assert fake_server.post("/v1/chat/completions", closed)[1]["choices"][0]["message"]["content"] == "yes"


def test_one_prompt_after_another_and_many_at_once(fake_server: LiveServer) -> None:
    """New grammars compile while others run; each request gets its own."""

    def ask(i: int) -> str:
        body = {**TEXT, "prompt": ["a", "b"], "guided_choice": [f"answer {i}"]}
        status, answer = fake_server.post("/v1/completions", body)
        assert status == 200, answer
        texts = {choice["text"] for choice in answer["choices"]}
        assert len(texts) == 1
        return texts.pop()

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(24))) == [f"answer {i}" for i in range(24)]
    fake_server.wait_idle()
