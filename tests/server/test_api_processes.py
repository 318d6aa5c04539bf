"""--api-server-count: several processes serve one port before one engine, and share what a server has once."""

import asyncio
import contextlib
import http.client
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlparse

import openai
import pytest

from pagoda import CapacityError, RequestError, WorkerDied
from pagoda.base.config import EngineConfig
from pagoda.base.server_config import ServerConfig, ServerLimits
from pagoda.engine.clients import supervisor
from pagoda.engine.wire import EngineStats
from pagoda.process.child_process import RendezvousDir
from pagoda.server import api_group
from pagoda.server import shared as shared_module
from pagoda.server.admission import Admission, batch_key
from pagoda.server.api_group import ApiGroup
from pagoda.server.errors import ApiError
from pagoda.server.listening import listen_together
from pagoda.server.remote_admission import AdmissionService
from pagoda.server.served_adapters import AdapterChange, LoRAModule, ServedAdapters
from pagoda.server.shared import Shared
from tests.cached_models import cached_model
from tests.engine.lora_adapters import write_adapter
from tests.server import live
from tests.server.live import FAKE_ENGINE, FAKE_FLAGS, LiveServer, children, is_running, reserved_port, serving

NAMES = ("api-1", "api-2")
MOST_PER_KEY = 6
LONG = {"prompt": [7] * 40, "max_tokens": 1500, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Two processes; tests may kill them, the engine too, and limit its steps for a while."""
    folder: Path = tmp_path_factory.mktemp("several")
    keys = ("--api-key", "one", "--api-key", "two", "--admin-api-key", "root")
    limit = ("--server-limits.max-requests-per-key", str(MOST_PER_KEY))
    with serving(folder, *FAKE_FLAGS, *keys, *limit, "--api-server-count", "2", stepped=True) as served:
        yield served


def served_by(server: LiveServer) -> set[int]:
    return {pid for pid, command in children(server.process.pid).items() if b"api_process" in command}


def api_pids(server: LiveServer) -> dict[str, int]:
    """The processes that serve HTTP, by the names that the log has for them, once all of them do."""
    until_s = time.monotonic() + 30
    while True:
        running = served_by(server)
        found = re.findall(r" (api-\d)\[(\d+)\] this process serves", server.log.read_text())
        pids = {name: int(pid) for name, pid in found if int(pid) in running}
        if len(pids) == len(NAMES):
            return pids
        assert time.monotonic() < until_s, server.log.read_text()
        time.sleep(0.05)


class Connection:
    """A connection to one of the processes."""

    def __init__(self, server: LiveServer, key: str = "root") -> None:
        address = urlparse(server.url)
        self._http = http.client.HTTPConnection(str(address.hostname), address.port, timeout=60)
        self._key = key
        request_id = uuid.uuid4().hex
        assert self.get("/v1/models", **{"X-Request-Id": request_id})[0] == 200
        until_s = time.monotonic() + 20
        while (line := re.search(rf" (api-\d)\[.*{request_id}", server.log.read_text())) is None:
            assert time.monotonic() < until_s
            time.sleep(0.01)
        self.name = line[1]

    def get(self, path: str, **headers: str) -> tuple[int, Any]:
        return self._whole("GET", path, None, headers)

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        return self._whole("POST", path, json.dumps(body), {"Content-Type": "application/json"})

    def _whole(self, method: str, path: str, body: str | None, headers: dict[str, str]) -> tuple[int, Any]:
        self._http.request(method, path, body, {"Authorization": f"Bearer {self._key}", **headers})
        response = self._http.getresponse()
        text = response.read().decode()
        return response.status, json.loads(text) if text.startswith(("{", "[")) else text

    def frame(self) -> dict[str, Any]:
        """The first frame of the dashboard's stream; then the connection is closed."""
        self._http.request("GET", "/dashboard/stream", headers={"Authorization": f"Bearer {self._key}"})
        with contextlib.closing(self._http.getresponse()) as response:
            data = (line for line in response if line.startswith(b"data: "))
            next(data)  # what comes once
            frame = json.loads(next(data)[6:])
        self._http.close()
        return frame

    def send(self, path: str, body: Any) -> None:
        """POST, and leave the answer."""
        self._http.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})

    def close(self) -> None:
        self._http.close()

    @contextlib.contextmanager
    def streaming(self, **fields: Any) -> Iterator[tuple[int, http.client.HTTPResponse]]:
        """A stream of which one line was read; the connection is closed at the end of the block."""
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        self._http.request("POST", "/v1/completions", json.dumps({**LONG, **fields}), headers)
        response = self._http.getresponse()
        try:
            if response.status == 200:
                response.readline()
            yield response.status, response
        finally:
            self._http.close()


def to_each(server: LiveServer, key: str = "root") -> list[Connection]:
    """A connection to each process, in the order of their names."""
    api_pids(server)
    found: dict[str, Connection] = {}
    while len(found) < len(NAMES):
        connection = Connection(server, key)
        found.setdefault(connection.name, connection)
    return [found[name] for name in NAMES]


def metric(text: str, begins: str) -> float:
    return next(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(begins))


def wait_until(is_so: Any, timeout_s: float = 30.0) -> None:
    until_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.02)


@contextlib.contextmanager
def slowed(server: LiveServer) -> Iterator[None]:
    """During the block, the engine rests after each step."""
    is_over = threading.Event()

    def run() -> None:
        server.steps.hold_after(1)
        while not is_over.wait(0.01):
            server.steps.allow_one_more()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        server.steps.release()


def test_all_processes_answer_on_one_port_and_any_counts_for_all(server: LiveServer) -> None:
    for connection in to_each(server):
        status, before = connection.get("/metrics")
        assert status == 200
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="one", default_headers={"Connection": "close"})
        for _ in range(4):
            chat = client.chat.completions.create(
                model="smollm2-135m", messages=[{"role": "user", "content": "hello"}], max_tokens=5
            )
            assert chat.choices[0].finish_reason == "length"
        after = connection.get("/metrics")[1]
        for name, more in (
            ("vllm:generation_tokens_total", 20),
            ('vllm:request_success_total{engine="0",finished_reason="length"', 4),
            ("vllm:time_to_first_token_seconds_count", 4),
            ('http_requests_total{handler="/v1/chat/completions",method="POST",status="200"}', 4),
        ):
            assert metric(after, name) - (metric(before, name) if name in before else 0) == more, name
        assert metric(after, "vllm:iteration_tokens_total_sum") > metric(before, "vllm:iteration_tokens_total_sum")
        assert after.count("vllm:num_requests_running{") == 1


def test_limits_of_a_key_hold_over_all_processes_and_end_with_a_killed_one(server: LiveServer) -> None:
    first, second = to_each(server, "one")
    with slowed(server), contextlib.ExitStack() as streams:
        held: list[Connection] = []
        while len(held) < MOST_PER_KEY:
            for connection in to_each(server, "one"):
                if len(held) < MOST_PER_KEY:
                    assert streams.enter_context(connection.streaming())[0] == 200
                    held.append(connection)
        assert {connection.name for connection in held} == set(NAMES)
        for connection in (first, second):
            status, answer = connection.post("/v1/completions", {**LONG, "stream": False})
            assert (status, "this key has 6 requests of 6" in answer["error"]["message"]) == (429, True)
        with next(iter(to_each(server, "two"))).streaming() as (status, _):
            assert status == 200
            load = second.get("/load")[1]
            assert load["server_load"] == MOST_PER_KEY + 1
            before = metric(second.get("/metrics")[1], "vllm:generation_tokens_total")
            os.kill(api_pids(server)["api-1"], signal.SIGKILL)
            num_left = sum(connection.name == "api-2" for connection in held)
            wait_until(lambda: second.get("/load")[1]["server_load"] == num_left)
            assert metric(second.get("/metrics")[1], "vllm:generation_tokens_total") >= before
            wait_until(lambda: second.get("/load")[1]["running"] == num_left)  # the engine has aborted the others
    for connection in to_each(server, "one"):
        status, answer = connection.post("/v1/completions", {"prompt": "a", "max_tokens": 5})
        assert (status, answer["usage"]["completion_tokens"]) == (200, 5)


def test_what_connects_while_a_process_is_dead_is_answered_by_the_others(server: LiveServer) -> None:
    pids = api_pids(server)
    os.kill(pids["api-2"], signal.SIGKILL)
    wait_until(lambda: len(served_by(server) - set(pids.values())) == 1)
    (next_one,) = served_by(server) - set(pids.values())
    os.kill(next_one, signal.SIGSTOP)  # it does not come to serve
    try:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="one", default_headers={"Connection": "close"})
        for _ in range(8):
            answer = client.completions.create(model="smollm2-135m", prompt="a", max_tokens=5, timeout=60)
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 5
    finally:
        os.kill(next_one, signal.SIGCONT)
    assert api_pids(server) == {"api-1": pids["api-1"], "api-2": next_one}


def test_any_process_shows_the_requests_of_all_and_ends_them(server: LiveServer) -> None:
    mine, theirs = to_each(server, "one")
    first, second = to_each(server, "one")
    with slowed(server), mine.streaming(request_id="a"), theirs.streaming(request_id="b") as (_, stream):
        for key, ids in (("one", {"cmpl-a", "cmpl-b"}), ("root", {"1/cmpl-a", "1/cmpl-b"}), ("two", set())):
            for connection in to_each(server, key):
                seen = connection.get("/requests")[1]
                assert {one["id"] for one in seen["data"] if one["state"] == "running"} == ids
                assert seen["others"] == {"running": 2 - len(ids), "waiting": 0}
        for connection in (first, second):
            for name in ("cmpl-a", "cmpl-b"):
                timeline = connection.get(f"/requests/{name}")[1]["timeline"]
                assert [one["what"] for one in timeline][:2] == ["arrived", "queued"]
        assert to_each(server, "two")[0].get("/requests/cmpl-a")[0] == 404
        for connection in to_each(server):
            status, trace = connection.get("/trace?seconds=0.2")
            assert status == 200
            assert all(name in json.dumps(trace) for name in ("1/cmpl-a", "1/cmpl-b"))
            assert {row[0] for row in connection.frame()["requests"]} == {"1/cmpl-a", "1/cmpl-b"}
        status, answer = first.post("/abort_requests", {"request_ids": ["cmpl-a", "cmpl-b", "cmpl-c"]})
        assert (status, sorted(answer["aborted"])) == (200, ["cmpl-a", "cmpl-b"])
        assert b'"finish_reason":"abort"' in stream.read()


def test_a_prefix_is_found_whichever_process_it_came_from(server: LiveServer) -> None:
    body = {"prompt": [11] * 64, "max_tokens": 1}
    first, second = to_each(server, "one")
    other = to_each(server, "two")[1]
    num_cached = [
        one.post("/v1/completions", body)[1]["usage"]["prompt_tokens_details"]["cached_tokens"]
        for one in (first, second, other)
    ]
    assert num_cached == [0, 48, 0]  # that of another key is never found


def test_what_was_sampled_is_found_whichever_process_the_next_turn_comes_to(server: LiveServer) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "seed": 1, "return_token_ids": True}
    answers = [to_each(server, "one")[0].post("/v1/chat/completions", body)[1]]
    choice = answers[0]["choices"][0]
    said = {"role": "assistant", "content": choice["message"]["content"]}
    body["messages"] = [*body["messages"], said, {"role": "user", "content": "And now?"}]
    for key, is_found in (("one", True), ("two", False)):
        for connection in to_each(server, key):
            prompt = connection.post("/v1/chat/completions", body)[1]["prompt_token_ids"]
            first = [*answers[0]["prompt_token_ids"], *choice["token_ids"]]
            assert (prompt[: len(first)] == first) is is_found


def test_a_killed_engine_costs_no_stream_of_any_process_a_token(server: LiveServer) -> None:
    def run(connection: Connection) -> int:
        with connection.streaming(max_tokens=300) as (status, response):
            assert status == 200
            started.release()
            return response.read().count(b'"text"') and 300

    started = threading.Semaphore(0)
    connections = [one for _ in range(2) for one in to_each(server, "one")]
    with ThreadPoolExecutor(len(connections)) as threads:
        with slowed(server):
            running = [threads.submit(run, one) for one in connections]
            for _ in running:
                assert started.acquire(timeout=30)
            server.kill_engine()
        assert [one.result(60) for one in running] == [300] * len(connections)


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Two processes with adapters, and room for two requests that wait for their first token."""
    folder = tmp_path_factory.mktemp("limited")
    root = folder / "adapters"
    write_adapter(root / "one", cached_model("smollm2-135m"), 4, 1, ("q_proj",), layers=(0,))
    adapters = ("--enable-lora", "--lora-dir", str(root), "--lora-modules", f"start={root / 'one'}")
    limit = ("--server-limits.max-queued-requests", "2", "--server-timeouts.queue-timeout-s", "60")
    flags = (*FAKE_ENGINE, *adapters, *limit, "--api-server-count", "2")
    with serving(folder, *flags, stepped=True) as server:
        yield server


def test_all_wait_in_one_line(limited: LiveServer) -> None:
    body = {"prompt": [5] * 20, "max_tokens": 3, "ignore_eos": True}
    asking, leaving = to_each(limited), to_each(limited)
    observer = to_each(limited)[1]
    with limited.steps.held_after(0), ThreadPoolExecutor(4) as threads:
        running = [threads.submit(one.post, "/v1/completions", body) for one in asking]
        wait_until(lambda: observer.get("/load")[1]["server_load"] == 2)
        for one in leaving:
            one.send("/v1/completions", body)
        wait_until(lambda: observer.get("/load")[1]["server_load"] == 4)
        waits = 'num_requests_waiting_by_reason{engine="0",model_name="smollm2-135m",reason="admission"}'
        assert metric(observer.get("/metrics")[1], f"vllm:{waits}") == 2
        for one in leaving:
            one.close()  # each gives its place up
        wait_until(lambda: observer.get("/load")[1]["server_load"] == 2)
        waiting = [threads.submit(one.post, "/v1/completions", body) for one in leaving]
        wait_until(lambda: observer.get("/load")[1]["server_load"] == 4)
        limited.steps.release()
        assert [one.result(60)[1]["usage"]["completion_tokens"] for one in (*running, *waiting)] == [3] * 4
    wait_until(lambda: observer.get("/load")[1]["server_load"] == 0)


def to_each_after_a_kill(server: LiveServer) -> list[Connection]:
    """Kill the first process, and connect to each when the next one serves."""
    killed = api_pids(server)["api-1"]
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: killed not in served_by(server))
    return to_each(server)


def names(connection: Connection) -> list[str]:
    return [one["id"] for one in connection.get("/v1/models")[1]["data"]]


def test_a_process_serves_without_the_adapters_that_it_cannot_load_again(limited: LiveServer) -> None:
    root = limited.log.parent / "adapters"
    load = {"lora_name": "kept", "lora_path": "one"}
    first, second = to_each(limited)
    assert first.post("/v1/load_lora_adapter", load)[0] == 200
    root.rename(root.with_name("away"))
    first, second = to_each_after_a_kill(limited)
    root.with_name("away").rename(root)
    assert names(first) == ["smollm2-135m"]
    assert names(second) == ["smollm2-135m", "start", "kept"]
    for name in ("start", "kept"):
        assert f"the adapter '{name}' could not be loaded again" in limited.log.read_text()
    assert first.post("/v1/load_lora_adapter", {**load, "lora_name": "start", "load_inplace": True})[0] == 200
    assert first.post("/v1/unload_lora_adapter", {"lora_name": "kept"})[0] == 200  # it is there in the other one
    assert names(first) == names(second) == ["smollm2-135m", "start"]


def test_adapters_of_one_process_are_those_of_all_and_of_the_next(limited: LiveServer) -> None:
    first, second = to_each(limited)
    load = {"lora_name": "more", "lora_path": "one"}
    assert first.post("/v1/load_lora_adapter", load)[0] == 200
    assert second.post("/v1/unload_lora_adapter", {"lora_name": "start"})[0] == 200
    assert names(first) == names(second) == ["smollm2-135m", "more"]
    for connection, path, body, status in (
        (second, "/v1/load_lora_adapter", load, 400),
        (first, "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "none"}, 404),
        (first, "/v1/unload_lora_adapter", {"lora_name": "start"}, 404),
    ):
        assert connection.post(path, body)[0] == status
    first, second = to_each_after_a_kill(limited)
    assert names(first) == names(second) == ["smollm2-135m", "more"]
    answer = first.post("/v1/completions", {"model": "more", "prompt": "a", "max_tokens": 3})[1]
    assert answer["usage"]["completion_tokens"] == 3


def test_sigterm_ends_all_after_the_last_request_of_any(tmp_path: Path) -> None:
    with serving(tmp_path, *FAKE_ENGINE, "--api-server-count", "2", stepped=True) as server:
        first, second = to_each(server)
        with slowed(server), first.streaming(max_tokens=200) as (_, stream):
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: second.get("/health")[0] == 503)
            assert second.post("/v1/completions", {"prompt": "a"})[0] == 503  # and closes the connection
            server.steps.release()
            assert b"[DONE]" in stream.read()
        assert server.process.wait(20) == 0
        assert "Traceback" not in server.log.read_text()
        assert "ended with" not in server.log.read_text()


def test_a_signal_drains_those_that_serve_before_the_others_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_ready = live._wait_ready

    def stop_one_and_wait(server: LiveServer) -> None:
        wait_until(lambda: len(served_by(server)) == 2)
        os.kill(max(served_by(server)), signal.SIGSTOP)  # it never comes to serve
        wait_ready(server)

    monkeypatch.setattr(live, "_wait_ready", stop_one_and_wait)
    with serving(tmp_path, *FAKE_ENGINE, "--api-server-count", "2", stepped=True) as server:
        with slowed(server), Connection(server).streaming(max_tokens=200) as (_, stream):
            server.process.send_signal(signal.SIGTERM)
            server.wait_draining()
            server.steps.release()
            assert b"[DONE]" in stream.read()
        assert server.process.wait(20) == 0


def test_processes_and_engine_end_with_their_parent(tmp_path: Path) -> None:
    env = {"TMPDIR": str(tmp_path)}
    with serving(tmp_path, *FAKE_ENGINE, "--api-server-count", "2", env=env) as server:
        started = list(children(server.process.pid))
        assert len(started) == 3
        server.process.kill()
        wait_until(lambda: not any(map(is_running, started)))
    assert list(tmp_path.glob("pagoda-*")) == []


def started(*flags: str, port: int = 0) -> "subprocess.CompletedProcess[str]":
    """What `pagoda serve` says that does not come to serve."""
    command = [sys.executable, "-m", "pagoda", "serve", "--port", str(port), "--api-server-count", "2"]
    return subprocess.run([*command, *FAKE_ENGINE, *flags], capture_output=True, text=True, timeout=120)


def test_what_cannot_be_served_is_said_once(tmp_path: Path) -> None:
    with reserved_port() as port, socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", port))
        taken.listen()
        done = started(port=port)
    assert (done.returncode, f"cannot listen on 127.0.0.1 port {port}" in done.stderr) == (2, True)
    done = started("--tool-call-parser", "none-such")
    assert done.returncode == 2
    assert done.stderr.count("none-such") == 1, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("module", "is_up", "how"),
    [
        ("pagoda.process.watchdog", False, "ended with exit code 1"),  # it ends at once
        ("pagoda.server.api_process", True, r"was killed by signal 9 \(SIGKILL\)"),  # it waits, with an engine, too
    ],
)
def test_a_process_that_never_comes_to_serve_ends_the_server(
    monkeypatch: pytest.MonkeyPatch, module: str, is_up: bool, how: str
) -> None:
    monkeypatch.setattr(api_group, "_MODULE", module)
    monkeypatch.setattr(api_group, "_START_S", 0.05)
    monkeypatch.setattr(api_group, "CALL_S", 0.0)
    monkeypatch.setattr(api_group, "_LOOK_S", 0.0)
    monkeypatch.setattr(supervisor, "START_PAUSE_S", 0.01)
    config = EngineConfig.from_options(port=0, api_server_count=2, server_timeouts={"step_timeout_s": 0.05})
    running = {"died": None, "on_step": None, "is_up": is_up, "is_stuck": False, "num_deaths": 0, "source": None}
    engine: Any = SimpleNamespace(**running, stats=EngineStats)

    async def main() -> None:
        place = RendezvousDir()
        starting: asyncio.Task[Any] = asyncio.create_task(asyncio.sleep(60))
        with contextlib.ExitStack() as stack:
            stack.callback(place.remove)
            listeners = [stack.enter_context(one) for one in listen_together(config.server)]
            await ApiGroup(config, engine, listeners, place).run(starting)

    with pytest.raises(WorkerDied, match=rf"API process \d {how}, 3 times in a row before"):
        asyncio.run(main())


class TwoClients:
    """A ClientServer of two clients, of which tests settle the answers."""

    def __init__(self) -> None:
        self.clients = {1, 2}
        self.asked: list[asyncio.Future[dict[int, Any]]] = []

    async def ask(self, *arguments: object, **_: object) -> dict[int, Any]:
        self.arguments = arguments
        self.asked.append(asyncio.get_running_loop().create_future())
        return await self.asked[-1]


def sharing(are_all_ready: bool = True) -> tuple[Shared, Any]:
    shared, server = Shared(ServerConfig(), lambda: are_all_ready), TwoClients()
    shared.server = server  # type: ignore[assignment]
    return shared, server


def test_a_process_that_goes_while_another_is_waited_for_is_counted_once() -> None:
    async def main() -> None:
        shared, server = sharing()
        for counted in (3.0, 4.0, 5.0):
            reading = asyncio.create_task(shared.read_counts())
            await asyncio.sleep(0)
            if counted == 4.0:  # it has answered; the other has not
                server.clients = {2}
                shared.on_left(1)
            server.asked[-1].set_result({1: {"m": {"a": {"": counted}}}} if counted < 5 else {})
            assert (await reading)["m"]["a"] == {"": 3.0}

    asyncio.run(main())


def test_a_change_of_adapters_outlives_the_process_that_asked_for_it() -> None:
    async def main() -> None:
        shared, server = sharing()
        change = AdapterChange("one", LoRAModule("one", "path"))
        asking = asyncio.create_task(shared.services["change_adapter"](1, change))
        await asyncio.sleep(0.01)
        asking.cancel()  # as the connection's calls are when it ends
        await asyncio.sleep(0)
        server.asked[0].set_result({2: None})
        assert await shared.read_changes() == [replace(change, replaces=True)]

    asyncio.run(main())


def test_a_change_of_adapters_is_made_in_all_processes_or_in_none() -> None:
    refused = (400, "its file is gone", "lora_path")
    old, new = (AdapterChange("a", LoRAModule("a", path), replaces=True) for path in ("old", "new"))
    unload = AdapterChange("a")

    async def main() -> None:
        shared, server = sharing()

        async def change(wanted: AdapterChange, *outcomes: Any) -> tuple[Any, Any]:
            num_asked = len(server.asked)
            changing = asyncio.create_task(shared.services["change_adapter"](1, wanted))
            for outcome in outcomes:
                while len(server.asked) == num_asked:
                    await asyncio.sleep(0)
                num_asked += 1
                server.asked[-1].set_result(dict(enumerate(outcome)))
            try:
                return await changing, server.arguments[1]
            except ApiError as error:
                return (error.status, error.message, error.param), server.arguments[1]

        assert await change(old, [None, refused], [None, None]) == (refused, unload)
        assert await shared.read_changes() == []
        assert await change(old, [None, None]) == (None, old)
        assert await change(new, [refused, None], [None, None]) == (refused, old)
        assert await change(new, [refused, refused]) == (refused, new)
        assert await shared.read_changes() == [old]
        assert await change(unload, [refused, None]) == (None, unload)
        assert await shared.read_changes() == []
        assert await change(unload, [refused, refused]) == (refused, unload)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("error", "status"), [(RequestError("a"), 400), (CapacityError("a"), 400), (WorkerDied("a"), 503)]
)
def test_what_keeps_a_process_from_an_adapter_is_an_answer(
    monkeypatch: pytest.MonkeyPatch, error: Exception, status: int
) -> None:
    adapters = ServedAdapters(cast("Any", None), ("m",), None)

    async def apply(_: AdapterChange) -> None:
        raise error

    monkeypatch.setattr(adapters, "apply", apply)
    found = asyncio.run(adapters.try_to(AdapterChange("one")))
    assert found is not None
    assert found[0] == status


def test_a_change_of_adapters_waits_for_a_process_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_module, "_WAIT_S", 0.01)
    shared, server = sharing(are_all_ready=False)
    with pytest.raises(ApiError, match="no adapter is changed; try later") as refused:
        asyncio.run(shared.services["change_adapter"](1, AdapterChange("one")))
    assert (refused.value.status, server.asked) == (503, [])


def test_a_place_that_is_closed_before_its_wait_begins_is_no_error() -> None:
    async def main() -> None:
        service = AdmissionService(Admission(ServerLimits(max_queued_requests=1), 60.0))
        for number in (1, 2):
            service.enter(1, number, 1, 1, "")
        for ask, arguments in ((service.wait_for_turn, ()), (service.keep, (5, 0)), (service.wait_to_hold, (5,))):
            waiting = asyncio.create_task(ask(1, 2, *arguments))
            service.close(1, 2)  # read with the call before, as both were sent while this was busy
            await asyncio.wait_for(waiting, 5)

    asyncio.run(main())


def test_each_process_sees_whether_another_has_requests_besides_batches() -> None:
    """So that a batch steps aside for them."""
    service = AdmissionService(Admission(ServerLimits(), 60.0))
    service.enter(1, 1, 1, 1, batch_key("a"))
    assert service.counts(2).idle_s == math.inf
    service.enter(1, 2, 1, 1, "a")
    assert service.counts(2).idle_s == 0.0
    service.end_client(1)
    assert 0 <= service.counts(2).idle_s < math.inf


def test_a_process_that_hangs_is_replaced_and_gives_its_places_back(tmp_path: Path) -> None:
    flags = ("--api-server-count", "2", "--server-timeouts.step-timeout-s", "6")
    with serving(tmp_path, *FAKE_ENGINE, *flags, stepped=True) as server:
        first, second = to_each(server)
        hung = api_pids(server)["api-1"]
        with slowed(server), first.streaming():
            os.kill(hung, signal.SIGSTOP)
            for path in ("/health", "/metrics"):
                assert second.get(path)[0] == 200
            for _ in range(6):  # new connections, of which the system gives it half
                assert server.get("/health", timeout_s=60)[0] == 200
            assert is_running(hung)
            assert second.get("/load")[1]["server_load"] == 1
            wait_until(lambda: second.get("/load")[1]["server_load"] == 0, 60)
        assert hung not in api_pids(server).values()
        log = server.log.read_text()
        assert log.count(": it is killed") == log.count("API process 1 has not answered for") == 1
