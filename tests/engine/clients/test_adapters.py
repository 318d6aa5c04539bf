"""LoRA adapters of an engine process: loaded and unloaded by messages, and there again after the engine was killed."""

import asyncio
import shutil
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
from pagoda.engine.clients.process_client import ProcessClient
from pagoda.engine.flight_recorder import FlightRecord
from pagoda.engine.inputs.adapters import Adapter
from tests.engine.byte_llama import write_byte_llama
from tests.engine.clients.engine_calls import load, reply, unload
from tests.engine.clients.engine_in_process import Work, kill_held, run_engine
from tests.engine.lora_adapters import EVERYTHING, write_adapter
from tests.engine.steps import Steps
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
    run_engine(work, ProcessClient(config, 60.0, "tests.engine.stepped_engine"), config)


async def collect(llm: AsyncEngine, name: str, lora: Adapter | None, max_tokens: int = 24) -> list[list[int]]:
    params = SamplingParams(n=2, max_tokens=max_tokens, seed=7, ignore_eos=True)
    outputs = [output async for output in generate(llm, PROMPT, params, name, lora=lora)]
    assert outputs[-1].error is None
    return [one.token_ids for one in outputs[-1].outputs]


def test_requests_and_adapters_outlive_a_killed_engine(tmp_path: Path, steps: Steps) -> None:
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
        steps.hold_after(20)
        running = {
            name: asyncio.create_task(collect(llm, f"again {name}", loras.get(name), 250)) for name in undisturbed
        }
        await kill_held(client, steps)
        steps.release()
        loading = asyncio.create_task(llm.load_adapter(loras["b"]))  # waits for the next engine
        llm.unload_adapter(loras["a"])  # its requests run on
        assert {name: await task for name, task in running.items()} == undisturbed
        await loading
        assert client.num_deaths == 1
        assert list(client._loaded) == [loras["b"].digest]
        assert await collect(llm, "last", loras["a"], 250) == undisturbed["a"]

    run(model, work)


class Engines:
    """A client whose engines are the test: it sees what they are sent, and says when they begin, reply and die."""

    def __init__(self, **options: object) -> None:
        self.client = ProcessClient(EngineConfig.from_options(distributed_executor_backend="fake", **options), 60.0)
        self.sent: list[object] = []
        self._link: Any = SimpleNamespace(is_up=True, send=self.sent.append, send_bytes=self.sent.append)

    def begin(self) -> None:
        self.sent.clear()
        self.client._supervisor.link = self._link
        self.client._supervisor.process_number += 1
        self.client.on_ready()

    async def begin_again(self) -> None:
        self.begin()
        await asyncio.sleep(0)

    async def load(self, lora: LoraRef) -> "asyncio.Task[None]":
        loading = asyncio.create_task(self.client.load_adapter(lora))
        await asyncio.sleep(0)
        return loading

    async def reply(self, call_id: int, error: str | None = None) -> None:
        self.client.on_message(reply(call_id, error))
        await asyncio.sleep(0)

    async def die(self) -> None:
        self.client._supervisor.link = None
        self.client.on_lost()
        self.client.on_death(FlightRecord(0, 0, frozenset()), killed_from_outside=False)
        await asyncio.sleep(0)


ONE, TWO, THREE = (LoraRef(name, f"/{name}", name) for name in ("one", "two", "three"))


def test_an_adapter_that_kills_engines_is_not_loaded_again() -> None:
    async def work() -> None:
        engines = Engines()
        waiting = await engines.load(ONE)
        assert not engines.sent
        await engines.begin_again()
        await engines.reply(1)
        await waiting
        refused = await engines.load(TWO)
        await engines.reply(2, "no")
        with pytest.raises(RequestError, match="no"):
            await refused
        died = await engines.load(THREE)
        await engines.die()
        await engines.begin_again()
        assert engines.sent == [load(1, ONE), load(2, THREE)]
        await engines.die()  # before it replied
        with pytest.raises(WorkerDied, match="engines died while they loaded the adapter 'three'"):
            await died
        await engines.begin_again()
        assert engines.sent == []
        await engines.die()
        last = await engines.load(ONE)
        engines.client._supervisor.died = WorkerDied("no engine any more")
        engines.client.on_give_up(engines.client._supervisor.died)
        for loading in (last, await engines.load(ONE)):
            with pytest.raises(WorkerDied, match="no engine any more"):
                await loading

    asyncio.run(work())


def test_an_adapter_that_is_refused_when_it_is_loaded_again_is_forgotten() -> None:
    async def work() -> None:
        engines = Engines()
        engines.begin()
        loading = await engines.load(ONE)
        await engines.reply(1)
        await loading
        await engines.die()
        await engines.begin_again()
        assert engines.sent == [load(1, ONE)]
        await engines.reply(1, "its files have changed")
        await engines.die()
        await engines.begin_again()
        assert engines.sent == []

    asyncio.run(work())


def test_no_more_adapters_than_are_kept_are_loaded_again() -> None:
    async def work() -> None:
        engines = Engines(enable_lora=True, max_loras=2)
        engines.begin()
        for call_id, lora in enumerate((ONE, TWO, THREE), 1):
            loading = await engines.load(lora)
            await engines.reply(call_id)
            await loading
        await engines.die()
        await engines.begin_again()
        assert engines.sent == [load(1, TWO), load(2, THREE)]

    asyncio.run(work())


def test_adapters_are_loaded_after_the_probes_of_suspects() -> None:
    """A load that kills engines must not make an innocent request look as if it had killed one alone."""

    async def work() -> None:
        engines = Engines()
        client, sent = engines.client, engines.sent
        engines.begin()
        assert sent == []
        client.add_request(Request("innocent", np.arange(4, dtype=np.int32), SamplingParams(), handle=1))
        loading = await engines.load(ONE)
        await engines.die()
        engines.begin()
        late = await engines.load(ONE)
        assert [isinstance(message, wire.Call) for message in sent] == [False]
        one = np.ones(1, np.int32)
        two_tokens = EngineCoreOutputs(one.astype(np.int64), one * 0, one * 2, np.ones(2, np.int32))
        client.on_message(wire.StepOutputs({0: two_tokens}, (2,), None))
        await asyncio.sleep(0)
        assert sent[1:] == [load(1, ONE), load(2, ONE)]
        await engines.die()
        assert (0, 1) in client._journal
        for task in (loading, late):
            task.cancel()

    asyncio.run(work())


def test_an_unload_during_a_load_is_not_undone_by_the_late_reply() -> None:
    async def work() -> None:
        engines = Engines()
        early = await engines.load(TWO)  # waits for an engine
        engines.client.unload_adapter(TWO)
        engines.begin()
        await early
        assert engines.sent == []
        late = await engines.load(ONE)
        engines.client.unload_adapter(ONE)
        assert engines.sent == [load(1, ONE), unload(ONE)]
        await engines.reply(1)
        await late
        await engines.die()
        await engines.begin_again()
        assert engines.sent == []
        again = await engines.load(ONE)
        await engines.reply(1)
        await again
        await engines.die()
        await engines.begin_again()
        engines.client.unload_adapter(ONE)  # while the next engine loads it again
        assert engines.sent == [load(1, ONE), unload(ONE)]
        await engines.reply(1)
        again = await engines.load(ONE)
        await engines.reply(2)
        await again
        await engines.die()
        engines.begin()
        engines.client.unload_adapter(ONE)  # before the next engine loads it again
        await asyncio.sleep(0)
        assert engines.sent == [unload(ONE)]
        await engines.die()
        await engines.begin_again()
        assert engines.sent == []

    asyncio.run(work())
