"""What runs on the event loop does not grow with a request's body: counted, for every field of every route.

The routes and their fields are read from the server's own list, so a new one is tested when it is declared.
"""

import json
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from types import FrameType
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from msgspec import inspect as kinds
from starlette.responses import Response

from pagoda.base.outputs import CompletionOutput, Logprob, RequestOutput
from pagoda.base.server_config import ServerConfig, ServerLimits
from pagoda.core.request import Request
from pagoda.engine.async_engine import AsyncEngine
from pagoda.server import pooling, respond, scores, sending
from pagoda.server.app import _INVOKED, ENDPOINTS
from pagoda.server.dialects.ollama import dialect as ollama
from pagoda.server.dialects.openai.answers import PromptTokensDetails
from pagoda.server.dialects.responses import dialect as responses
from pagoda.server.dialects.responses import events as response_events
from pagoda.server.pooling import Pooled, PoolingUsage
from pagoda.server.render import Rendered
from pagoda.server.routing import Endpoint
from pagoda.server.sending import json_response
from pagoda.server.stored import run
from pagoda.server.turn import TurnRequest
from tests.server.in_process import served

SIZES = (16_000, 128_000, 500_000)
"""Bytes of a field: all of them are beyond what is parsed on the loop; some are within the limits and some are not."""
MOST_MORE = 600
"""So many more lines and calls may run on the loop for a larger body. A loop over its entries has thousands."""
LARGE = 10_000
"""A string or container of more entries is large: no function in C may be called where one is at hand."""
HARMLESS = {"len", "isinstance", "id", "next", "get", "append", "type", "items", "getattr", "removeprefix"}
"""Functions in C that take the same time for a value of any size."""
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
BASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "chat_template": TEMPLATE},
    "/v1/chat/completions/batch": {"messages": [[{"role": "user", "content": "Hi"}]] * 2, "chat_template": TEMPLATE},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/messages": {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
    "/v1/messages/count_tokens": {"model": "m", "messages": [{"role": "user", "content": "Hi"}]},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 1},
    "/v1/conversations/{conversation_id}": {"metadata": None},
    "/v1/conversations/{conversation_id}/items": {"items": [{"role": "user", "content": "Hi"}]},
    "/infill": {"input_prefix": "Hi"},
    "/v1/batches": {"input_file_id": "file-none", "endpoint": "/v1/completions"},
    "/api/chat": {"messages": [{"role": "user", "content": "Hi"}]},
    "/api/generate": {"prompt": "Hi", "raw": True},
    "/api/embed": {"input": "Hi"},
    "/api/embeddings": {"prompt": "Hi"},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [1]},
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "a"},
    "/v1/unload_lora_adapter": {"lora_name": "a"},
    **{path: {"input": "Hi"} for path in ("/v1/embeddings", "/pooling", "/classify")},
    **{path: {"text_1": "Hi", "text_2": "you"} for path in ("/v1/score", "/score")},
    **{path: {"query": "Hi", "documents": ["you"]} for path in ("/v1/rerank", "/v2/rerank", "/rerank")},
}
"""What routes need besides the field that is large."""


def values(kind: kinds.Type, size: int) -> Iterator[Any]:
    """Yield values of about `size` bytes that a field of this type may have, whatever its limits are."""
    match kind:
        case kinds.StrType():
            yield "a b " * (size // 4)
        case kinds.ListType():
            for one in _small(kind.item_type):
                yield [one] * (size // (len(json.dumps(one)) + 2))
            if isinstance(kind.item_type, kinds.StrType | kinds.UnionType):
                yield ["a b " * (size // 4)]
        case kinds.DictType():
            yield {f"{number}": 1 for number in range(size // 10)}
            yield {"a": ["b"] * (size // 5)}
        case kinds.StructType():
            for field in kind.fields:
                for value in values(field.type, size):
                    yield {**_least(kind), field.encode_name: value}
        case kinds.UnionType():
            for one in kind.types:
                yield from values(one, size)
        case kinds.Metadata():
            yield from values(kind.type, size)
        case kinds.AnyType():
            yield ["a"] * (size // 5)
        case _:
            pass


def _small(kind: kinds.Type) -> Iterator[Any]:
    """Yield small values of a type."""
    match kind:
        case kinds.StrType():
            yield "a"
        case kinds.IntType():
            yield 1
        case kinds.ListType():
            yield [one] if (one := next(_small(kind.item_type), None)) is not None else []
        case kinds.DictType():
            yield {"role": "user", "content": "a"}
            yield {"role": "user", "content": [{"type": "text", "text": "a"}], "name": None}
        case kinds.StructType():
            yield _least(kind)
        case kinds.UnionType():
            for one in kind.types:
                yield from _small(one)
        case kinds.Metadata():
            yield from _small(kind.type)
        case _:
            pass


def _least(kind: kinds.StructType) -> dict[str, Any]:
    """Return an object with the fields that this type needs."""
    return {field.encode_name: next(_small(field.type), 0) for field in kind.fields if field.required}


def bodies(endpoint: Endpoint, size: int) -> Iterator[tuple[str, bytes]]:
    """Yield bodies of about `size` bytes for a route, and what is large in each."""
    base = BASES.get(endpoint.path, {})
    if endpoint.path == "/invocations":
        for name in _INVOKED:
            yield f"{name} and many keys", msgspec.json.encode({**{f"k{i}": 1 for i in range(size // 10)}, name: "a"})
        return
    yield "unknown fields", msgspec.json.encode({**base, **{f"k{i}": 1 for i in range(size // 10)}})
    assert endpoint.body is not None
    info = msgspec.inspect.type_info(endpoint.body)
    assert isinstance(info, kinds.StructType)
    for field in info.fields:
        for number, value in enumerate(values(field.type, size)):
            body = {**base, field.encode_name: value}
            if field.encode_name == "messages":  # which excludes the others
                body = {name: one for name, one in body.items() if name not in ("prompt", "input")}
            yield f"{field.encode_name} {number}", msgspec.json.encode(body)
            if field.encode_name in ("prompt", "input", "text_2", "documents"):
                body["truncate_prompt_tokens"] = 3
                yield f"{field.encode_name} {number}, truncated", msgspec.json.encode(body)


class LoopWork:
    """Counts what this thread runs: lines of pagoda's code, and calls of any. `near_large`: see LARGE."""

    def __init__(self) -> None:
        self.count = 0
        self.near_large: set[str] = set()

    def __enter__(self) -> "LoopWork":
        sys.settrace(self._trace)
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, arg: object) -> Any:
        if "/pagoda/" not in frame.f_code.co_filename:
            return None
        self.count += event == "line"
        return self._trace

    def _profile(self, frame: FrameType, event: str, called: Any) -> None:
        self.count += event in ("call", "c_call")
        if event != "c_call" or "/pagoda/" not in frame.f_code.co_filename or called.__name__ in HARMLESS:
            return
        for value in frame.f_locals.values():
            if isinstance(value, str | bytes | list | dict | tuple | set) and len(value) > LARGE:
                self.near_large.add(f"{frame.f_code.co_qualname} calls {called.__name__}")


async def work_of(http: httpx.AsyncClient, path: str, body: bytes, method: str = "POST") -> LoopWork:
    request = http.build_request(method, path, content=body, headers={"Content-Type": "application/json"})
    with LoopWork() as work:
        answer = await http.send(request)
    assert answer.status_code in (200, 400, 404, 409, 429), answer.text
    return work


READING = [one for one in ENDPOINTS if one.path == "/invocations" or (one.body is not None and not one.is_form)]
"""The routes that read a body of JSON. Forms are read as they come, in pieces."""
FORMS = [one.path for one in ENDPOINTS if one.is_form]


@pytest.mark.parametrize("path", FORMS)
def test_no_piece_of_a_form_is_read_before_it_is_counted(path: str) -> None:
    num_read = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal num_read
        for piece in (b"--a\r\n", b'Content-Disposition: form-data; name="language"\r\n\r\nen', b"\r\n--a--\r\n"):
            num_read += 1
            yield piece

    async def test(http: httpx.AsyncClient) -> None:
        headers = {"Content-Type": "multipart/form-data; boundary=a", "Authorization": "Bearer x"}
        counted = await http.post(path, content=pieces(), headers=headers)
        assert (counted.status_code, counted.json()["error"]["param"]) == (400, "file")
        assert num_read == 3
        assert (await http.post(path, content=pieces(), headers=headers)).status_code == 429
        assert num_read == 3

    served(test, ServerConfig(api_keys=("x",), server_limits=ServerLimits(requests_per_minute_per_key=1)), speech=True)


@pytest.mark.parametrize("endpoint", {one.handler: one for one in READING}.values(), ids=lambda one: one.path)
def test_what_runs_on_the_loop_does_not_grow_with_the_body(endpoint: Endpoint) -> None:
    near_large: set[str] = set()
    grown: dict[str, list[int]] = {}

    async def test(http: httpx.AsyncClient) -> None:
        made = (await http.post("/v1/conversations", json={})).json()["id"]
        path = endpoint.path.replace("{conversation_id}", made)
        cases = [dict(bodies(endpoint, size)) for size in SIZES]
        assert cases[0].keys() == cases[1].keys() == cases[2].keys()
        for what in cases[0]:
            counts: list[int] = []
            for case in cases:
                work = await work_of(http, path, case[what], endpoint.method)
                counts.append(work.count)
                near_large.update(f"{what}: {one}" for one in work.near_large)
            if max(counts) > counts[0] + MOST_MORE:
                grown[what] = counts

    served(test, ServerConfig(ollama=True))
    assert grown == {}, f"lines and calls on the loop, for bodies of {SIZES} bytes"
    assert near_large == set(), "calls of functions in C that may read a large value"


@pytest.mark.parametrize("num_items", [1, 100])
def test_what_runs_on_the_loop_does_not_grow_with_what_comes_before_an_input(num_items: int) -> None:
    works: list[LoopWork] = []

    async def test(http: httpx.AsyncClient) -> None:
        for size in SIZES:
            item = {"role": "user", "content": "a b " * (size // num_items // 4)}
            made = (await http.post("/v1/conversations", json={"items": [item] * num_items})).json()["id"]
            body = json.dumps({"input": "Hi", "conversation": made, "max_output_tokens": 1}).encode()
            works.append(await work_of(http, "/v1/responses", body))

    served(test)
    assert max(work.count for work in works) <= works[0].count + MOST_MORE
    assert set().union(*(work.near_large for work in works)) == set()


@pytest.mark.parametrize("returns", [True, False])
def test_large_rankings_are_made_on_a_thread(monkeypatch: pytest.MonkeyPatch, returns: bool) -> None:
    class Scores:
        def scores(self, vectors: list[np.ndarray]) -> list[float]:
            return [0.5] * 2

    async def score(*_: object) -> tuple[Pooled, Scores]:
        return Pooled("id", 0, "m", [np.ones(4, np.float32)] * 2, PoolingUsage(1, 1, PromptTokensDetails(0))), Scores()

    def encode(answer: Any) -> Response:
        threads.append(threading.current_thread())
        return json_response(answer)

    async def test(http: httpx.AsyncClient) -> None:
        body = {"query": "a", "documents": ["b" * 500_000, "c"], "return_documents": returns}
        assert (await http.post("/rerank", json=body)).status_code == 200

    threads: list[threading.Thread] = []
    monkeypatch.setattr(scores, "_score", score)
    monkeypatch.setattr(pooling, "json_response", encode)
    served(test)
    assert [one is threading.main_thread() for one in threads] == [not returns]


NUM_TOKENS, MOST_BYTES_ON_LOOP = 1_500, 128_000
"""Of an answer whose tokens have a kilobyte of log-probabilities each; so much of it may be encoded on the loop."""
_ASKED = {"stream": True, "model": "m"}
_TOP = {"top_logprobs": 20, "include": ["message.output_text.logprobs"], "input": "Hi"}
STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "responses": ("/v1/responses", {**_TOP, "store": False}),
    "stored": ("/v1/responses", _TOP),
    "in the background": ("/v1/responses", {**_TOP, "background": True}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user"}], "logprobs": True, "top_logprobs": 20}),
    "completions": ("/v1/completions", {"prompt": "Hi", "logprobs": 20}),
    "messages": ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}),
    "ollama": ("/api/generate", {"prompt": "Hi"}),
}


@pytest.mark.parametrize("ending", ["stop", "error"])
@pytest.mark.parametrize("name", STREAMS)
def test_what_is_encoded_on_the_loop_does_not_grow_with_the_answer(
    monkeypatch: pytest.MonkeyPatch, name: str, ending: str
) -> None:
    encoded: list[int] = []  # bytes at a time, on the loop
    loop = threading.current_thread()
    top = {number: Logprob(-1.5, number + 1, "abc") for number in range(20)}

    async def stream(_: AsyncEngine, request: Request) -> AsyncIterator[RequestOutput]:
        for number in range(NUM_TOKENS):
            is_last = number == NUM_TOKENS - 1
            output = CompletionOutput(0, "a", [1], logprobs=[top], finish_reason=ending if is_last else None)
            error = "broken" if is_last and ending == "error" else None
            yield RequestOutput("r", outputs=[output], finished=is_last, error=error)

    async def rendered(http: object, model: object, request: TurnRequest) -> list[Rendered]:
        return [Rendered("Hi", request.params)]

    def counting(encode: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
        def count(value: Any) -> bytes:
            data = encode(value)
            if threading.current_thread() is loop:
                encoded.append(len(data))
            return data

        return count

    async def test(http: httpx.AsyncClient) -> None:
        path, asked = STREAMS[name]
        answer = await http.post(path, json=_ASKED | asked)
        assert answer.status_code == 200, answer.text
        assert len(answer.text) > NUM_TOKENS
        assert ("broken" in answer.text) == (ending == "error")

    monkeypatch.setattr(AsyncEngine, "stream", stream)
    monkeypatch.setattr(respond, "render", rendered)
    encoders = [(module, "_encode") for module in (sending, ollama, response_events)]
    for module, encoder in (*encoders, (responses, "encode"), (run, "encode")):
        monkeypatch.setattr(module, encoder, counting(getattr(module, encoder)))
    served(test, ServerConfig(ollama=True))
    assert 0 < max(encoded) < MOST_BYTES_ON_LOOP
