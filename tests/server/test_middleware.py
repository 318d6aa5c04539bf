"""The gate: ids, limits and keys, in front of any app."""

import asyncio
import json
import logging

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from pagoda.server.middleware import Gate


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    body = await Request(scope, receive).body()
    state = scope["state"]
    state["timings"]["tokens"] = 3
    await JSONResponse({"size": len(body), "id": state["request_id"], "key": state["key"]})(scope, receive, send)


def call(gate: Gate, method: str = "POST", path: str = "/x", **kw: object) -> httpx.Response:
    async def run() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(gate), base_url="http://test") as client:
            return await client.request(method, path, **kw)  # type: ignore[arg-type]

    return asyncio.run(run())


def gate(*keys: str) -> Gate:
    return Gate(echo, keys, max_body_bytes=100, max_header_bytes=2000)


def test_ids_are_taken_from_the_header_or_made_and_returned() -> None:
    given = call(gate(), headers={"X-Request-Id": "my-id"})
    assert given.json()["id"] == given.headers["x-request-id"] == "my-id"
    made = call(gate())
    assert made.headers["x-request-id"] == made.json()["id"] != ""
    bad = call(gate(), headers={"X-Request-Id": "a b"})
    assert bad.headers["x-request-id"] != "a b"


def test_every_route_but_health_wants_a_key() -> None:
    guarded = gate("one", "two")
    assert call(guarded).status_code == 401
    assert call(guarded, headers={"Authorization": "Bearer wrong"}).json()["error"]["type"] == "authentication_error"
    assert call(guarded, headers={"Authorization": "Basic two"}).status_code == 401
    ok = call(guarded, headers={"Authorization": "Bearer two"})
    assert ok.status_code == 200
    assert ok.json()["key"] not in ("", "two")
    assert call(guarded, "GET", "/metrics").status_code == 401
    assert call(guarded, "GET", "/health").status_code == 200
    assert call(guarded, "GET", "/health/../metrics").status_code == 401


def test_bodies_and_headers_are_bounded() -> None:
    assert call(gate(), content=b"x" * 100).json()["size"] == 100
    assert call(gate(), content=b"x" * 101).status_code == 413

    async def chunks():  # type: ignore[no-untyped-def]
        for _ in range(3):
            yield b"x" * 50

    assert call(gate(), content=chunks()).status_code == 413
    assert call(gate(), headers={"X-Big": "y" * 3000}).status_code == 431


def test_one_line_in_the_access_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="pagoda.access")
    call(gate("k"), headers={"Authorization": "Bearer k", "X-Request-Id": "abc"})
    (line,) = [json.loads(r.message) for r in caplog.records if r.name == "pagoda.access"]
    assert (line["request_id"], line["status"], line["tokens"], line["path"]) == ("abc", 200, 3, "/x")
    assert "k" != line["key"] != ""
