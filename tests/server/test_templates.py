"""Chat templates that loop or swallow memory: the request ends at the deadline, others and SIGTERM are not held up."""

import contextlib
import json
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.live import FAKE_ENGINE, FAKE_FLAGS, LiveServer, children, is_running, serving
from tests.server.stall_watch import StallReader, watched_serving

USER = {"role": "user", "content": "x"}
LOOP = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
CHAT = {"messages": [USER], "max_tokens": 2}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveServer, StallReader]]:
    """Stops templates so late that only one without an end meets its deadline."""
    folder = tmp_path_factory.mktemp("templates")
    with watched_serving(folder, *FAKE_FLAGS, "--server-timeouts.template-timeout-s", "60") as both:
        yield both


@pytest.fixture(scope="module")
def hasty_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveServer, StallReader]]:
    folder = tmp_path_factory.mktemp("hasty")
    with watched_serving(folder, *FAKE_FLAGS, "--server-timeouts.template-timeout-s", "1.5") as both:
        yield both


@contextlib.contextmanager
def posted(server: LiveServer, body: dict[str, object]) -> Iterator[socket.socket]:
    data = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(data)}"
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), 30) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n" + data)
        yield connection


def renderers(server: LiveServer) -> list[int]:
    """The server's processes that render templates."""
    return [pid for pid, command in children(server.process.pid).items() if b"templates.worker" in command]


def cpu_ticks(pid: int) -> int:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])
    return 0


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ 'a'|center(5000000000) }}", "memory"),
        ("{% set n = messages | length %}{{ 'a' * (600000000 * n) }}", "memory"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ range(10**9) }}", "Range too big"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_a_template_that_cannot_finish_is_stopped(
    server: tuple[LiveServer, StallReader], template: str, said: str, path: str
) -> None:
    check_stopped(server, path, template, said)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_a_template_that_does_not_finish_is_stopped(hasty_server: tuple[LiveServer, StallReader], path: str) -> None:
    check_stopped(hasty_server, path, LOOP, "stopped after 1.5 s")


def check_stopped(server: tuple[LiveServer, StallReader], path: str, template: str, said: str) -> None:
    live, stalls = server

    def ask() -> None:
        status, answer = live.post(path, {"messages": [USER], "chat_template": template})
        assert (status, said in answer["error"]["message"]) == (400, True), answer

    assert stalls.least_cpu_s(ask, 0.25) < 0.25
    assert live.post("/v1/chat/completions", CHAT)[0] == 200


def test_callers_looping_templates_delay_only_each_other(server: tuple[LiveServer, StallReader]) -> None:
    """Others are answered while all of the loops run: these would end after 60 s."""
    live, _ = server
    with contextlib.ExitStack() as stack:
        looping = [stack.enter_context(posted(live, {**CHAT, "chat_template": LOOP})) for _ in range(6)]
        for _ in range(5):
            assert live.post("/v1/chat/completions", CHAT)[0] == 200
            assert live.get("/health")[0] == 200
        assert select.select(looping, [], [], 0)[0] == [], "none of them is answered yet"


def test_rendering_stops_when_the_client_disconnects(tmp_path: Path) -> None:
    with serving(tmp_path, *FAKE_FLAGS, "--server-timeouts.template-timeout-s", "60") as live:
        with posted(live, {**CHAT, "chat_template": LOOP}):
            end = time.monotonic() + 50
            while not any(cpu_ticks(pid) > 60 for pid in renderers(live)):
                assert time.monotonic() < end, "nothing renders"
                time.sleep(0.05)
            burning = [pid for pid in renderers(live) if cpu_ticks(pid) > 60]
        end = time.monotonic() + 30
        while any(is_running(pid) for pid in burning):
            assert time.monotonic() < end, "the rendering continues without its client"
            time.sleep(0.05)
        assert live.post("/v1/chat/completions", {**CHAT, "chat_template": "ok"})[0] == 200


@pytest.mark.parametrize("signals", [1, 2])
def test_sigterm_ends_a_server_whose_template_loops(tmp_path: Path, signals: int) -> None:
    """At the drain's deadline after one signal, at once after the second; nothing is left running."""
    flags = (
        "--server-timeouts.template-timeout-s",
        "60",
        "--server-timeouts.drain-timeout-s",
        "1" if signals == 1 else "60",
    )
    with serving(tmp_path, *FAKE_FLAGS, *flags) as live, posted(live, {**CHAT, "chat_template": LOOP}):
        end = time.monotonic() + 50
        while not any(cpu_ticks(pid) > 60 for pid in renderers(live)):
            assert time.monotonic() < end, "nothing renders"
            time.sleep(0.05)
        started = [*renderers(live), live.engine_pid()]
        live.process.send_signal(signal.SIGTERM)
        if signals == 2:
            live.wait_draining()
            live.process.send_signal(signal.SIGTERM)
        assert live.process.wait(30) == (0 if signals == 1 else -signal.SIGTERM)
        end = time.monotonic() + 30
        while any(is_running(pid) for pid in started):
            assert time.monotonic() < end, "a child lives on"
            time.sleep(0.05)


def test_a_models_own_template_that_loops_is_stopped_too(tmp_path: Path) -> None:
    template = tmp_path / "loops.jinja"
    template.write_text("{% if messages[0].content == 'loop' %}" + LOOP + "{% endif %}ok")
    with serving(
        tmp_path, *FAKE_ENGINE, "--chat-template", str(template), "--server-timeouts.template-timeout-s", "1"
    ) as live:
        status, answer = live.post("/v1/chat/completions", {"messages": [{**USER, "content": "loop"}]})
        assert (status, answer["error"]["param"]) == (400, "messages")
        assert live.post("/v1/chat/completions", CHAT)[0] == 200


def test_a_killed_renderer_is_replaced(server: tuple[LiveServer, StallReader]) -> None:
    live, _ = server
    for pid in renderers(live):
        os.kill(pid, signal.SIGKILL)
    assert live.post("/v1/chat/completions", CHAT)[0] == 200


def test_chats_at_once_are_all_rendered(server: tuple[LiveServer, StallReader]) -> None:
    live, _ = server
    statuses: list[int] = []

    def ask(number: int) -> None:
        for _ in range(10):
            answer = live.post(
                "/tokenize", {"messages": [{**USER, "content": f"number {number}"}], "return_token_strs": True}
            )
            statuses.append(answer[0] if f"number {number}" in "".join(answer[1]["token_strs"]) else 0)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert statuses == [200] * 80
