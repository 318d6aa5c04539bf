"""ThreadClient: what an engine on a thread refuses, and how its callers hear of it."""

import asyncio
import gc
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pagoda.base.errors import ConfigError, RequestError
from pagoda.base.sampling_params import SamplingParams
from pagoda.core.request import LoraRef, Request
from pagoda.engine.clients.thread_client import ThreadClient


def refuse(_: object) -> None:
    raise ConfigError("this cannot be used")


def engine_that_refuses() -> Any:
    loaded: Future[None] = Future()
    loaded.set_exception(RequestError("no such file"))
    core = SimpleNamespace(
        has_unfinished_requests=lambda: False,
        add_request=refuse,
        begin_load_adapter=lambda lora: loaded,
        end_load_adapter=lambda lora, loaded: loaded.result(),
    )
    return SimpleNamespace(core=core, shutdown=lambda: None)


def test_a_refused_adapter_is_raised_and_leaves_no_error_behind() -> None:
    left: list[dict[str, Any]] = []

    async def work() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: left.append(context))
        client = ThreadClient(engine_that_refuses, "AsyncLLM")
        await client.start()
        with pytest.raises(RequestError, match="no such file"):
            await client.load_adapter(LoraRef("a", "/a", "a"))
        await client.shutdown()
        gc.collect()

    asyncio.run(work())
    assert left == []


def test_every_error_of_a_request_is_answered() -> None:
    async def work() -> None:
        client = ThreadClient(engine_that_refuses, "AsyncLLM")
        await client.start()
        client.add_request(Request("r", np.arange(4, dtype=np.int32), SamplingParams(), handle=1))
        outputs = await asyncio.wait_for(client.next_outputs(), 30)
        assert [finish.message for finish in outputs.ends] == ["this cannot be used"]
        await client.shutdown()

    asyncio.run(work())
