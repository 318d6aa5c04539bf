"""The server's edges: limits while bytes come in, certificates, keys, ids, and an engine that is gone for good."""

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from tests.server.live import LiveServer, children, is_running, reserved_port, serving

FLAGS = ("--distributed-executor-backend", "fake", "--num-blocks", "1024", "--max-model-len", "2048")
TEXT = {"prompt": "Once upon a time", "max_tokens": 8, "seed": 1}
LONG = {"prompt": [9] * 50, "max_tokens": 1990, "ignore_eos": True}


def port_of(server: LiveServer) -> int:
    return int(server.url.rsplit(":", 1)[1])


def talk(server: LiveServer, data: bytes, timeout_s: float = 5.0, until: bytes = b"") -> bytes:
    """What the server answers to these bytes until it closes, falls silent or has said `until`."""
    with socket.create_connection(("127.0.0.1", port_of(server)), timeout_s) as connection:
        connection.settimeout(timeout_s)
        answer = b""
        try:
            connection.sendall(data)
            while (piece := connection.recv(65536)) and not (until and until in answer + piece):
                answer += piece
            answer += piece
        except (TimeoutError, ConnectionError):
            pass
        return answer


def request_bytes(body: dict[str, Any], *headers: str, path: str = "/v1/completions") -> bytes:
    data = json.dumps(body).encode()
    given = ["Host: x", "Content-Type: application/json", f"Content-Length: {len(data)}", *headers]
    lines = [f"POST {path} HTTP/1.1", *given]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def metric(server: LiveServer, name: str, **labels: str) -> float:
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    for line in server.get("/metrics")[1].splitlines():
        if line.startswith(f"vllm:{name}{{") and all(one in line for one in wanted):
            return float(line.rsplit(" ", 1)[1])
    return 0.0


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """For everyone, with few connections and few tokens in line, and far proxies that it trusts.

    Tests may limit its steps, or kill its engine.
    """
    flags = ("--host", "0.0.0.0", "--forwarded-allow-ips", "10.0.0.1,10.1.0.0/16")
    limits = ("--server-limits.max-connections", "8", "--server-limits.max-queued-tokens", "8000")
    with serving(tmp_path_factory.mktemp("limited"), *FLAGS, *flags, *limits, stepped=True) as server:
        yield server


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
CLOSE = "Connection: close"


def test_headers_that_are_too_large_are_refused(fake_server: LiveServer) -> None:
    """While they are read: the server does not wait for their end."""
    answer = talk(fake_server, b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 600_000)
    assert answer.startswith(b"HTTP/1.1 400 ") or answer == b"", "closed, with unread bytes the answer may be lost"
    assert fake_server.get("/health")[0] == 200


@pytest.mark.parametrize(
    "request_",
    [
        b"\x16\x03\x01 what\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        HEAD + b"Content-Length: x\r\n\r\n",
        HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\nab",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nab\r\n",
    ],
    ids=["TLS", "path", "no Host", "length", "two lengths", "chunk"],
)
def test_malformed_http_is_a_400_and_the_connection_closes(fake_server: LiveServer, request_: bytes) -> None:
    answer = talk(fake_server, request_)
    assert answer.startswith(b"HTTP/1.1 400 "), answer
    assert fake_server.get("/health")[0] == 200


def test_a_client_that_offers_another_protocol_is_answered_in_http_1_1(fake_server: LiveServer) -> None:
    """As curl --http2 and Java's client do: they go on with the same connection, and the body is not lost."""
    offer = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA")
    answer = talk(fake_server, request_bytes(TEXT, *offer) + request_bytes(TEXT, CLOSE), until=b"} }")
    assert answer.count(b"HTTP/1.1 200") == 2
    assert answer.count(b'"completion_tokens":8') == 2


def test_head_is_answered_without_a_body(fake_server: LiveServer) -> None:
    answer = talk(fake_server, b"HEAD /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"\r\n\r\n")


def test_a_body_above_the_limit_is_413_with_or_without_content_length(fake_server: LiveServer) -> None:
    assert b" 413 " in talk(fake_server, HEAD + b"Content-Length: 99999999\r\n\r\n", until=b" 413 ")
    chunks = (b"100000\r\n" + b"x" * 0x100000 + b"\r\n") * 17 + b"0\r\n\r\n"
    assert b" 413 " in talk(fake_server, HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks, until=b" 413 ")


def test_requests_on_too_many_connections_get_503_and_others_are_served(limited: LiveServer) -> None:
    with contextlib.ExitStack() as crowd:
        for _ in range(9):
            slow = crowd.enter_context(socket.create_connection(("127.0.0.1", port_of(limited)), 5))
            slow.sendall(b"GET /health HTTP/1.1\r\nX-Slow: ")
        end = time.monotonic() + 10
        while limited.get("/health")[0] != 503:
            assert time.monotonic() < end, "one too many"
        crowd.close()
        while limited.get("/health")[0] != 200:
            assert time.monotonic() < end, "closed connections still count"


def test_a_connection_serves_one_request_after_the_other(fake_server: LiveServer) -> None:
    stream = request_bytes({**TEXT, "stream": True})
    answer = talk(fake_server, stream + request_bytes(TEXT) + stream + request_bytes(TEXT, "Connection: close"))
    assert answer.count(b"HTTP/1.1 200") == 4
    assert answer.count(b"[DONE]") == 2


def test_a_half_closed_connection_counts_as_disconnected(fake_server: LiveServer) -> None:
    """A half-closed connection counts as closed, as uvicorn and proxies have it."""
    with socket.create_connection(("127.0.0.1", port_of(fake_server)), 5) as connection:
        connection.sendall(request_bytes({**LONG, "stream": True}))
        connection.recv(100)
        connection.shutdown(socket.SHUT_WR)
        fake_server.wait_idle()


def test_a_second_request_with_an_id_in_use_is_refused_and_the_first_continues(fake_server: LiveServer) -> None:
    body = {**LONG, "request_id": "twice"}
    fake_server.wait_idle()
    with ThreadPoolExecutor(1) as pool, fake_server.steps.held_after(5):
        first = pool.submit(fake_server.post, "/v1/completions", body)
        fake_server.wait_load(1)
        for stream in (False, True):
            status, answer = fake_server.post("/v1/completions", {**body, "stream": stream})
            assert (status, answer["error"]["param"]) == (400, "request_id")
        fake_server.steps.release()
        status, answer = first.result()
    assert (status, answer["usage"]["completion_tokens"]) == (200, 1990)


def test_the_same_request_id_header_from_two_clients_does_not_collide(fake_server: LiveServer) -> None:

    def ask() -> tuple[int, Any]:
        header: dict[str, Any] = {"X-Request-Id": "trace-1"}
        return fake_server.post("/v1/completions", LONG, **header)

    fake_server.wait_idle()
    # None ends before all are there: an id is free again once its request has ended.
    with ThreadPoolExecutor(3) as pool, fake_server.steps.held_after(5):
        asked = [pool.submit(ask) for _ in range(3)]
        fake_server.wait_load(3)
        fake_server.steps.release()
        got = [one.result() for one in asked]
    assert [status for status, _ in got] == [200] * 3
    assert len({answer["id"] for _, answer in got}) == 3
    assert all(answer["id"].startswith("cmpl-trace-1") for _, answer in got)


def test_a_request_id_header_makes_way_for_the_prompts_of_another_request(fake_server: LiveServer) -> None:
    """A request of several prompts has an id for each of them, such as trace-2-0, which another may have already."""
    fake_server.wait_idle()
    with ThreadPoolExecutor(2) as pool, fake_server.steps.held_after(5):
        first = pool.submit(fake_server.post, "/v1/completions", LONG, **{"X-Request-Id": "trace-2-0"})
        fake_server.wait_load(1)
        both = pool.submit(
            fake_server.post, "/v1/completions", {**TEXT, "prompt": ["a", "b"]}, **{"X-Request-Id": "trace-2"}
        )
        fake_server.wait_load(3)
        fake_server.steps.release()
        assert (first.result()[0], both.result()[0]) == (200, 200)


def test_chats_without_max_tokens_do_not_count_as_the_whole_context(limited: LiveServer) -> None:
    """As many fit as are expected to, not as many as could fill the model's context of 2,048 tokens."""
    body = {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True}
    with ThreadPoolExecutor(6) as pool:
        with limited.steps.held_after(5):
            asked = [
                pool.submit(limited.post, "/v1/chat/completions", body) for _ in range(6)
            ]  # 2,048 tokens of context
            limited.wait_load(6)
            limited.steps.release()
        assert [one.result()[0] for one in asked] == [200] * 6


def test_a_full_server_refuses_before_it_renders(tmp_path: Path) -> None:
    flags = ("--trust-request-chat-template", "--server-limits.max-queued-requests", "1")
    flags += ("--server-timeouts.queue-timeout-s", "0.1")
    broken = {"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ raise_exception('no') }}"}
    with serving(tmp_path, *FLAGS, *flags, stepped=True) as server, ThreadPoolExecutor(1) as pool:
        assert server.post("/v1/chat/completions", broken)[0] == 400
        with server.steps.held_after(0):
            first = pool.submit(server.post, "/v1/completions", LONG)
            server.wait_load(1)
            assert server.post("/v1/chat/completions", broken)[0] == 429
            server.steps.release()
            assert first.result()[0] == 200


def test_the_metrics_count_http_statuses_and_engine_restarts(limited: LiveServer) -> None:
    def counts() -> dict[str, float]:
        text = limited.get("/metrics")[1]
        found = re.findall(r"^(?:http_requests|vllm:turns)_total\{(.*?)\} (\S+)$", text, re.MULTILINE)
        return {labels: float(count) for labels, count in found}

    before, restarts = counts(), metric(limited, "engine_restarts_total")
    assert limited.post("/v1/completions", TEXT)[0] == 200
    assert limited.post("/v1/completions", {**TEXT, "n": 0})[0] == 400
    assert limited.get("/nowhere")[0] == 404
    after = counts()
    for labels in (
        'handler="/v1/completions",method="POST",status="200"',
        'handler="/v1/completions",method="POST",status="400"',
        'handler="none",method="GET",status="404"',
        'engine="0",handler="/v1/completions",model_name="smollm2-135m",status="200"',
    ):
        assert after[labels] == before.get(labels, 0) + 1
    assert not any("model_name" in labels and '"400"' in labels for labels in after.keys() - before.keys())  # never ran
    limited.kill_engine()
    limited.wait_restarts(int(restarts) + 1)
    assert metric(limited, "engine_restarts_total") == restarts + 1


def test_the_documentation_needs_no_key_and_everything_else_does(keyed_server: LiveServer) -> None:
    for path, status in (("/docs", 200), ("/openapi.json", 200), ("/v1/models", 401), ("/metrics", 401)):
        assert keyed_server.get(path)[0] == status, path


def test_a_server_for_everyone_says_so(limited: LiveServer) -> None:
    log = limited.log.read_text()
    assert "anyone who can reach 0.0.0.0 may use this server: set --api-key" in log
    assert "may send requests a byte at a time, which costs much" in log


def test_the_metrics_count_every_end_once(fake_server: LiveServer) -> None:
    fake_server.wait_idle()

    def counts() -> dict[str, float]:
        ends = {f"{r}": metric(fake_server, "request_success_total", finished_reason=r) for r in ("length", "abort")}
        names = ("prompt_tokens_total", "generation_tokens_total", "e2e_request_latency_seconds_count")
        return {**ends, **{name: metric(fake_server, name) for name in names}}

    before = counts()
    assert fake_server.post("/v1/completions", {**TEXT, "prompt": [[7] * 5, [8] * 6], "n": 3})[0] == 200
    with (
        fake_server.steps.held_after(20),  # it is left before its end
        socket.create_connection(("127.0.0.1", port_of(fake_server)), 30) as connection,
    ):
        connection.sendall(request_bytes({**LONG, "n": 2, "stream": True}))
        while b"data: " not in (piece := connection.recv(65536)):
            assert piece, "closed before the first token"
        connection.close()
        fake_server.wait_load(0)
    fake_server.wait_idle()
    after = counts()
    more = {name: after[name] - before[name] for name in after}
    generated = more.pop("generation_tokens_total")
    assert more == {"length": 6, "abort": 2, "prompt_tokens_total": 61, "e2e_request_latency_seconds_count": 3}
    assert generated >= 6 * 8


def test_a_request_larger_than_the_cache_is_a_400(tmp_path: Path) -> None:
    flags = ("--distributed-executor-backend", "fake", "--num-blocks", "20", "--max-model-len", "300")
    with serving(tmp_path, *flags, "--server-limits.max-queued-requests", "3") as server:
        status, answer = server.post("/v1/completions", {"prompt": [5] * 9, "max_tokens": 4, "n": 4})
        assert (status, answer["error"]["param"]) == (400, "prompt")


def test_templates_of_callers_are_refused_unless_trusted(keyed_server: LiveServer) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ messages[0].content }}"}
    for path in ("/v1/chat/completions", "/tokenize", "/v1/embeddings"):
        status, answer = keyed_server.post(path, body, Authorization="Bearer one")
        assert (status, answer["error"]["param"]) == (400, "chat_template")
        assert "--trust-request-chat-template" in answer["error"]["message"]


def test_the_openapi_page_describes_streams_errors_and_keys(keyed_server: LiveServer) -> None:
    request = urllib.request.Request(f"{keyed_server.url}/openapi.json", headers={"Authorization": "Bearer one"})
    with urllib.request.urlopen(request, timeout=10) as response:
        schema = json.load(response)
    assert schema["components"]["securitySchemes"]["api_key"]["scheme"] == "bearer"
    assert schema["security"] == [{"api_key": []}]
    assert schema["paths"]["/health"]["get"]["security"] == []
    for path in ("/v1/completions", "/v1/chat/completions"):
        responses = schema["paths"][path]["post"]["responses"]
        assert {"application/json", "text/event-stream"} <= set(responses["200"]["content"])
        assert {"400", "401", "429", "503"} <= set(responses)


def test_a_preflight_request_needs_no_key(keyed_server: LiveServer) -> None:
    preflight = urllib.request.Request(
        f"{keyed_server.url}/v1/models",
        method="OPTIONS",
        headers={
            "Origin": "https://a.example",
            "Access-Control-Request-Method": "GET",
            "Access-Control-Request-Headers": "authorization",
        },
    )
    with urllib.request.urlopen(preflight, timeout=10) as response:
        assert response.headers["access-control-allow-origin"] == "https://a.example"
        assert "authorization" in response.headers["access-control-allow-headers"].lower()


def test_a_browser_can_read_refusals(tmp_path: Path) -> None:
    """On a server that asks for a key, which is not one for everyone."""
    limits = ("--server-limits.max-body-bytes", "2000", "--server-limits.requests-per-minute-per-key", "1")
    key = {"Authorization": "Bearer one"}
    flags = ("--host", "0.0.0.0", "--api-key", "one", "--cors-origins", "https://a.example")
    with serving(tmp_path, *FLAGS, *flags, *limits) as server:
        assert "may use this server" not in server.log.read_text()

        def ask(origin: str, body: dict[str, Any], headers: dict[str, str]) -> tuple[int, Message]:
            sent = {"Content-Type": "application/json", "Origin": origin, **headers}
            connection = http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=10)
            connection.request("POST", "/v1/completions", json.dumps(body), sent)
            response = connection.getresponse()
            assert response.status == 200 or b'"error"' in response.read()
            connection.close()
            return response.status, response.headers

        for status, body, headers in (
            (401, TEXT, {}),
            (413, {"prompt": "x" * 3000}, key),
            (200, TEXT, key),
            (429, TEXT, key),
        ):
            got, answer = ask("https://a.example", body, headers)
            assert (got, answer["access-control-allow-origin"]) == (status, "https://a.example")
            assert {"X-Request-Id", "Retry-After", "X-Ignored-Fields", "X-Warning", "Server-Timing"} == set(
                answer["access-control-expose-headers"].split(", ")
            )
            assert answer["x-request-id"]
        assert "access-control-allow-origin" not in ask("https://b.example", TEXT, {})[1]


def test_certificates_are_served_or_refused_in_one_line(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    try:
        make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=localhost -days 1"
        files = ["-keyout", str(key), "-out", str(certificate), "-addext", "subjectAltName=IP:127.0.0.1"]
        subprocess.run([*make.split(), *files], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl command to make a certificate with")
    context = ssl.create_default_context(cafile=str(certificate))
    with serving(
        tmp_path, *FLAGS, "--ssl-certfile", str(certificate), "--ssl-keyfile", str(key), context=context
    ) as server:
        assert server.post("/v1/completions", TEXT)[0] == 200
    refused = pytest.raises(AssertionError, match=r"pagoda: --ssl-certfile .*no usable")
    with refused, serving(tmp_path, *FLAGS, "--ssl-certfile", str(key)):
        pass


def test_a_port_in_use_is_one_line(fake_server: LiveServer) -> None:
    command = ["pagoda", "serve", *FLAGS, "--port", str(port_of(fake_server))]
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "in use" in done.stderr


def test_a_server_without_an_engine_answers_and_ends(tmp_path: Path) -> None:
    env = {"ENGINE_LIVES": "1", "ENGINE_LIVES_FILE": str(tmp_path / "lives"), "PYTHONPATH": os.getcwd()}
    with (
        serving(tmp_path, *FLAGS, env=env, engine="tests.engine.mortal_engine", stepped=True) as server,
        ThreadPoolExecutor(1) as pool,
        server.steps.held_after(5),
    ):
        asked = pool.submit(server.post, "/v1/completions", LONG)
        server.wait_load(1)
        server.kill_engine()
        assert asked.result()[0] == 503
        assert server.process.wait(30) == 1
        assert "pagoda: the engine process ended with exit code" in server.log.read_text()


def test_sigterm_ends_a_server_while_its_engine_restarts(tmp_path: Path) -> None:
    with serving(tmp_path, *FLAGS) as server:
        server.kill_engine()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0


def test_a_stream_longer_than_the_deadline_is_cut(tmp_path: Path) -> None:
    """A reader that does not read never ends by itself."""

    async def main(server: LiveServer) -> float:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(server), limit=1024)
        writer.write(request_bytes({**LONG, "n": 64, "stream": True, "return_token_ids": True}))
        await reader.read(100)
        began_s = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(server.process.wait, 20) == 0
        writer.close()
        return time.monotonic() - began_s

    with serving(
        tmp_path, *FLAGS, "--server-timeouts.drain-timeout-s", "1", "--max-num-seqs", "64", "--num-blocks", "9000"
    ) as server:
        assert 0.9 < asyncio.run(main(server)) < 15


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_starting_ends_everything_at_once(number: signal.Signals) -> None:
    """The engine process has started; the server still loads its tokenizer and the web framework."""
    with reserved_port() as port:
        command = [sys.executable, "-m", "pagoda", "serve", *FLAGS, "--port", str(port)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE)
        end = time.monotonic() + 60
        while not (engines := [pid for pid, started in children(process.pid).items() if b"engine" in started]):
            assert time.monotonic() < end
            time.sleep(0.01)
        (engine,) = engines
        process.send_signal(number)
        assert process.wait(5) == -number
    assert process.stderr is not None
    assert b"Traceback" not in process.stderr.read()
    end = time.monotonic() + 60
    while is_running(engine):
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {**TEXT, "model": "\x00" * 100_000}),
        ("/v1/completions", {**TEXT, "response_format": {"type": "a" * 100_000}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": ["a" * 100] * 1_000}]}]}),
        ("/v1/chat/completions", {"messages": [], "chat_template": "{{ raise_exception('a' * 90000) }}"}),
        ("/detokenize", {"tokens": [1], "model": "\x7f" * 100_000}),
        ("/v1/models/" + "a" * 30_000, {}),
    ],
)
def test_an_error_never_echoes_a_long_input(fake_server: LiveServer, path: str, body: dict[str, Any]) -> None:
    status, answer = fake_server.post(path, body)
    assert 400 <= status < 500
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert len(json.dumps(answer, ensure_ascii=False).encode()) < 4096


def test_a_slash_at_the_end_of_a_path_is_dropped(fake_server: LiveServer) -> None:
    for path in ("/v1/models/", "/health//", "/metrics/"):
        assert fake_server.get(path)[0] == 200
    assert fake_server.post("/v1/completions/", TEXT)[0] == 200


def test_head_gets_the_headers_alone(fake_server: LiveServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port_of(fake_server), timeout=10)
    for path in ("/health", "/v1/models", "/metrics"):
        connection.request("HEAD", path)
        response = connection.getresponse()
        assert (response.status, response.read()) == (200, b"")
    connection.close()


def test_what_is_absent_is_a_404_that_says_so(fake_server: LiveServer) -> None:
    for path in ("/v1/images/generations", "/api/chat", "/v1/audio/speech"):
        status, answer = fake_server.post(path, {})
        assert status == 404
        assert f"there is no route POST {path}" in answer["error"]["message"]


def test_a_path_that_is_taken_for_an_id_is_said_to_be_no_route(fake_server: LiveServer) -> None:
    status, answer = fake_server.post("/v1/responses/compact", {})
    message = "there is no route POST /v1/responses/compact, only GET, HEAD; /docs lists them all"
    assert (status, answer["error"]["message"]) == (405, message)
    status, text = fake_server.get("/v1/completions")
    assert status == 405
    assert json.loads(text)["error"]["message"] == "GET is not allowed on /v1/completions; use POST"


def test_a_path_may_come_with_the_servers_address(fake_server: LiveServer, keyed_server: LiveServer) -> None:
    """RFC 9112, 3.2.2: a server accepts the absolute form."""
    for server in (fake_server, keyed_server):
        head = f"GET http://127.0.0.1:{port_of(server)}".encode()
        for path in (b"/health", b"/livez/"):
            assert talk(server, head + path + b" HTTP/1.1\r\nHost: x\r\n\r\n", until=b"\r\n\r\n").startswith(
                b"HTTP/1.1 200"
            )
    keyless = b"GET http://x/health/../v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    assert talk(keyed_server, keyless, until=b"\r\n\r\n").startswith(b"HTTP/1.1 401")


@pytest.mark.parametrize(
    ("forwarded", "client"),
    [
        ("6.6.6.6 key=admin finish_reason=stop", "unknown"),
        ("fe80::1% key=admin", "fe80::1"),
        ("6.6.6.6", "6.6.6.6"),
        ("evil, 6.6.6.6:80", "6.6.6.6"),
        ("", "127.0.0.1"),
    ],
)
def test_a_client_is_an_address_whatever_a_proxy_says(fake_server: LiveServer, forwarded: str, client: str) -> None:
    request_id = f"forwarded-{abs(hash(forwarded))}"
    head = f"GET /version HTTP/1.1\r\nHost: x\r\nX-Request-Id: {request_id}\r\nX-Forwarded-For: {forwarded}\r\n\r\n"
    assert b" 200 " in talk(fake_server, head.encode(), until=b"}")
    assert fake_server.logged(request_id).endswith(f"client={client}")


def test_only_trusted_proxies_name_the_client(limited: LiveServer) -> None:
    head = b"GET /version HTTP/1.1\r\nHost: x\r\nX-Request-Id: far\r\nX-Forwarded-For: 6.6.6.6\r\n\r\n"
    assert b" 200 " in talk(limited, head, until=b"}")
    assert limited.logged("far").endswith("client=127.0.0.1")


def test_words_of_callers_do_not_look_like_fields_of_the_log(fake_server: LiveServer) -> None:
    body = {**TEXT, "request_id": "a,key=admin"}
    assert fake_server.post("/v1/completions", body, **{"X-Request-Id": "words-1"})[0] == 200
    assert ', id="cmpl-a,key=admin", ' in fake_server.logged("words-1")
    talk(fake_server, b"X" * 5_000 + b" /version HTTP/1.1\r\nHost: x\r\nX-Request-Id: words-2\r\n\r\n", until=b"}")
    assert " other /version 405 in " in fake_server.logged("words-2")


def test_the_log_says_why_a_request_was_refused(fake_server: LiveServer, keyed_server: LiveServer) -> None:
    fake_server.post("/v1/completions", {**TEXT, "temperature": -1}, **{"X-Request-Id": "why-400"})
    assert 'error="temperature' in fake_server.logged("why-400")
    fake_server.post("/v1/completions", {**TEXT, "model": "x\n" * 100}, **{"X-Request-Id": "why-404"})
    line = fake_server.logged("why-404")
    assert (" 404 in " in line, "error=" in line, len(line) < 700) == (True, True, True)
    keyed_server.post("/v1/completions", TEXT, **{"X-Request-Id": "why-401"})
    assert 'error="the API key is missing or wrong' in keyed_server.logged("why-401")
    headers = {"X-Request-Id": "which-key", "Authorization": "Bearer two"}
    assert keyed_server.post("/v1/completions", TEXT, **headers)[0] == 200
    assert keyed_server.logged("which-key").endswith(", key=2")


@pytest.mark.parametrize(
    ("path", "use"),
    [
        ("/v1/complete", "/v1/chat/completions"),
        ("/api/chat", "/v1/chat/completions, or start the server with --ollama"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/embeddings", "/v1/embeddings"),
        ("/completion", "/v1/completions"),
        ("/api/tags", "/v1/models, or start the server with --ollama"),
        ("/v1/messages/batches", "/v1/batches"),
        ("/api/create", "`pagoda serve MODEL` with --chat-template and --override-generation-config"),
        ("/nothing/like/it", ""),
    ],
)
def test_an_unknown_path_names_the_route_that_does_it(fake_server: LiveServer, path: str, use: str) -> None:
    status, answer = fake_server.post(path, {})
    message = answer["error"]["message"]
    assert status == 404
    assert message == f"there is no route POST {path}; " + (f"use {use}; " if use else "") + "/docs lists them all"
