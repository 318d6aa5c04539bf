"""Schemas, grammars and tools that a caller may send: each is answered, soon, and no other client waits for it."""

import functools
import itertools
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.server.live import FAKE_FLAGS, LiveServer
from tests.server.stall_watch import StallReader, watched_serving

TEMPLATE = "{{ messages[0].content }}{% if tools %}{# Tools are not in the prompt: <tool_call> #}{% endif %}"
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "chat_template": TEMPLATE}
MAX_STALL_S = 1.0
"""Of the event loop, other work of the process included; what this prevents took seconds."""
MAX_ANSWER_S = 20
"""Of wall time, with all schemas sent at once to two busy cores; each takes a second or two alone."""


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveServer, StallReader]]:
    with watched_serving(tmp_path_factory.mktemp("schemas"), *FAKE_FLAGS) as (server, stalls):
        # The first grammar builds the library's form of the vocabulary, which holds the interpreter for a while.
        server.post("/v1/chat/completions", {**CHAT, "guided_choice": ["x"]})
        yield server, stalls


def chain(length: int, link: Callable[[Any], Any]) -> dict[str, Any]:
    """Each schema names the next; the last names the first."""
    return {
        "$ref": "#/$defs/a0",
        "$defs": {f"a{i}": link({"$ref": f"#/$defs/a{(i + 1) % length}"}) for i in range(length)},
    }


TAGGED = [{"type": "object", "properties": {"t": {"const": f"a{i}"}}, "required": ["t"]} for i in range(2000)]
REFUSED: dict[str, Any] = {
    "format": {"format": {}},
    "uniqueItems": {"uniqueItems": True, "maxItems": None},
    "properties": {"anyOf": [{}], "properties": "x"},
    "reference": {"$ref": "http://[x"},
    "id": {"$id": "http://[x", "$ref": "y"},
    "ring": chain(3, lambda link: link),
    "ring of merged schemas": chain(3, lambda link: {"type": "array", **link}),
    "2,000 alternatives": {"oneOf": TAGGED},
    "9,000 properties": {"properties": {f"a{i}": {} for i in range(9000)}},
    "copies of copies": chain(20, lambda link: {"type": "array", "prefixItems": [{"type": "array", **link}] * 10}),
    "references": chain(5000, lambda link: {"allOf": [link]}),
    "nesting": functools.reduce(lambda inner, _: {"items": inner}, range(60), {"not": {}}),
    "patterns": {"allOf": [{"pattern": f".*{i}.*"} for i in range(24)]},
    "a long pattern": {"pattern": "a?" * 60_000},
    "a large count": {"minItems": 10**30},
}
ANSWERED: dict[str, Any] = {
    "large counts": {"type": "array", "minItems": 10**9, "maxItems": 10**18, "items": {"maxLength": 10**9}},
    "300 alternatives": {"oneOf": TAGGED[:300]},
    "recursion": {"type": "array", "items": {"$ref": "#"}},
}


def as_format(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def as_tool(schema: Any, **more: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"a": schema}}
    function = {"name": "f", "strict": True, "parameters": parameters}
    return {"tools": [{"type": "function", "function": function}], **more}


WAYS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "response_format": as_format,
    "guided_json": lambda schema: {"guided_json": json.dumps(schema)},
    "strict tool": as_tool,
    "forced tool": lambda schema: as_tool(schema, tool_choice="required"),
}


@pytest.mark.parametrize("way", WAYS)
def test_schemas_are_answered_and_no_other_client_waits(watched: tuple[LiveServer, StallReader], way: str) -> None:
    server, stalls = watched
    stalls.take()

    def post(schema: Any) -> tuple[int, Any, float]:
        begin_s = time.monotonic()
        status, answer = server.post("/v1/chat/completions", {**CHAT, **WAYS[way](schema)})
        return status, answer, time.monotonic() - begin_s

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(post, itertools.chain(REFUSED.values(), ANSWERED.values())))
    for name, (status, answer, took_s) in zip([*REFUSED, *ANSWERED], answers, strict=True):
        assert took_s < MAX_ANSWER_S, (name, took_s)
        assert status == (200 if name in ANSWERED else 400), (name, answer)
        assert name in ANSWERED or len(answer["error"]["message"]) < 600
    assert stalls.take() < MAX_STALL_S, stalls.stalls()[-3:]
    assert server.wait_idle()["engine_restarts"] == 0
