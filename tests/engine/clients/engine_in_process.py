"""Run a test against an AsyncEngine whose engine core is a child process."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable

from pagoda.assembly.engine_setup import resolve_engine
from pagoda.assembly.input_setup import build_input_processor
from pagoda.base.config import EngineConfig
from pagoda.engine.async_engine import AsyncEngine
from pagoda.engine.clients.process_client import ProcessClient
from tests.engine.steps import Steps

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


async def kill(client: ProcessClient) -> None:
    """Kill the engine, and wait until its client knows."""
    num_deaths = client.num_deaths
    assert client.engine_pid is not None
    os.kill(client.engine_pid, signal.SIGKILL)
    while client.num_deaths == num_deaths:
        await asyncio.sleep(0.002)


async def kill_held(client: ProcessClient, steps: Steps) -> None:
    """Kill the engine after the steps that it may compute, which are too few for the requests that it has."""
    while not steps.is_held:
        await asyncio.sleep(0.002)
    await kill(client)
