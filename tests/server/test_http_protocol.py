"""Slow clients and many clients: protocol and gate over real sockets, in front of a tiny app, in virtual time."""

import asyncio
import contextlib
import json
import re
import sys
import tomllib
from collections.abc import AsyncIterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from packaging.requirements import Requirement
from starlette.exceptions import HTTPException
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from pagoda.base.server_config import ServerConfig, ServerLimits, ServerTimeouts
from pagoda.server.draining import Drain
from pagoda.server.errors import on_http_error
from pagoda.server.http_protocol import BoundedHttpProtocol
from pagoda.server.middleware import AccessLog, Gate
from tests.server.virtual_time import run_in_virtual_time

HEAD = b"POST /size HTTP/1.1\r\nHost: x\r\n"
KEEP_ALIVE_S = 0.2


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """/size reads the body, /early answers without, /stream goes on for a second."""
    if scope["path"] == "/size":
        response: Any = JSONResponse({"size": len(await Request(scope, receive).body())})
    elif scope["path"] == "/early":
        response = JSONResponse({"early": True})
    else:
        response = StreamingResponse(_slow_events())
    await response(scope, receive, send)


async def _slow_events() -> AsyncIterator[bytes]:
    for number in range(10):
        await asyncio.sleep(0.1)
        yield b"event %d\n" % number


class Listening:
    """A server on a free port. `refused` counts the calls of on_refusal."""

    def __init__(self, state: ServerState) -> None:
        self.port = 0
        self.refused = 0
        self.state = state

    def count(self) -> None:
        self.refused += 1

    async def open(self, data: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        return reader, writer


@contextlib.asynccontextmanager
async def listening(
    max_connections: int = 4096,
    header_timeout_s: float = 0.3,
    body_timeout_s: float = 0.3,
    max_header_bytes: int = 64 * 2**10,
) -> AsyncIterator[Listening]:
    config = ServerConfig(
        server_limits=ServerLimits(max_connections=max_connections, max_header_bytes=max_header_bytes),
        server_timeouts=ServerTimeouts(header_timeout_s=header_timeout_s, body_timeout_s=body_timeout_s),
    )
    layers = AccessLog(Gate(ExceptionMiddleware(app, {HTTPException: on_http_error}), config, Drain()))  # type: ignore[dict-item]
    settings = uvicorn.Config(layers, ws="none", lifespan="off", timeout_keep_alive=KEEP_ALIVE_S)  # type: ignore[arg-type]
    here = Listening(ServerState())

    def protocol() -> BoundedHttpProtocol:
        return BoundedHttpProtocol(config, here.count, config=settings, server_state=here.state, app_state={})

    server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)
    here.port = server.sockets[0].getsockname()[1]
    try:
        yield here
    finally:
        server.close()


async def drip(writer: asyncio.StreamWriter, data: bytes) -> None:
    """One byte at a time, for longer than any limit here."""
    with contextlib.suppress(ConnectionError):
        for byte in data:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.05)


async def answer_to_drip(here: Listening, begin: bytes, slow: bytes) -> tuple[bytes, float]:
    """What the server says to `begin` at once and `slow` byte by byte until it closes; and after how many seconds."""
    reader, writer = await here.open(begin)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    dripping = asyncio.create_task(drip(writer, slow))
    answer = b""
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(5):
            answer = await reader.read()
    took_s = loop.time() - began_s
    dripping.cancel()
    writer.close()
    return answer, took_s


def error_of(answer: bytes) -> dict[str, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    return json.loads(body)["error"]


@pytest.mark.parametrize(
    ("begin", "slow"),
    [
        (b"", HEAD + b"X-Slow: " + b"a" * 200),
        (HEAD + b"Content-Length: 200\r\n\r\n", b"b" * 200),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nb\r\n" * 40),
    ],
    ids=["head", "body", "chunks"],
)
def test_slow_senders_get_408_in_time(begin: bytes, slow: bytes) -> None:
    async def main() -> tuple[bytes, float]:
        async with listening() as here:
            return await answer_to_drip(here, begin, slow)

    answer, took_s = run_in_virtual_time(main())
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert error_of(answer)["code"] == 408
    assert 0.3 <= took_s < 0.7


def test_idle_connections_are_closed() -> None:
    async def main() -> None:
        async with listening() as here:
            silent, later = here.open(), here.open(HEAD + b"Content-Length: 2\r\n\r\nab")
            (nothing, one), (reader, two) = await silent, await later
            async with asyncio.timeout(5):
                assert await nothing.read() == b""
                assert (await reader.read()).endswith(b'{"size":2}')
            one.close()
            two.close()
            await asyncio.sleep(0.05)
            assert not here.state.connections

    run_in_virtual_time(main())


def test_a_body_that_outlives_its_answer_ends_with_it() -> None:
    async def main() -> tuple[bytes, float]:
        async with listening() as here:
            head = b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 200\r\n\r\n"
            return await answer_to_drip(here, head, b"b" * 200)

    answer, took_s = run_in_virtual_time(main())
    assert answer.endswith(b'{"early":true}')
    assert 0.3 <= took_s < 0.7


def test_no_timeout_cuts_an_answer() -> None:
    """Neither its length, nor a stray line end, nor a slow head after it."""

    async def main() -> list[bytes]:
        async with listening() as here:
            begin = b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n"
            pending = [answer_to_drip(here, begin, slow) for slow in (b"", b"\r\n", HEAD + b"X-Slow: " + b"a" * 99)]
            return [answer for answer, _ in await asyncio.gather(*pending)]

    for answer in run_in_virtual_time(main()):
        assert b"event 9\n" in answer


def test_timeouts_can_be_switched_off() -> None:
    async def main() -> None:
        async with listening(header_timeout_s=0, body_timeout_s=0) as here:
            reader, writer = await here.open()
            await asyncio.sleep(0.5)
            writer.write(HEAD + b"Content-Length: 2\r\n\r\n")
            await asyncio.sleep(0.5)
            writer.write(b"ab")
            assert (await reader.read()).endswith(b'{"size":2}')
            writer.close()

    run_in_virtual_time(main())


def test_further_connections_get_503_and_open_ones_are_served() -> None:
    async def main() -> None:
        whole = HEAD + b"Content-Length: 2\r\n\r\nab"
        async with listening(max_connections=3, header_timeout_s=10) as here:
            inside = [await here.open() for _ in range(3)]
            await asyncio.sleep(0.05)
            reader, writer = await here.open(whole)
            refused = await reader.read()
            assert refused.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after: 1" in refused
            assert "3 connections" in error_of(refused)["message"]
            writer.close()
            silent, writer = await here.open()
            async with asyncio.timeout(5):
                assert await silent.read() == b"", "it may not wait for ever either"
            writer.close()
            assert here.refused == 2
            assert len(here.state.connections) <= 3
            inside[0][1].close()
            await asyncio.sleep(0.05)
            inside[1][1].write(whole)
            for reader, writer in (inside[1], await here.open(whole)):
                assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
                writer.close()
            inside[2][1].close()

    run_in_virtual_time(main())


def test_bytes_that_are_not_http_are_a_400_in_openais_shape() -> None:
    async def main() -> bytes:
        async with listening() as here:
            reader, writer = await here.open(b"\x16\x03\x01 what\r\n\r\n")
            answer = await reader.read()
            writer.close()
            return answer

    assert error_of(run_in_virtual_time(main()))["code"] == 400


WHOLE = HEAD + b"Content-Length: 2\r\n\r\nab"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
STREAM = b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n"


async def said_to(here: Listening, *pieces: bytes, half_close: bool = False) -> bytes:
    """All that the server answers to these pieces, sent one after the other, until it closes."""
    reader, writer = await here.open()
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(0.05)
    if half_close:
        writer.write_eof()
    try:
        async with asyncio.timeout(5):
            return await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize(
    "pieces",
    [
        (CHUNKED + b"zz\r\nab\r\n",),
        (CHUNKED, b"2\r\nab\r\n", b"-1\r\n"),
        (CHUNKED + b"2\r\nabc\r\n0\r\n\r\n",),
        (CHUNKED + b"ffffffffffffffffff\r\n",),
        (HEAD + b"Content-Length: x\r\n\r\n",),
        (HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\nab",),
        (HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\nab",),
        (b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",),
        (b"\x00" * 100,),
    ],
)
def test_bytes_that_are_not_http_are_answered(pieces: tuple[bytes, ...]) -> None:
    async def main() -> tuple[bytes, int]:
        async with listening(header_timeout_s=5, body_timeout_s=5) as here:
            answer = await said_to(here, *pieces)
            await asyncio.sleep(0.1)
            return answer, len(here.state.connections)

    answer, num_connections = run_in_virtual_time(main())
    assert answer.startswith(b"HTTP/1.1 400 "), answer
    assert answer.count(b"\r\n\r\n") == 1
    assert error_of(answer)["code"] == 400
    assert num_connections == 0


@pytest.mark.parametrize("surplus", [b"xyz\r\n\r\n", b"\x00\x01", b"GET\r\n\r\n", b"A" * 2000])
def test_surplus_bytes_do_not_lose_the_answer_to_the_request_before_them(surplus: bytes) -> None:
    async def main() -> list[bytes]:
        async with listening(header_timeout_s=5, body_timeout_s=5) as here:
            pending = [
                said_to(here, WHOLE + surplus),
                said_to(here, STREAM + surplus),
                said_to(here, STREAM, surplus, surplus),
                said_to(here, STREAM + WHOLE + surplus),
            ]
            return await asyncio.gather(*pending)

    one, *streams, both = run_in_virtual_time(main())
    assert one.startswith(b"HTTP/1.1 200 ")
    assert b'{"size":2}' in one
    for answer in (*streams, both):
        assert b"event 9\n" in answer
    assert b'{"size":2}' in both


def test_a_broken_request_waits_for_the_answers_before_it() -> None:
    async def main() -> bytes:
        async with listening(header_timeout_s=5, body_timeout_s=5) as here:
            return await said_to(here, STREAM + WHOLE, CHUNKED + b"zz\r\n")

    answer = run_in_virtual_time(main())
    stream, size, broken = answer.split(b"HTTP/1.1 ")[1:]
    assert b"event 9\n" in stream
    assert b'{"size":2}' in size
    assert broken.startswith(b"400 ")
    assert b'"error"' in broken


@pytest.mark.parametrize(
    "begun",
    [b"GET /si", HEAD, HEAD + b"Content-Length: 5\r\n\r\nab", CHUNKED + b"5\r\nab"],
    ids=["line", "head", "body", "chunk"],
)
def test_a_request_that_ends_early_is_answered(begun: bytes) -> None:
    async def main() -> bytes:
        async with listening(header_timeout_s=5, body_timeout_s=5) as here:
            return await said_to(here, begun, half_close=True)

    answer = run_in_virtual_time(main())
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert "ended" in error_of(answer)["message"]


def test_a_client_that_closes_after_its_request_counts_as_disconnected() -> None:
    async def main() -> tuple[bytes, bytes, bytes]:
        async with listening(header_timeout_s=5, body_timeout_s=5) as here:
            silent = await said_to(here, half_close=True)
            early = await said_to(
                here, b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n", half_close=True
            )
            stream = await said_to(here, STREAM, half_close=True)
            return silent, early, stream

    silent, early, stream = run_in_virtual_time(main())
    assert silent == b""
    assert early.count(b"HTTP/1.1") == 1, "no second answer to one request"
    assert b"event 9\n" not in stream


def test_a_client_that_leaves_ends_the_running_request_though_others_wait_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[int] = []

    async def long_stream() -> AsyncIterator[bytes]:
        for number in range(100):
            await asyncio.sleep(0.1)
            sent.append(number)
            yield b"event %d\n" % number

    monkeypatch.setattr(sys.modules[__name__], "_slow_events", long_stream)

    async def main() -> None:
        async with listening(header_timeout_s=60, body_timeout_s=60) as here:
            _, writer = await here.open(STREAM + WHOLE + WHOLE)
            await asyncio.sleep(1.05)
            writer.transport.abort()
            await asyncio.sleep(20)

    run_in_virtual_time(main())
    assert 5 < len(sent) < 20


def test_an_offer_to_change_the_protocol_is_declined_by_answering() -> None:
    """As curl and Java's client make it, which go on with the same connection."""
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"

    request = HEAD + offer + b"Content-Length: 2\r\n\r\nab"
    chunked = HEAD + offer + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    last = HEAD + b"Connection: close\r\n\r\n"

    async def main() -> list[bytes]:
        async with listening(header_timeout_s=5, body_timeout_s=5) as here:
            return [
                await said_to(here, request + WHOLE + request + last),
                await said_to(here, chunked[:-12], chunked[-12:] + HEAD + offer + b"\r\n" + last),
            ]

    sizes = [re.findall(rb'{"size":(\d)}', answer) for answer in run_in_virtual_time(main())]
    assert sizes == [[b"2", b"2", b"2", b"0"], [b"3", b"0", b"0"]]


def test_half_sent_bodies_are_closed_by_their_deadline() -> None:
    """Also where the answer did not wait for them, and where they come after other requests."""

    async def main() -> None:
        async with listening() as here:
            half = b"Content-Length: 500\r\n\r\nab"
            for begin, status in (
                (HEAD + half, b"408"),
                (b"POST /early HTTP/1.1\r\nHost: x\r\n" + half, b"200"),
                (WHOLE + HEAD + half, b"200"),
            ):
                answer, took_s = await answer_to_drip(here, begin, b"")
                assert answer.startswith(b"HTTP/1.1 " + status), begin
                assert took_s < 2
            await asyncio.sleep(0.1)
            assert not here.state.connections

    run_in_virtual_time(main())


@pytest.mark.parametrize("endless", [b"a: b\r\n", b"a" * 1000], ids=["lines", "one line"])
@pytest.mark.parametrize("before", [CHUNKED + b"2\r\nab\r\n0\r\n", CHUNKED + b"2;"], ids=["trailers", "extension"])
def test_trailers_and_extensions_are_bounded(before: bytes, endless: bytes) -> None:
    start = b"x: " if endless[:2] == b"aa" and before.endswith(b"0\r\n") else b""
    if before.endswith(b";"):
        endless = b"a" * 1000

    async def main() -> bytes:
        async with listening(header_timeout_s=9, body_timeout_s=9, max_header_bytes=10_000) as here:
            return await said_to(here, before + start + endless * (30_000 // len(endless)))

    answer = run_in_virtual_time(main())
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert "10000 bytes" in error_of(answer)["message"]


def test_trailers_are_dropped() -> None:
    async def main() -> list[tuple[bytes, bytes]]:
        async with listening() as here:
            _, writer = await here.open(CHUNKED + b"2\r\nab\r\n0\r\n" + b"a: b\r\n" * 100)
            await asyncio.sleep(0.1)
            (connection,) = here.state.connections
            writer.close()
            return connection.headers  # type: ignore[union-attr]

    assert len(run_in_virtual_time(main())) == 2


def test_few_pipelined_requests_wait_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    longest = 0
    plain = BoundedHttpProtocol.on_headers_complete

    def noting(connection: BoundedHttpProtocol) -> None:
        nonlocal longest
        plain(connection)
        longest = max(longest, len(connection.pipeline))

    monkeypatch.setattr(BoundedHttpProtocol, "on_headers_complete", noting)

    async def main() -> bytes:
        async with listening(header_timeout_s=5, body_timeout_s=5) as here:
            return await said_to(here, WHOLE * 2000 + HEAD + b"Connection: close\r\n\r\n")

    answer = run_in_virtual_time(main())
    assert answer.count(b'{"size":2}') == 2000
    assert answer.endswith(b'{"size":0}')
    assert longest < 300, "not all that one read brought"


def test_pipelined_connections_take_turns_and_cost_the_same_per_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work is counted instead of timed."""
    num_connections, num_requests = 6, 400
    completed: list[BoundedHttpProtocol] = []
    num_calls = num_bytes = 0
    plain_complete, plain_slice = BoundedHttpProtocol.on_response_complete, BoundedHttpProtocol._parse_slice

    def noting(connection: BoundedHttpProtocol) -> None:
        completed.append(connection)
        plain_complete(connection)

    def counting(connection: BoundedHttpProtocol, data: bytes) -> None:
        nonlocal num_bytes
        num_bytes += len(data)
        plain_slice(connection, data)

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    monkeypatch.setattr(BoundedHttpProtocol, "on_response_complete", noting)
    monkeypatch.setattr(BoundedHttpProtocol, "_parse_slice", counting)

    async def ask(here: Listening) -> None:
        reader, writer = await here.open(WHOLE * num_requests + HEAD + b"Connection: close\r\n\r\n")
        assert (await reader.read()).count(b'{"size":2}') == num_requests
        writer.close()

    async def ask_all(count: int) -> None:
        async with listening(header_timeout_s=600, body_timeout_s=600) as here:
            await asyncio.gather(*(ask(here) for _ in range(count)))

    def calls_per_answer(count: int) -> float:
        nonlocal num_calls, num_bytes
        completed.clear()
        num_calls = num_bytes = 0
        sys.setprofile(profile)
        try:
            asyncio.run(ask_all(count))
        finally:
            sys.setprofile(None)
        assert num_bytes < 1.1 * count * num_requests * len(WHOLE), "what waits is not parsed again"
        return num_calls / (count * num_requests)

    alone = calls_per_answer(1)
    assert calls_per_answer(num_connections) < 1.3 * alone

    begin = max(completed.index(connection) for connection in set(completed))
    end = len(completed) - max(completed[::-1].index(connection) for connection in set(completed))
    assert end - begin > num_requests * num_connections / 2
    turns = dict.fromkeys(completed, 0)
    for connection in completed[begin:end]:  # all are being answered
        turns[connection] += 1
        assert max(turns.values()) - min(turns.values()) <= 4, "no connection is ahead"


def test_uvicorn_is_capped_because_its_internals_are_used() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    (uvicorn_range,) = (
        requirement.specifier
        for requirement in map(Requirement, project["optional-dependencies"]["serve"])
        if requirement.name == "uvicorn"
    )
    assert version("uvicorn") in uvicorn_range
    assert "99" not in uvicorn_range, "a new uvicorn may break BoundedHttpProtocol: try it, then raise the cap"
