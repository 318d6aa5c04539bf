"""Chat templates that loop or swallow memory: the request ends at the deadline, others and SIGTERM are not held up."""

import contextlib
import json
import os
import signal
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.live import FAKE_ENGINE, FAKE_FLAGS, LiveServer, serving
from tests.server.stall_watch import StallReader, watched_serving

USER = {"role": "user", "content": "x"}
LOOP = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
CHAT = {"messages": [USER], "max_tokens": 2}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveServer, StallReader]]:
    folder = tmp_path_factory.mktemp("templates")
    folder = tmp_path_factory.mktemp("templates")
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
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
    threads = Path(f"/proc/{server.process.pid}/task").iterdir()
    found = children.read_text().split() + [pid for t in threads for pid in (t / "children").read_text().split()]
    return [int(pid) for pid in set(found) if b"templates.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def cpu_ticks(pid: int) -> int:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])
    return 0


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (LOOP, "stopped after 1.5 s"),
        ("{{ 'a'|center(5000000000) }}", "memory"),
        ("{% set n = messages | length %}{{ 'a' * (600000000 * n) }}", "memory"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ range(10**9) }}", "Range too big"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_a_template_that_does_not_finish_is_stopped(
    server: tuple[LiveServer, StallReader], template: str, said: str, path: str
) -> None:
    live, stalls = server
    stalls.take()
    status, answer = live.post(path, {"messages": [USER], "chat_template": template})
    assert (status, said in answer["error"]["message"]) == (400, True), answer
    stalls.take()
    cpu_s = stalls.cpu_s()
    assert cpu_s < 0.25
    assert live.post("/v1/chat/completions", CHAT)[0] == 200


def test_callers_looping_templates_delay_only_each_other(server: tuple[LiveServer, StallReader]) -> None:
    live, _ = server
    with contextlib.ExitStack() as stack:
        for _ in range(6):
            stack.enter_context(posted(live, {**CHAT, "chat_template": LOOP}))
        began_s = time.monotonic()
        for _ in range(5):
            assert live.post("/v1/chat/completions", CHAT)[0] == 200
            assert live.get("/health")[0] == 200
        assert time.monotonic() - began_s < 4


def test_rendering_stops_when_the_client_disconnects(tmp_path: Path) -> None:
    with serving(tmp_path, *FAKE_FLAGS, "--server-timeouts.template-timeout-s", "60") as live:
        with posted(live, {**CHAT, "chat_template": LOOP}):
            end = time.monotonic() + 20
            while not any(cpu_ticks(pid) > 60 for pid in renderers(live)):
                assert time.monotonic() < end, "nothing renders"
                time.sleep(0.05)
            burning = [pid for pid in renderers(live) if cpu_ticks(pid) > 60]
        end = time.monotonic() + 5
        while any(cpu_ticks(pid) for pid in burning):
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
        end = time.monotonic() + 20
        while not any(cpu_ticks(pid) > 60 for pid in renderers(live)):
            assert time.monotonic() < end, "nothing renders"
            time.sleep(0.05)
        children = [*renderers(live), live.engine_pid()]
        live.process.send_signal(signal.SIGTERM)
        if signals == 2:
            live.wait_draining()
            live.process.send_signal(signal.SIGTERM)
        assert live.process.wait(10) == (0 if signals == 1 else -signal.SIGTERM)
        end = time.monotonic() + 5
        while any(Path(f"/proc/{pid}").exists() and cpu_ticks(pid) for pid in children):
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
    times: list[float] = []

    def ask(number: int) -> None:
        for _ in range(10):
            began_s = time.perf_counter()
            answer = live.post(
                "/tokenize", {"messages": [{**USER, "content": f"number {number}"}], "return_token_strs": True}
            )
            times.append(time.perf_counter() - began_s)
            statuses.append(answer[0] if f"number {number}" in "".join(answer[1]["token_strs"]) else 0)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert statuses == [200] * 80
    assert statistics.median(times) < 1
