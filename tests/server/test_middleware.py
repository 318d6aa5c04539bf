"""The layers around any app: ids and the log, keys and limits."""

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.exceptions import HTTPException
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from pagoda.base.server_config import ServerConfig, ServerLimits
from pagoda.process.logs import FIELDS
from pagoda.server import middleware
from pagoda.server.admission import Refusal
from pagoda.server.app import create_app
from pagoda.server.errors import ApiError, on_http_error
from pagoda.server.middleware import AccessLog, Drain, Gate
from pagoda.server.request_state import Caller, request_state


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    body = await Request(scope, receive).body()
    state = request_state(scope)
    state.audio_s = 3.0
    await JSONResponse({"size": len(body), "id": state.request_id, "key": state.caller.key})(scope, receive, send)


def call(app: ASGIApp, method: str = "POST", path: str = "/x", **kw: object) -> httpx.Response:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **kw)  # type: ignore[arg-type]

    return asyncio.run(run())


CONFIG = ServerConfig(server_limits=ServerLimits(max_body_bytes=100))


def gate(*keys: str) -> AccessLog:
    app = ExceptionMiddleware(echo, {HTTPException: on_http_error})
    config = ServerConfig(api_keys=keys, server_limits=ServerLimits(max_body_bytes=100))
    return AccessLog(Gate(app, config, Drain()), lambda *_: None)


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


def test_a_callers_owner_is_of_its_key_however_the_keys_are_listed() -> None:
    def owner(key: str, *keys: str, admin: str | None = None) -> tuple[str, str]:
        found: list[Caller] = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            found.append(request_state(scope).caller)
            await JSONResponse({})(scope, receive, send)

        config = ServerConfig(api_keys=keys, admin_api_key=admin)
        call(AccessLog(Gate(app, config, Drain()), lambda *_: None), headers={"x-api-key": key})
        return found[0].key, found[0].owner

    (first, one), (second, same) = owner("one", "one", "two"), owner("one", "two", "one")
    assert (first, second) == ("1", "2")
    assert one == same != owner("two", "one", "two")[1]
    assert owner("one") == ("", "")
    assert owner("one", "two", "one", admin="one") == ("admin", one)


def test_bodies_are_bounded() -> None:
    assert call(gate(), content=b"x" * 100).json()["size"] == 100
    assert call(gate(), content=b"x" * 101).status_code == 413

    async def chunks():  # type: ignore[no-untyped-def]
        for _ in range(3):
            yield b"x" * 50

    assert call(gate(), content=chunks()).status_code == 413


def test_the_bodies_held_at_once_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "MAX_HELD_BODY_BYTES", 150)
    is_held, may_end = asyncio.Event(), asyncio.Event()

    async def hold(scope: Scope, receive: Receive, send: Send) -> None:
        size = len(await Request(scope, receive).body())
        if scope["path"] == "/twice":
            request_state(scope).hold(size)
        if scope["path"] == "/held":
            is_held.set()
            await may_end.wait()
        await JSONResponse({})(scope, receive, send)

    def refuse(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, Refusal)
        return JSONResponse({}, 429, {"Retry-After": str(error.retry_after_s)})

    app = AccessLog(Gate(ExceptionMiddleware(hold, {Refusal: refuse}), CONFIG, Drain()), lambda *_: None)  # type: ignore[dict-item]

    async def main() -> None:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            held = asyncio.create_task(client.post("/held", content=b"x" * 100))
            await is_held.wait()
            refused = await client.post("/x", content=b"x" * 80)
            assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
            assert (await client.post("/x", content=b"x" * 40)).status_code == 200
            assert (await client.post("/twice", content=b"x" * 40)).status_code == 429
            may_end.set()
            await held
            assert (await client.post("/x", content=b"x" * 80)).status_code == 200

    asyncio.run(main())


def test_one_line_in_the_access_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="pagoda.access")
    call(gate("k"), headers={"Authorization": "Bearer k", "X-Request-Id": "abc"})
    (line,) = [getattr(r, FIELDS) for r in caplog.records if r.name == "pagoda.access"]
    assert (line["request_id"], line["status"], line["audio_s"], line["path"]) == ("abc", 200, 3.0, "/x")
    assert "k" != line["key"] != ""


def test_a_path_does_not_look_like_fields_and_is_cut_off(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="pagoda.access")
    call(gate(), path="/x%20200%20in%201%20ms%2C%20model=m" + "y" * 1000)
    (entry,) = [r for r in caplog.records if r.name == "pagoda.access"]
    assert entry.getMessage().startswith("POST /x%20200%20in%201%20ms%2C%20model%3Dmy")
    assert len(getattr(entry, FIELDS)["path"]) == 200


def test_an_unexpected_error_leaves_through_all_layers(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="pagoda.access")
    counted: list[tuple[str, str, int]] = []
    metrics = SimpleNamespace(on_http=lambda *end: counted.append(end))
    # A state that no route can use.
    model = SimpleNamespace(starter=SimpleNamespace(metrics=metrics))
    broken: Any = SimpleNamespace(drain=Drain(), telemetry=None, model=model)
    app = create_app(broken, ServerConfig(cors_origins=("*",)))
    answer = call(app, "GET", "/v1/models", headers={"Origin": "https://a.example", "X-Request-Id": "abc"})
    assert answer.json()["error"]["type"] == "internal_server_error"
    assert (answer.headers["x-request-id"], answer.headers["access-control-allow-origin"]) == ("abc", "*")
    (line,) = [getattr(r, FIELDS) for r in caplog.records if r.name == "pagoda.access"]
    assert line["status"] == 500
    assert counted == [("GET", "/v1/models", 500)]


def test_a_request_with_background_work_is_logged_when_that_has_ended(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pagoda.access")
    drain, may_end, ended = Drain(), asyncio.Event(), []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def work() -> None:
            await may_end.wait()
            request_state(scope).model = "m"
            request_state(scope).fail(ApiError(500, "broken"))

        request_state(scope).work = drain.run(work(), lambda: None)
        await JSONResponse({})(scope, receive, send)

    async def main() -> None:
        layers = AccessLog(app, lambda *given: ended.append(given[2]))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(layers), base_url="http://test") as client:
            assert (await client.post("/x")).status_code == 200
        assert not caplog.records
        may_end.set()
        assert await drain.wait_until_idle(60)

    asyncio.run(main())
    fields: Any = getattr(caplog.records[0], FIELDS)
    assert (fields["status"], fields["model"], fields["error"]) == (500, "m", "broken")
    assert (ended, len(caplog.records)) == ([500], 1)


def test_work_that_is_cancelled_before_it_begins_is_closed() -> None:
    happened: list[str] = []

    async def work() -> None:
        happened.append("begun")

    async def main() -> None:
        drain = Drain()
        drain.run(work(), lambda: happened.append("closed"))
        drain.cancel_rest()
        assert await drain.wait_until_idle(60)

    asyncio.run(main())
    assert happened == ["closed"]
