"""Chat templates are rendered on threads of the server: a slow or faulty one concerns its own request only."""

import contextlib
import json
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.live import FAKE_FLAGS, LiveServer
from tests.server.stall_watch import StallReader, watched_serving

USER = {"role": "user", "content": "x"}
ENDLESS = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
CHAT = {"messages": [USER], "max_tokens": 2}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveServer, StallReader]]:
    defaults = ("--default-chat-template-kwargs", '{"mood": "calm"}')
    with watched_serving(tmp_path_factory.mktemp("templates"), *FAKE_FLAGS, *defaults) as both:
        yield both


@contextlib.contextmanager
def posted(server: LiveServer, body: dict[str, object]) -> Iterator[socket.socket]:
    data = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(data)}"
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), 30) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n" + data)
        yield connection


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ range(10**9) }}", "Range too big"),
        ("{% if %}", "not valid"),
        ("{{ " + "(" * 20_000 + ")" * 20_000 + " }}", "nested too deeply"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_a_template_that_fails_is_a_400(
    server: tuple[LiveServer, StallReader], template: str, said: str, path: str
) -> None:
    status, answer = server[0].post(path, {"messages": [USER], "chat_template": template})
    assert (status, said in answer["error"]["message"]) == (400, True), answer
    assert server[0].post("/v1/chat/completions", CHAT)[0] == 200


def test_the_servers_variables_and_no_nulls_reach_the_template(server: tuple[LiveServer, StallReader]) -> None:
    asked = {"messages": [{**USER, "name": None}], "chat_template": "{{ mood }}{{ messages[0].keys() | join(' ') }}"}
    for given, text in (({}, "calm"), ({"chat_template_kwargs": {"mood": "gay"}}, "gay")):
        status, answer = server[0].post("/tokenize", {**asked, **given, "return_token_strs": True})
        assert (status, "".join(answer["token_strs"])) == (200, f"{text}roleĠcontent")


def test_tools_reach_the_template_as_they_were_sent(server: tuple[LiveServer, StallReader]) -> None:
    """Every key, in its order, as `LLM.chat` passes them."""
    function = {"description": "d", "name": "f", "return": {"type": "string"}, "parameters": None, "x": [1]}
    tools = [{"function": function, "type": "function", "extra": {"b": 1, "a": 2}}]
    asked = {"messages": [USER], "tools": tools, "chat_template": "{{ tools | tojson }}"}
    tokens = server[0].post("/tokenize", asked)[1]["tokens"]
    assert server[0].post("/detokenize", {"tokens": tokens})[1]["prompt"] == json.dumps(tools)


@pytest.mark.parametrize(
    ("tools", "param"),
    [([{"function": {}}], "tools[0].function.name"), ([{"function": {"name": 5}}], "tools[0].function.name")],
)
def test_a_malformed_tool_is_named(server: tuple[LiveServer, StallReader], tools: object, param: str) -> None:
    for path in ("/tokenize", "/v1/chat/completions"):
        status, answer = server[0].post(path, {"messages": [USER], "tools": tools})
        assert (status, answer["error"]["param"]) == (400, param)


def test_a_server_of_a_base_model_warns_at_its_start(gemma_server: LiveServer, fake_server: LiveServer) -> None:
    warning = "has no chat template: /v1/completions works"
    assert f"gemma3-270m {warning}" in gemma_server.log.read_text()
    assert warning not in fake_server.log.read_text()


def test_a_slow_template_occupies_its_thread_only(tmp_path: Path) -> None:
    """Others are answered beside it, and the event loop is never kept for long. Two signals end the server."""
    with watched_serving(tmp_path, *FAKE_FLAGS) as (live, stalls):
        with posted(live, {**CHAT, "chat_template": ENDLESS}) as slow:
            assert live.post("/v1/chat/completions", CHAT)[0] == 200
            longest_s: list[float] = []
            for _ in range(3):  # other processes may keep the thread that renders, and has the GIL, from the core
                stalls.take()
                for _ in range(10):
                    assert live.get("/health")[0] == 200
                longest_s.append(stalls.take())
            assert min(longest_s) < 0.1
            assert live.post("/v1/chat/completions", CHAT)[0] == 200
            assert select.select([slow], [], [], 0)[0] == [], "it is not answered yet"
            live.process.send_signal(signal.SIGTERM)
            live.wait_draining()
        while live.process.poll() is None:
            live.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                live.process.wait(1)


def test_chats_at_once_are_all_rendered(server: tuple[LiveServer, StallReader]) -> None:
    live, _ = server
    statuses: list[int] = []

    def ask(number: int) -> None:
        for _ in range(10):
            answer = live.post(
                "/tokenize", {"messages": [{**USER, "content": f"number {number}"}], "return_token_strs": True}
            )
            statuses.append(answer[0] if f"numberĠ{number}" in "".join(answer[1]["token_strs"]) else 0)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert statuses == [200] * 80
