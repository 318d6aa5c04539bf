"""Requests that no client should send, next to healthy ones: each is answered, and the healthy ones get their tokens.

The attacker and the healthy client have keys of their own. Every answer is complete; an error of a route has OpenAI's
format and is short; no answer is a 5xx. Afterwards the server is idle: no request, no block is held.
"""

import asyncio
import contextlib
import json
import random
import signal
import socket
import struct
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.hostile.cases import (
    CHAT,
    METHODS,
    ROUTES,
    TEXT,
    Case,
    broken_cases,
    field_cases,
    http_cases,
    put,
    request,
    size_cases,
    write,
)
from tests.server.live import FAKE_FLAGS, LiveServer, serving
from tests.server.turn_apis import BODIES, STREAMED, Turn, asked

KEYS = ("--api-key", "healthy", "--api-key", "attacker")
STATUSES = {200, 400, 401, 403, 404, 405, 413, 429}
MAX_ERROR_BYTES = 4096
AT_ONCE = 16
HEALTHY = {"prompt": [9] * 20, "seed": 11, "temperature": 0.8, "max_tokens": 100, "ignore_eos": True, "stream": True}


def port_of(server: LiveServer) -> int:
    return int(server.url.rsplit(":", 1)[1])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serving(
        tmp_path_factory.mktemp("hostile"), *FAKE_FLAGS, *KEYS, "--enable-prompt-embeds", "--ollama"
    ) as started:
        yield started


def healthy_text(server: LiveServer) -> str:
    """One stream of the healthy client, whole. Comes again where the server is full."""
    headers = {"Authorization": "Bearer healthy", "Content-Type": "application/json"}
    body = {**HEALTHY, "stream": False}
    while (got := server.post(TEXT, body, **headers))[0] == 429:
        time.sleep(0.05)
    assert got[0] == 200, got
    return str(got[1]["choices"][0]["text"])


@contextlib.contextmanager
def healthy_client(server: LiveServer) -> Iterator[list[str]]:
    """Ask for the same text all the time, on a thread; at the end, every answer must have been the first one."""
    expected = healthy_text(server)
    texts: list[str] = []
    ended = threading.Event()

    def ask() -> None:
        while not ended.is_set():
            try:
                texts.append(healthy_text(server))
            except Exception as error:
                texts.append(repr(error))
                return

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield texts
    finally:
        ended.set()
        thread.join(60)
    assert texts
    assert set(texts) == {expected}


def problem(status: int, content_type: str, body: bytes) -> str:
    """Return what is wrong with an answer, or nothing."""
    if status not in STATUSES:
        return f"status {status}: {body[:200]!r}"
    if status < 400:
        return ""
    if len(body) > MAX_ERROR_BYTES:
        return f"an error of {len(body)} bytes"
    if not content_type.startswith("application/json"):
        return f"an error that is not JSON: {body[:200]!r}"
    answer = json.loads(body)
    error = answer["error"]
    if isinstance(error, str):
        return (
            "" if answer.keys() == {"error"} and "internal error" not in error else f"not of Ollama's format: {answer}"
        )
    fields = {"message", "type"} if answer.get("type") == "error" else {"message", "type", "param", "code"}
    if set(error) != fields or "internal error" in error["message"]:
        return f"not an error of OpenAI's or Anthropic's format: {error}"
    return ""


async def post_all(server: LiveServer, cases: list[Case]) -> list[str]:
    """Post them, some at once; return the problems."""
    found: list[str] = []
    places = asyncio.Semaphore(AT_ONCE)
    headers = {"Authorization": "Bearer attacker", "Content-Type": "application/json"}
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(server.url, headers=headers, timeout=timeout) as session:

        async def post(case: Case) -> None:
            async with places:
                try:
                    method = METHODS.get(case.path, "POST")
                    async with session.request(method, case.path, data=case.body) as response:
                        said = problem(response.status, response.content_type, await response.read())
                except (aiohttp.ClientError, TimeoutError) as error:
                    too_large = len(case.body) > 16 * 2**20  # refused, and closed, while it is sent
                    said = "" if too_large else repr(error)
            if said:
                found.append(f"{case.path} {case.title}: {said}\n    {case.body[:200]!r}")

        await asyncio.gather(*map(post, cases))
    return found


def assert_unharmed(server: LiveServer, restarts: int = 0) -> None:
    """The server is idle again, and nothing in its log is a surprise."""
    end = 300
    while True:
        status, text = get(server, "/load")
        load = json.loads(text)
        if load["server_load"] == load["live_tokens"] == load["running"] == load["kv_cache_usage"] == 0:
            break
        end -= 1
        assert end, f"the server does not come to rest: {load}"
        time.sleep(0.1)
    assert status == 200
    assert load["engine_restarts"] == restarts
    assert "Traceback" not in server.log.read_text()
    assert len(get(server, "/metrics")[1]) < 200_000, "a label holds what callers sent"


def get(server: LiveServer, path: str) -> tuple[int, str]:
    asked = urllib.request.Request(server.url + path, headers={"Authorization": "Bearer healthy"})
    with urllib.request.urlopen(asked, timeout=30) as response:
        return response.status, response.read().decode()


def test_fields_with_values_that_they_do_not_expect(server: LiveServer) -> None:
    with healthy_client(server):
        found = asyncio.run(post_all(server, field_cases(seed=1, count=1_000)))
    assert not found, "\n".join(found[:20])
    assert_unharmed(server)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
def test_many_fields_with_values_that_they_do_not_expect(server: LiveServer, seed: int) -> None:
    with healthy_client(server):
        found = asyncio.run(post_all(server, field_cases(seed, count=5_000)))
    assert not found, "\n".join(found[:20])
    assert_unharmed(server)


def test_a_prompt_that_is_too_long_is_refused_in_the_words_of_its_api(server: LiveServer) -> None:
    """Without a remedy that the API does not have."""
    for path, kind in BODIES.items():
        answer = server.post(path, asked(path, Turn("word " * 3_000, 3)), Authorization="Bearer healthy")
        text = json.dumps(answer)
        assert answer[0] == 400, path
        assert "maximum context length" in text, path
        assert ("truncate_prompt_tokens" in text) == ("truncate_prompt_tokens" in kind.__struct_fields__), (path, text)


def test_sizes_up_to_the_limits_and_beyond(server: LiveServer) -> None:
    with healthy_client(server):
        found = asyncio.run(post_all(server, list(size_cases())))
    assert not found, "\n".join(found[:20])
    assert_unharmed(server)


def test_bodies_that_are_not_a_json_object(server: LiveServer) -> None:
    found = asyncio.run(post_all(server, list(broken_cases())))
    assert not found, "\n".join(found[:20])
    assert_unharmed(server)


async def talk(port: int, data: bytes) -> bytes:
    """Send the bytes, and return what is answered until the server closes, or for a second of silence.

    A server that waits for more is given ten seconds.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    with contextlib.suppress(ConnectionError, TimeoutError):
        writer.write(data)
        await writer.drain()
        while piece := await asyncio.wait_for(reader.read(2**16), 10 if not answer else 1):
            answer += piece
    writer.close()
    return answer


def test_bad_http_is_answered_or_closed_and_concerns_no_other_connection(server: LiveServer) -> None:
    async def main() -> dict[str, bytes]:
        cases = dict(http_cases())
        answers = await asyncio.gather(*(talk(port_of(server), data) for data in cases.values()))
        return dict(zip(cases, answers, strict=True))

    with healthy_client(server):
        answers = asyncio.run(main())
    for title, answer in answers.items():
        assert not answer or answer.startswith(b"HTTP/1.1 "), (title, answer[:200])
        assert not answer.startswith(b"HTTP/1.1 5"), (title, answer[:500])
    assert answers["forty requests at once"].count(b"HTTP/1.1 200 ") == 40
    assert_unharmed(server)


def test_clients_that_vanish_are_aborted(server: LiveServer) -> None:
    """In the middle of a request, after it, after the first bytes of the answer, and with a reset."""
    draw = random.Random(5)

    async def vanish(number: int) -> None:
        path = draw.choice(tuple(BODIES))
        body = asked(path, Turn("x", 1_500), stream=path in STREAMED and number % 3 > 0)
        if path in (CHAT, TEXT):
            body["n"] = draw.choice((1, 4))
        data = request(path, write(body))
        how = number % 5
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(server))
        writer.write(data[: draw.randrange(1, len(data))] if how == 0 else data)
        await writer.drain()
        if how == 1 and body["stream"]:
            await reader.read(100)
        if how == 2:
            writer.write_eof()
            await asyncio.sleep(0.05)
        if how == 3:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        writer.close()

    async def main() -> None:
        for _ in range(4):
            await asyncio.gather(*(vanish(number) for number in range(30)))

    with healthy_client(server):
        asyncio.run(main())
    assert_unharmed(server)


def test_a_flood_of_requests_is_served_or_refused(server: LiveServer) -> None:
    """More at once than the server admits, some of them invalid: each is answered, with its tokens or a reason."""
    cases = [
        Case("good", path, write(asked(path, Turn("x", 20)) if path in BODIES else good)) for path, good, _ in ROUTES
    ]
    cases += [Case("bad", path, write(put(good, "model", [1]))) for path, good, _ in ROUTES]

    async def main() -> list[str]:
        found = await asyncio.gather(*(post_all(server, cases) for _ in range(11)))
        return [said for part in found for said in part]

    with healthy_client(server):
        assert asyncio.run(main()) == []
    assert_unharmed(server)


def test_hostile_requests_while_the_engine_dies(tmp_path: Path) -> None:
    with serving(tmp_path, *FAKE_FLAGS, *KEYS, "--ollama") as server:
        with healthy_client(server) as texts:
            threading.Timer(0.5, server.kill_engine).start()
            found = asyncio.run(post_all(server, field_cases(seed=4, count=300)))
            assert not found, "\n".join(found[:20])
            while json.loads(get(server, "/load")[1])["engine_restarts"] < 1:
                time.sleep(0.05)
            num_texts = len(texts)
            while len(texts) < num_texts + 2:
                time.sleep(0.05)
        assert_unharmed(server, restarts=1)


def test_hostile_requests_while_the_server_drains(tmp_path: Path) -> None:
    with serving(tmp_path, *FAKE_FLAGS, *KEYS, "--ollama") as server:

        async def main() -> list[str]:
            sending = asyncio.create_task(post_all(server, field_cases(seed=6, count=200)))
            await asyncio.sleep(0.3)
            server.process.send_signal(signal.SIGTERM)
            return await sending

        found = asyncio.run(main())
        expected = ("status 503", "ClientConnectorError", "ServerDisconnected", "ClientOSError", "ConnectionReset")
        assert not [said for said in found if not any(one in said for one in expected)], found[:20]
        assert server.process.wait(30) == 0
        assert "Traceback" not in server.log.read_text()
