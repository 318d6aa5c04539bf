"""SIGTERM: what runs is finished, what comes is refused, and the deadline ends the rest with an answer."""

import asyncio
import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.server.live import FAKE_ENGINE, LiveServer, serving
from tests.server.turn_apis import BODIES, STREAMED, Turn, asked, events_of

SLOW = "tests.engine.slow_engine"
NEVER_ENDING = {"ENGINE_STEP_S": "0.05"}  # 100 s for the longest answer
TEXT: dict[str, Any] = {"prompt": [9] * 50, "ignore_eos": True}


async def reply(session: aiohttp.ClientSession, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any, Any]:
    """(status, JSON body or None, headers); a GET without a body."""
    async with session.request("GET" if body is None else "POST", path, json=body) as response:
        text = await response.text()
        return response.status, json.loads(text) if text.startswith("{") else None, response.headers


async def lines(session: aiohttp.ClientSession, body: dict[str, Any]) -> list[bytes]:
    async with session.post("/v1/completions", json={**body, "stream": True}) as response:
        return [line async for line in response.content if line.startswith(b"data: ")]


async def sent(session: aiohttp.ClientSession, path: str, turn: Turn) -> bytes:
    """What a stream of a route consists of."""
    async with session.post(path, json=asked(path, turn, stream=True)) as response:
        return await response.read()


async def until_running(server: LiveServer, count: int) -> None:
    end = time.monotonic() + 20
    while (await asyncio.to_thread(server.load))["server_load"] < count:
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


async def until_draining(session: aiohttp.ClientSession) -> None:
    """Wait until a signal has reached the server."""
    end = time.monotonic() + 20
    while (await reply(session, "/health"))[0] != 503:
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


def test_new_requests_get_503_until_the_last_one_ends(tmp_path: Path) -> None:
    async def main(server: LiveServer) -> None:
        async with aiohttp.ClientSession(server.url) as running, aiohttp.ClientSession(server.url) as kept:
            stream = asyncio.create_task(lines(running, {**TEXT, "max_tokens": 500}))
            whole = asyncio.create_task(reply(running, "/v1/completions", {**TEXT, "max_tokens": 500}))
            await until_running(server, 2)
            assert (await reply(kept, "/v1/models"))[0] == 200
            server.process.send_signal(signal.SIGTERM)
            await until_draining(kept)
            assert not stream.done()
            async with aiohttp.ClientSession(server.url) as new:
                for session in (kept, new):
                    for path in (*BODIES, "/tokenize"):
                        status, body, headers = await reply(session, path, {"prompt": "x"})
                        assert status == 503
                        assert "shutting down" in str(body["error"])
                        assert int(headers["Retry-After"]) > 0
                    status, _, headers = await reply(session, "/health")
                    assert (status, "Retry-After" in headers) == (503, True)
                    assert (await reply(session, "/load"))[1]["server_load"] == 2
                    assert (await reply(session, "/metrics"))[0] == 200
            server.steps.release()
            assert (await whole)[1]["usage"]["completion_tokens"] == 500
            assert (await stream)[-1] == b"data: [DONE]\n"

    with serving(tmp_path, *FAKE_ENGINE, "--ollama", stepped=True) as server, server.steps.held_after(5):
        asyncio.run(main(server))
        assert server.process.wait(20) == 0
        assert "Traceback" not in server.log.read_text()


def test_at_the_deadline_every_request_gets_an_error(tmp_path: Path) -> None:
    """A JSON 503 or an error event, in every API; also where the body is still arriving."""

    async def main(server: LiveServer) -> None:
        port = int(server.url.rsplit(":", 1)[1])
        half, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{")
        async with aiohttp.ClientSession(server.url) as session:
            body = {**TEXT, "max_tokens": 1990}
            turn = Turn("x", 1900)
            wholes = [asyncio.create_task(reply(session, path, asked(path, turn))) for path in BODIES]
            wholes.append(
                asyncio.create_task(reply(session, "/v1/completions", {**body, "prompt": ["a", "b"], "n": 2}))
            )
            streams = {path: asyncio.create_task(sent(session, path, turn)) for path in STREAMED}
            stream = asyncio.create_task(lines(session, body))
            await until_running(server, len(BODIES) + 4 + len(STREAMED) + 1)
            server.process.send_signal(signal.SIGTERM)
            for whole in wholes:
                status, answer, headers = await whole
                assert status == 503
                assert "shutting down" in str(answer["error"])
                assert "Retry-After" in headers
            for path, events in streams.items():
                last = events_of(await events)[-1]
                assert "shutting down" in str(last.get("response", last)["error"]), path
            *_, error, done = await stream
            assert json.loads(error[6:])["error"]["code"] == 503
            assert done == b"data: [DONE]\n"
        answer = await half.read()
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b'"error"' in answer
        writer.close()

    with serving(
        tmp_path, *FAKE_ENGINE, "--ollama", "--server-timeouts.drain-timeout-s", "0.5", env=NEVER_ENDING, engine=SLOW
    ) as server:
        asyncio.run(main(server))
        assert server.process.wait(20) == 0
        log = server.log.read_text()
        assert "Traceback" not in log
        assert "Exception" not in log
        assert len(re.findall(r" (?:GET|POST) \S+ 503 in ", log)) == len(BODIES) + len(STREAMED) + 3


def test_what_is_in_line_at_the_deadline_never_begins(tmp_path: Path) -> None:
    async def main(server: LiveServer) -> None:
        async with aiohttp.ClientSession(server.url) as session:
            body = {**TEXT, "max_tokens": 1000, "stream": True}
            begun = asyncio.create_task(lines(session, body))
            await until_running(server, 1)
            in_line = asyncio.create_task(reply(session, "/v1/completions", body))
            await until_running(server, 2)
            server.process.send_signal(signal.SIGTERM)
            status, answer, headers = await in_line
            assert (status, answer["error"]["code"], "Retry-After" in headers) == (503, 503, True)
            *_, error, done = await begun
            assert json.loads(error[6:])["error"]["code"] == 503
            assert done == b"data: [DONE]\n"

    flags = ("--server-timeouts.drain-timeout-s", "0.5", "--server-limits.max-queued-tokens", "1500")
    with serving(tmp_path, *FAKE_ENGINE, *flags, env=NEVER_ENDING, engine=SLOW) as server:
        asyncio.run(main(server))
        assert server.process.wait(20) == 0
        assert "Traceback" not in server.log.read_text()


@pytest.mark.parametrize("timeout_s", ["30", pytest.param("0", marks=pytest.mark.slow)])
def test_an_idle_server_ends_at_once(tmp_path: Path, timeout_s: str) -> None:
    async def main(server: LiveServer) -> None:
        async with aiohttp.ClientSession(server.url) as session:
            assert (await reply(session, "/health"))[0] == 200
            server.process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(server.process.wait, 20) == 0, "it did not wait for 30 s"

    with serving(tmp_path, *FAKE_ENGINE, "--server-timeouts.drain-timeout-s", f"{timeout_s}") as server:
        asyncio.run(main(server))


def test_a_second_signal_ends_the_drain(tmp_path: Path) -> None:
    async def main(server: LiveServer) -> None:
        async with aiohttp.ClientSession(server.url) as session:
            stream = asyncio.create_task(lines(session, {**TEXT, "max_tokens": 1990}))
            await until_running(server, 1)
            server.process.send_signal(signal.SIGTERM)
            await until_draining(session)
            server.process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(server.process.wait, 20) is not None  # the drain takes 30 s
            with pytest.raises(aiohttp.ClientError):
                await stream

    with serving(tmp_path, *FAKE_ENGINE, env=NEVER_ENDING, engine=SLOW) as server:
        asyncio.run(main(server))
