"""The app of all routes on a test's own event loop, over an engine that ends every request at once."""

import asyncio
from collections.abc import Awaitable, Callable

import httpx

from pagoda.base.server_config import ServerConfig
from pagoda.core.request import Request, RequestStatus
from pagoda.engine.async_engine import AsyncEngine
from pagoda.engine.clients.journal import JournalEntry, error_outputs
from pagoda.engine.wire import EngineStats
from pagoda.metrics.prometheus import CACHE_LABELS, ServerMetrics
from pagoda.server.admission import Admission
from pagoda.server.app import create_app
from pagoda.server.generation import Generator
from pagoda.server.served_adapters import ServedAdapters
from pagoda.server.state import ServerState
from tests.fake_engine import MAX_LEN, byte_inputs
from tests.inline_client import InlineClient


class EndingClient(InlineClient):
    """Ends every request at once: of the engine's own work, nothing runs on the loop."""

    def add_request(self, request: Request) -> None:
        entry = JournalEntry(request, [[] for _ in range(request.num_seqs)], set(range(request.num_seqs)))
        self._outputs.put_nowait(error_outputs(entry, "ended by the test", RequestStatus.FINISHED_IGNORED))

    def abort(self, request_ids: list[str]) -> None:
        pass

    def stats(self) -> EngineStats:
        return EngineStats()


DEFAULTS = ServerConfig()


def served(test: Callable[[httpx.AsyncClient], Awaitable[None]], config: ServerConfig = DEFAULTS) -> None:
    """Run a test against the app."""

    async def main() -> None:
        client = EndingClient(lambda: None)  # type: ignore[arg-type,return-value]
        async with AsyncEngine(client, byte_inputs()) as llm:
            metrics = ServerMetrics("m", client.stats, dict.fromkeys(CACHE_LABELS, ""))
            state = ServerState(
                generator=Generator(llm, Admission(config.server_limits, 0.0), metrics),
                adapters=ServedAdapters(llm, ("m",), None),
                model_names=("m",),
                max_model_len=MAX_LEN,
                chat_template=None,
                tool_template=None,
                tool_parser="auto",
                trusts_templates=True,
            )
            transport = httpx.ASGITransport(create_app(state, config))
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
                await test(http)

    asyncio.run(main())
