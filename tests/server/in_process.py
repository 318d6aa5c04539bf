"""The app of all routes on a test's own event loop, over an engine that ends every request at once."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import httpx

from pagoda.base.server_config import ServerConfig
from pagoda.core.request import Request, RequestStatus
from pagoda.core.scheduler_output import EngineCoreOutputs
from pagoda.engine.async_engine import AsyncEngine
from pagoda.engine.clients.calls import OwnCalls, services_of
from pagoda.engine.clients.journal import error_outputs
from pagoda.engine.wire import EngineStats
from pagoda.metrics.prometheus import CACHE_LABELS, ServerMetrics
from pagoda.server.admission import Admission
from pagoda.server.app import create_app
from pagoda.server.batches.service import FileService
from pagoda.server.request_starter import RequestStarter
from pagoda.server.served_adapters import ServedAdapters
from pagoda.server.served_model import ServedModel
from pagoda.server.served_models import ServedModels
from pagoda.server.state import ServerState
from pagoda.server.stored.service import StoreService
from tests.fake_engine import MAX_LEN, byte_inputs


class EndingClient:
    """Ends every request at once: of the engine's own work, nothing runs on the loop."""

    def __init__(self) -> None:
        self._outputs: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()

    def add_request(self, request: Request) -> None:
        self._outputs.put_nowait(error_outputs(request, "ended by the test", RequestStatus.FINISHED_IGNORED))

    def abort(self, handles: Sequence[int]) -> None:
        """Leave out what is left of requests, so that none of it is read while the next test is measured."""
        for _ in range(self._outputs.qsize()):
            outputs = self._outputs.get_nowait()
            if not {end.handle for end in outputs.ends} <= set(handles):
                self._outputs.put_nowait(outputs)

    async def next_outputs(self) -> EngineCoreOutputs:
        return await self._outputs.get()

    async def shutdown(self) -> None:
        pass


DEFAULTS = ServerConfig()


def served(
    test: Callable[[httpx.AsyncClient], Awaitable[None]],
    config: ServerConfig = DEFAULTS,
    speech: bool = False,
    client: EndingClient | None = None,
) -> None:
    """Run a test against the app.   speech: its model claims to transcribe.   client: of the engine."""

    async def main() -> None:
        engine: Any = client or EndingClient()
        async with AsyncEngine(engine, byte_inputs()) as llm:
            llm.input_processor.speech = cast("Any", speech or None)
            metrics = ServerMetrics("m", EngineStats, dict.fromkeys(CACHE_LABELS, ""))
            admission = Admission(config.server_limits, 0.0)
            model = ServedModel(
                names=("m",),
                starter=RequestStarter(llm, admission, metrics, b""),
                adapters=ServedAdapters(llm, ("m",), None),
                max_model_len=MAX_LEN,
                chat_template=None,
                tool_parser="auto",
                block_size=16,
                trusts_templates=True,
            )
            owned = OwnCalls(services_of(StoreService(), FileService()))
            state = ServerState(models=ServedModels([model]), admission=admission, config=config, owned=owned)
            transport = httpx.ASGITransport(create_app(state, config))
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
                await test(http)

    asyncio.run(main())
