"""Run a test against an AsyncEngine whose engine core is a child process."""

import asyncio
from collections.abc import Awaitable, Callable

from pagoda.assembly.engine_setup import resolve_engine
from pagoda.assembly.input_setup import build_input_processor
from pagoda.base.config import EngineConfig
from pagoda.engine.async_engine import AsyncEngine
from pagoda.engine.clients.process_client import ProcessClient

Work = Callable[[AsyncEngine, ProcessClient], Awaitable[None]]

MOST_S = 100.0


def run_engine(work: Work, client: ProcessClient, config: EngineConfig) -> None:
    """Start the client's engine, do the work, and shut both down.   config: the client's."""

    async def main() -> None:
        sizes = await client.start()
        inputs = build_input_processor(resolve_engine(config))
        inputs.limits.fit(sizes.max_model_len)
        llm = AsyncEngine(client, inputs)
        try:
            await asyncio.wait_for(work(llm, client), MOST_S)
        finally:
            await llm.shutdown()

    asyncio.run(main())
