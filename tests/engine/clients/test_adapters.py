"""LoRA adapters of an engine process: loaded and unloaded by messages, and there again after the engine was killed."""

import asyncio
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pagoda.base.config import EngineConfig
from pagoda.base.errors import RequestError, WorkerDied
from pagoda.base.lora import LoRARequest
from pagoda.base.sampling_params import SamplingParams
from pagoda.core.request import LoraRef, Request
from pagoda.core.scheduler_output import EngineCoreOutputs
from pagoda.engine import wire
from pagoda.engine.async_engine import AsyncEngine
from pagoda.engine.clients.adapter_calls import AdapterCalls
from pagoda.engine.clients.process_client import ProcessClient
from pagoda.engine.flight_recorder import FlightRecord
from tests.engine.byte_llama import write_byte_llama
from tests.engine.clients.engine_in_process import Work, run_engine
from tests.engine.lora_adapters import EVERYTHING, write_adapter
from tests.generate import generate

OPTIONS: dict[str, object] = {
    "dtype": "float32",
    "device": "cpu",
    "threads": 1,
    "num_blocks": 200,
    "block_size": 8,
    "max_model_len": 512,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
    "enable_lora": True,
    "max_loras": 2,
}
PROMPT = "A prompt that is long enough for several blocks of the cache."


def run(model: Path, work: Work) -> None:
    config = EngineConfig.from_options(model=str(model), **OPTIONS)
    run_engine(work, ProcessClient(config, 60.0), config)


async def collect(llm: AsyncEngine, name: str, lora: LoraRef | None, max_tokens: int = 24) -> list[list[int]]:
    params = SamplingParams(n=2, max_tokens=max_tokens, seed=7, ignore_eos=True)
    outputs = [output async for output in generate(llm, PROMPT, params, name, lora=lora)]
    assert outputs[-1].error is None
    return [one.token_ids for one in outputs[-1].outputs]


def test_requests_and_adapters_outlive_a_killed_engine(tmp_path: Path) -> None:
    model = write_byte_llama(tmp_path / "model")
    for seed, (name, rank, modules) in enumerate((("a", 4, ("q_proj", "down_proj")), ("b", 13, EVERYTHING))):
        write_adapter(tmp_path / name, model, rank, seed, modules)
    shutil.copytree(tmp_path / "a", tmp_path / "bad")
    config = (tmp_path / "bad" / "adapter_config.json").read_text()
    (tmp_path / "bad" / "adapter_config.json").write_text(config.replace("q_proj", "k_proj"))

    async def work(llm: AsyncEngine, client: ProcessClient) -> None:
        with pytest.raises(RequestError, match="does not name as a target"):
            await llm.text.find_adapter(LoRARequest("bad", 1, str(tmp_path / "bad")))
        with pytest.raises(RequestError, match="its files have changed"):
            await llm.load_adapter(LoraRef("a", str(tmp_path / "a"), "00"))
        loras = {name: await llm.text.find_adapter(LoRARequest(name, 1, str(tmp_path / name))) for name in "ab"}
        await llm.load_adapter(loras["a"])
        undisturbed = {name: await collect(llm, f"first {name}", loras.get(name), 250) for name in ("a", "b", "")}
        assert len({str(tokens) for tokens in undisturbed.values()}) == 3
        running = {
            name: asyncio.create_task(collect(llm, f"again {name}", loras.get(name), 250)) for name in undisturbed
        }
        while not client.stats().num_running:
            await asyncio.sleep(0.001)
        assert client.engine_pid is not None
        os.kill(client.engine_pid, signal.SIGKILL)
        while client.is_up:
            await asyncio.sleep(0.001)
        loading = asyncio.create_task(llm.load_adapter(loras["b"]))  # waits for the next engine
        llm.unload_adapter(loras["a"])  # its requests run on
        assert {name: await task for name, task in running.items()} == undisturbed
        await loading
        assert client.num_deaths == 1
        assert list(client._adapters._loaded) == [loras["b"].digest]
        assert await collect(llm, "last", loras["a"], 250) == undisturbed["a"]

    run(model, work)


def test_an_adapter_that_kills_engines_is_not_loaded_again() -> None:
    one, two, three = (LoraRef(name, f"/{name}", name) for name in ("one", "two", "three"))

    async def work() -> None:
        sent: list[wire.ToEngine] = []
        calls = AdapterCalls(sent.append)
        waiting = asyncio.create_task(calls.load(one))
        await asyncio.sleep(0)
        assert not sent
        calls.begin()
        calls.on_reply(wire.AdapterReply(1, None))
        await waiting
        refused = asyncio.create_task(calls.load(two))
        await asyncio.sleep(0)
        calls.on_reply(wire.AdapterReply(2, "no"))
        with pytest.raises(RequestError, match="no"):
            await refused
        died = asyncio.create_task(calls.load(three))
        await asyncio.sleep(0)
        calls.end()
        sent.clear()
        calls.begin()
        assert sent == [wire.LoadAdapter(4, one), wire.LoadAdapter(5, three)]
        calls.end()  # before it replied
        with pytest.raises(WorkerDied, match="engines died while they loaded the adapter 'three'"):
            await died
        sent.clear()
        calls.begin()
        assert sent == []
        calls.end()
        last = asyncio.create_task(calls.load(one))
        await asyncio.sleep(0)
        calls.give_up(WorkerDied("no engine any more"))
        with pytest.raises(WorkerDied, match="no engine any more"):
            await last

    asyncio.run(work())


def test_adapters_are_loaded_after_the_probes_of_suspects() -> None:
    """A load that kills engines must not make an innocent request look as if it had killed one alone."""
    lora = LoraRef("one", "/one", "one")

    async def work() -> None:
        sent: list[object] = []
        client = ProcessClient(EngineConfig.from_options(distributed_executor_backend="fake"), 60.0)
        link: Any = SimpleNamespace(is_up=True, send=sent.append, send_bytes=sent.append)

        def begin(process_number: int) -> list[bool]:
            sent.clear()
            client._supervisor.link, client._supervisor.process_number = link, process_number
            client.on_ready()
            return [isinstance(message, wire.LoadAdapter) for message in sent]

        def die() -> None:
            client._supervisor.link = None
            client.on_lost()
            client.on_death(FlightRecord(0, 0, np.empty(0, np.int64)), killed_from_outside=False)

        assert begin(1) == []
        client.add_request(Request("innocent", np.arange(4, dtype=np.int32), SamplingParams(), handle=1))
        loading = asyncio.create_task(client.load_adapter(lora))
        await asyncio.sleep(0)
        die()
        assert begin(2) == [False]
        late = asyncio.create_task(client.load_adapter(lora))
        await asyncio.sleep(0)
        assert len(sent) == 1
        one = np.ones(1, np.int32)
        two_tokens = EngineCoreOutputs(one.astype(np.int64), one * 0, one * 2, np.ones(2, np.int32))
        client.on_message(wire.StepOutputs(two_tokens, (2,), None))
        assert [type(message) for message in sent[1:]] == [wire.LoadAdapter] * 2
        die()
        assert "innocent" in client._journal
        for task in (loading, late):
            task.cancel()

    asyncio.run(work())


def test_an_unload_during_a_load_is_not_undone_by_the_late_reply() -> None:
    one, two = (LoraRef(name, f"/{name}", name) for name in ("one", "two"))

    async def work() -> None:
        sent: list[wire.ToEngine] = []
        calls = AdapterCalls(sent.append)
        early = asyncio.create_task(calls.load(two))  # waits for an engine
        await asyncio.sleep(0)
        calls.unload(two)
        sent.clear()
        calls.begin()
        assert sent == [wire.LoadAdapter(1, two), wire.UnloadAdapter(two)]
        late = asyncio.create_task(calls.load(one))
        await asyncio.sleep(0)
        calls.unload(one)
        for call_id in (1, 2):
            calls.on_reply(wire.AdapterReply(call_id, None))
        await asyncio.gather(early, late)
        calls.end()
        sent.clear()
        calls.begin()
        assert sent == []
        again = asyncio.create_task(calls.load(one))
        await asyncio.sleep(0)
        calls.on_reply(wire.AdapterReply(3, None))
        await again
        calls.end()
        sent.clear()
        calls.begin()
        calls.unload(one)  # while the next engine loads it again
        calls.on_reply(wire.AdapterReply(4, None))
        calls.end()
        sent.clear()
        calls.begin()
        assert sent == []

    asyncio.run(work())
