"""Ollama's API: the ollama package, the lines of streams, and how conversations reach the template."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from starlette.types import Message

from pagoda.base.errors import RequestError
from pagoda.base.request_limits import RequestLimits
from pagoda.base.server_config import ServerConfig
from pagoda.server.body_reader import parse_body, unknown_fields
from pagoda.server.dialects.ollama.bodies import OllamaChatRequest, OllamaGenerateRequest, template_messages
from pagoda.server.dialects.ollama.dialect import LINES, OllamaWriter, model_name
from pagoda.server.errors import ApiError
from pagoda.server.request_state import RequestState
from pagoda.server.sending import EventStream
from pagoda.server.thinking import Thinking
from tests.server.in_process import served
from tests.server.live import LiveServer
from tests.server.test_answers import ask, check
from tests.server.test_tools import SAID, THINKING, scripted_server

PYTHON = Path(f"{sys.prefix}-clients") / "bin" / "python"
SCRIPT = Path(__file__).parent / "client_scripts" / "ollama_client.py"
MODEL = "smollm2-135m"
ZURICH, BERN = ["weather", {"city": "Zürich", "days": 2}], ["weather", {"city": "Bern", "days": 2}]


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with scripted_server(tmp_path_factory.mktemp("ollama"), THINKING, "--ollama") as server:
        yield server


def run_client(server: LiveServer, asks: str) -> Any:
    """What the ollama package has seen."""
    if not PYTHON.exists():
        pytest.skip(f"no {PYTHON}; install it with: make .venv-clients/.installed")
    done = subprocess.run([str(PYTHON), str(SCRIPT), server.url, asks], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def saw(thinking: LiveServer) -> dict[str, Any]:
    seen: dict[str, Any] = run_client(thinking, "all")
    return seen


def test_the_ollama_package_sees_the_same_whole_and_streamed(saw: dict[str, Any]) -> None:
    for name in ("calls", "thought", "hidden", "text", "cut", "cut_call", "stopped"):
        assert saw[name][0] == saw[name][1], name
    expected: dict[str, tuple[str, str, list[Any], str]] = {
        "calls": ("Let me look.", "", [ZURICH, BERN], "stop"),
        "thought": ("", "Where? 2 < 3, so Zürich.\n", [ZURICH], "stop"),
        "hidden": ("", "", [ZURICH], "stop"),
        "text": (SAID[3], "", [], "stop"),
        "cut": ("No <tool is", "", [], "length"),
        "cut_call": ("Let me look.", "", [["weather", {"city": "Zü"}]], "length"),
        "stopped": ("No <tool is ", "", [], "stop"),
    }
    for name, (content, thought, calls, reason) in expected.items():
        one = saw[name][0]
        assert (one["content"], one["thinking"], one["calls"], one["done"]) == (content, thought, calls, reason), name
    assert saw["cut"][0]["tokens"] == 4


def test_an_agent_of_the_ollama_package_goes_on_after_its_calls(saw: dict[str, Any]) -> None:
    assert saw["agent"] == [2, SAID[3]]


def test_calls_have_their_index_in_both_places(thinking: LiveServer) -> None:
    """In Ollama's, and in OpenAI's: litellm puts streamed calls together by that."""
    tools = [{"type": "function", "function": {"name": "weather"}}]
    status, answer = thinking.post("/api/chat", {**CHAT, "tools": tools, "stream": False})
    calls = answer["message"]["tool_calls"]
    assert [(status, call["index"], call["function"]["index"]) for call in calls] == [(200, 0, 0), (200, 1, 1)]


def test_prompts_are_answered_and_raw_ones_continued(saw: dict[str, Any]) -> None:
    texts = saw["texts"]
    assert (texts["whole"], texts["streamed"], texts["raw"]) == (SAID[3], SAID[3], [SAID[3], True])
    assert texts["num_lines"] > 5
    assert texts["loaded"] == ["load", "", "load"]
    num_prompt, prompt_ns, num_output, output_ns, total_ns, load_ns = zip(*[iter(texts["counts"])] * 2, strict=True)
    assert min(num_prompt) > 3
    assert num_output == (19, 19)
    assert load_ns == (0, 0)
    for prompt, output, total in zip(prompt_ns, output_ns, total_ns, strict=True):
        assert total > 10_000  # nanoseconds: no request takes less than 10 microseconds
        assert 0 < prompt + output < total + 2e6  # parts are rounded to 0.1 ms


def test_errors_of_the_ollama_package_name_its_own_fields(saw: dict[str, Any]) -> None:
    refused = {
        "model": "unknown model 'other'",
        "temperature": "options.temperature=-3.0",
        "num_predict": "options.num_predict=1000000 is more than",
        "mirostat": "options.mirostat: this server does not support mirostat",
        "long": "maximum context length is 2048",
        "image": "messages[0].images[0]",
        "tool": "tools[0].function.name",
        "format": "format: at /properties/a/uniqueItems",
        "suffix": "suffix: the vocabulary of this model has no tokens for filling in the middle",
        "template": "template: this server does not support",
        "pull": "unknown model 'llama9': neither in the catalog nor a hub id",
    }
    assert saw["errors"].keys() == refused.keys()
    for name, text in refused.items():
        for status, message in saw["errors"][name]:  # whole, and for a stream
            assert status == (404 if name in ("model", "pull") else 400), name
            assert text in message, name


def test_the_ollama_package_embeds_and_nothing_is_cut_unless_asked(saw: dict[str, Any]) -> None:
    seen = saw["embeddings"]
    assert seen["same"] == [True, 2, 8]
    assert seen["length"] == pytest.approx(1)
    assert seen["older"] > 0
    assert seen["counts"] == [2, 2048]
    assert seen["refused"][0] == 400


def test_the_ollama_package_lists_and_shows_the_model(saw: dict[str, Any]) -> None:
    capabilities, info, template = saw["show"]
    assert (capabilities, template) == (["completion", "tools", "thinking"], THINKING)
    assert (info["general.architecture"], info["llama.context_length"]) == ("llama", 2048)
    name, size, parameters, family = saw["list"]
    assert (name, size > 10**7, parameters, family) == (MODEL, True, "134.52M", "llama")
    assert saw["ps"] == [MODEL, 2048, True]


def test_the_ollama_package_pulls_copies_and_deletes(saw: dict[str, Any]) -> None:
    assert saw["names"] == {
        "pulled": ["success", ["pulling manifest", "success"]],
        "copied": ["success", [MODEL, "gpt-oss"]],
        "answered": SAID[3],
        "deleted": ["success", [MODEL]],
        "refused": [404, 400],
    }


def test_answers_of_the_ollama_package_have_the_form_that_is_asked_for(real_server: LiveServer) -> None:
    any_json, streamed_json, *by_schema = run_client(real_server, "forms")
    assert (any_json[0], streamed_json[0]) == ("{", "{")  # num_predict may cut off the rest
    for answer in map(json.loads, by_schema):
        assert answer.keys() == {"a", "b"}
        assert answer["b"] in ("x", "y")


CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "options": {"seed": 0}}
GENERATE = {"model": MODEL, "prompt": "Hi", "options": {"seed": 2}}
REQUESTS: tuple[tuple[str, str, Any], ...] = (
    ("POST", "/api/chat", CHAT),
    ("POST", "/api/chat", {**CHAT, "tools": [{"type": "function", "function": {"name": "weather"}}]}),
    ("POST", "/api/chat", {**CHAT, "stream": False}),
    ("POST", "/api/chat", {"model": MODEL}),
    ("POST", "/api/chat", {**CHAT, "model": "other"}),
    ("POST", "/api/generate", GENERATE),
    ("POST", "/api/generate", {**GENERATE, "stream": False}),
    ("POST", "/api/generate", {"model": f"{MODEL}:latest"}),
    ("POST", "/api/embed", {"model": MODEL, "input": ["a", "b"]}),
    ("POST", "/api/embed", {"model": MODEL, "input": []}),
    ("POST", "/api/embeddings", {"model": MODEL, "prompt": "a"}),
    ("POST", "/api/show", {"name": f"{MODEL}:latest"}),
    ("POST", "/api/show", {"model": "other"}),
    ("GET", "/api/tags", None),
    ("GET", "/api/ps", None),
    ("GET", "/api/version", None),
    ("POST", "/api/pull", {"model": MODEL}),
    ("POST", "/api/pull", {"model": MODEL, "stream": False}),
    ("POST", "/api/pull", {"model": "other"}),
    ("POST", "/api/copy", {"source": "other", "destination": "x"}),
    ("DELETE", "/api/delete", {"model": "other"}),
)


def test_answers_and_lines_are_as_described(thinking: LiveServer) -> None:
    page: dict[str, Any] = json.loads(thinking.get("/openapi.json")[1])
    for schema in page["components"]["schemas"].values():
        if "properties" in schema:
            schema["additionalProperties"] = False
    for method, path, body in REQUESTS:
        status, media_type, text = ask(thinking, method, path, body)
        content = page["paths"][path][method.lower()]["responses"][str(status)]["content"]
        assert media_type in content
        schema = content["application/json"]["schema"]
        lines = [json.loads(one) for one in text.splitlines()]
        assert (len(lines) > 1) == (media_type == LINES)
        for line in lines:
            check(page, schema, line)
    asked = {path for _, path, _ in REQUESTS}
    assert asked == {
        path for path in page["paths"] if path.startswith("/api/") and not path.startswith(("/api/v0/", "/api/v1/"))
    }
    assert 'handler="/api/chat"' in thinking.get("/metrics")[1]


def test_a_server_for_ollamas_clients_says_that_it_is_running(thinking: LiveServer, fake_server: LiveServer) -> None:
    assert thinking.get("/") == (200, "Ollama is running")
    status, text = fake_server.get("/")
    assert (status, "there is no route GET /; /docs lists" in text) == (404, True)


def test_a_route_that_is_not_there_is_a_404_in_the_form_of_its_api(thinking: LiveServer) -> None:
    for path in ("/api/create", "/api/blobs/sha256:00", "/api/nothing"):
        status, answer = thinking.post(path, {})
        assert (status, list(answer)) == (404, ["error"])
        assert answer["error"].startswith(f"there is no route POST {path}; ")


def test_a_schema_that_lists_properties_has_no_others() -> None:
    """As with Ollama: what pydantic makes of a class says nothing of others, and small models add them without end."""
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    params = body_of(messages=[{"role": "user", "content": "Hi"}], format=schema).params({})
    assert params.structured_outputs.disable_additional_properties


def test_an_error_during_a_stream_is_its_last_line() -> None:
    sent: list[bytes] = []

    async def events() -> AsyncGenerator[bytes, None]:
        yield b'{"done":false}\n'
        raise ApiError(503, "the engine is gone")

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message.get("body", b""))

    stream = EventStream(events(), lambda: None, OllamaWriter.framing)
    asyncio.run(stream({"type": "http", "state": RequestState("r")}, receive, send))
    assert stream.headers["content-type"] == LINES
    assert b"".join(sent) == b'{"done":false}\n{"error":"the engine is gone"}\n'


def test_a_missing_key_is_refused_in_ollamas_form() -> None:
    async def test(http: httpx.AsyncClient) -> None:
        for path in ("/api/chat", "/api/generate", "/api/embed", "/api/pull"):
            answer = await http.post(path, json={})
            assert (answer.status_code, list(answer.json())) == (401, ["error"])
        answer = await http.post("/api/chat", json={}, headers={"Authorization": "Bearer x"})
        assert (answer.status_code, answer.json()["done_reason"]) == (200, "load")

    served(test, ServerConfig(ollama=True, api_keys=("x",)))


def test_the_tag_latest_may_be_left_out_or_added() -> None:
    state: Any = SimpleNamespace(models=SimpleNamespace(all_names=("a", "b:latest", "c:7b")))
    asked = ("a", "a:latest", "b", "b:latest", "c:7b", "c", None)
    assert [model_name(state, name) for name in asked] == ["a", "a", "b:latest", "b:latest", "c:7b", "c", None]


def body_of(kind: Any = OllamaChatRequest, **fields: Any) -> Any:
    return parse_body(msgspec.json.encode({"model": MODEL, **fields}), kind, RequestLimits())


def call(name: str, **more: Any) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": {"x": "ü"}}, **more}


def test_answers_of_tools_find_their_calls_by_name_else_by_order() -> None:
    calls = [call("f"), call("g"), call("f"), call("h", id="own")]
    body = body_of(
        messages=[
            {"role": "user", "content": "?", "images": ["AAAA"]},
            {"role": "assistant", "thinking": "Hm", "tool_calls": calls},
            {"role": "tool", "tool_name": "g", "content": "1"},
            {"role": "tool", "content": "2"},
            {"role": "tool", "tool_name": "f", "content": "3"},
            {"role": "tool", "tool_call_id": "own", "content": "4"},
            {"role": "tool", "tool_name": "f", "content": "5"},
        ]
    )
    user, assistant, *tools = template_messages(body.messages)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    assert user["content"] == [image, {"type": "text", "text": "?"}]
    assert assistant["reasoning_content"] == "Hm"
    assert "content" not in assistant
    assert [one["id"] for one in assistant["tool_calls"]] == ["call00000", "call00001", "call00002", "own"]
    assert assistant["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": "ü"}'}
    assert [one["tool_call_id"] for one in tools] == ["call00001", "call00000", "call00002", "own", ""]


def test_options_and_thinking_reach_the_engine_and_the_template() -> None:
    options = {"num_predict": -1, "top_k": 3, "repeat_penalty": 1.5, "seed": -1, "stop": ["a"], "num_ctx": 9}
    body = body_of(messages=[{"role": "user", "content": "Hi"}], options=options, think="low", format="json")
    params = body.params({"temperature": 0.5, "max_tokens": 7})
    assert (params.max_tokens, params.top_k, params.repetition_penalty, params.seed) == (None, 3, 1.5, None)
    assert (params.temperature, params.stop, params.structured_outputs.json_object) == (0.5, ("a",), True)
    conversation = body.conversation(template_messages(body.messages), [])
    assert conversation.thinking == Thinking(effort="low")
    assert not conversation.continue_final_message
    plain = body_of(messages=[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Oh"}])
    conversation = plain.conversation(template_messages(plain.messages), [])
    assert (conversation.thinking, conversation.continue_final_message) == (Thinking(), True)


def test_texts_of_one_role_that_follow_each_other_are_one_message() -> None:
    def said(role: str, content: str, **more: Any) -> dict[str, Any]:
        return {"role": role, "content": content, **more}

    call = {"function": {"name": "f", "arguments": {}}}
    turns = [said("system", "Be short."), said("system", "Be kind."), said("user", "Hi"), said("user", "", images=None)]
    turns += [said("assistant", "", tool_calls=[call, call]), said("tool", "a"), said("tool", "b")]
    turns += [said("user", "And now?"), said("user", "?", images=["AAAA"]), said("assistant", "So", thinking="Hm")]
    body = body_of(messages=[*turns, said("assistant", "it")])
    system, user, _, *tools, also, shown, last = template_messages(body.messages)
    assert (system["content"], user["content"], also["content"]) == ("Be short.\n\nBe kind.", "Hi", "And now?")
    assert ([one["content"] for one in tools], shown["content"][1]["text"]) == (["a", "b"], "?")
    assert (last["content"], last["reasoning_content"]) == ("So\n\nit", "Hm")
    names = {0: 0, 1: 2, 2: 4, 3: 5, 4: 6, 5: 7, 6: 8, 7: 9}
    for at, own in names.items():
        assert body.origin(f"messages[{at}].content[0]") == f"messages[{own}].images[0]"
    assert (body.origin("messages"), body.origin("max_tokens")) == ("messages", "options.num_predict")


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        (OllamaGenerateRequest, {"prompt": "a", "raw": True, "system": "b"}, "system"),
        (OllamaGenerateRequest, {"prompt": "a", "context": [1]}, "context"),
        (OllamaGenerateRequest, {"prompt": "a", "options": {"typical_p": 0.5}}, "options.typical_p"),
        (OllamaChatRequest, {"logprobs": True}, "logprobs"),
        (OllamaChatRequest, {"format": "xml"}, "format"),
        (OllamaChatRequest, {"think": "much"}, "think"),
        (OllamaChatRequest, {"options": {"stop": ["a"] * 1000}}, "options.stop"),
    ],
)
def test_what_would_change_the_answer_and_is_not_served_is_refused(kind: Any, fields: Any, param: str) -> None:
    data = msgspec.json.encode(fields)

    def read() -> None:
        parse_body(data, kind, RequestLimits())
        unknown_fields(data, kind)

    with pytest.raises(RequestError) as refused:
        read()
    assert refused.value.param == param
