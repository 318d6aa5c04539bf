"""/health where nothing can be served any more although the engine process runs."""

import asyncio
import contextlib
import logging
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from pagoda import SamplingParams, WorkerDied
from pagoda.base.server_config import ServerConfig
from pagoda.engine.async_engine import AsyncEngine
from pagoda.engine.clients.thread_client import ThreadClient
from pagoda.engine.text_engine import TextEngine
from pagoda.server.app import create_app
from pagoda.server.middleware import Drain
from pagoda.server.served_model import ServedModel
from pagoda.server.served_models import ServedModels
from tests.fake_engine import byte_inputs, fake_core
from tests.generate import generate


def _state(llm: Any, process: Any) -> Any:
    """The state of a server of one model.   process: its engine's."""
    starter: Any = SimpleNamespace(llm=llm, metrics=SimpleNamespace(on_http=lambda *_: None))
    adapters: Any = SimpleNamespace(by_name={})
    model = ServedModel(("m",), starter, adapters, 8, None, "none", 16, engine=process)
    return SimpleNamespace(models=ServedModels([model]), model=model, drain=Drain(), telemetry=None)


def test_health_is_503_once_outputs_can_no_longer_be_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="pagoda")

    async def main() -> None:
        client = ThreadClient(lambda: TextEngine(fake_core(), byte_inputs()), "test")
        await client.start()
        async with AsyncEngine(client, byte_inputs()) as llm, contextlib.AsyncExitStack() as stack:
            state = _state(llm, SimpleNamespace(died=None, is_up=True, is_stuck=False))  # an engine in best health
            transport = httpx.ASGITransport(create_app(state, ServerConfig()))
            http = await stack.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://test"))

            async def ask() -> None:
                async for _ in generate(llm, "a", SamplingParams(max_tokens=3)):
                    pass

            await ask()
            assert (await http.get("/health")).status_code == 200

            def broken(*args: object) -> None:
                raise KeyError("a defect")

            monkeypatch.setattr(llm._outputs, "process", broken)
            with pytest.raises(WorkerDied):
                await ask()
            for path in ("/health", "/ping", "/readyz", "/livez"):
                answer = await http.get(path)
                assert (answer.status_code, "a defect" in answer.json()["error"]["message"]) == (503, True)

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_server_that_starts_stalls_or_drains_is_alive_but_not_ready() -> None:
    async def main() -> None:
        well = {"died": None, "is_up": True, "is_stuck": False}
        state = _state(SimpleNamespace(died=None), None)
        transport = httpx.ASGITransport(create_app(state, ServerConfig()))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:

            async def status(path: str) -> int:
                return (await http.get(path)).status_code

            for change in ({"is_up": False}, {"is_stuck": True}):
                state.model.engine = SimpleNamespace(**well | change)
                assert (await status("/livez"), await status("/readyz")) == (200, 503), change
            state.model.engine = SimpleNamespace(**well)
            assert (await status("/livez"), await status("/readyz")) == (200, 200)
            state.drain.begin()
            assert (await status("/livez"), await status("/readyz")) == (200, 503)
            state.model.engine = SimpleNamespace(**well | {"died": WorkerDied("x")})
            assert (await status("/livez"), await status("/readyz")) == (503, 503)

    asyncio.run(main())
