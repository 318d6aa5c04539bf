"""Several clients of one engine: each has its own requests, handles, outputs and losses."""

import asyncio
import dataclasses
import json
import sys
from pathlib import Path

import pytest

from pagoda.base.config import EngineConfig
from pagoda.base.errors import RequestError, WorkerDied
from pagoda.base.sampling_params import SamplingParams
from pagoda.core.events import ClientEvent
from pagoda.core.request import LoraRef
from pagoda.engine.async_engine import AsyncEngine
from pagoda.engine.clients.client_server import ClientServer
from pagoda.engine.clients.process_client import ProcessClient
from pagoda.engine.clients.remote_client import RemoteClient
from pagoda.engine.outputs.output_processor import OutputKind
from tests.engine.clients.engine_in_process import MOST_S, kill, kill_held, run_engine
from tests.engine.clients.hurried_clock import STEP_TIMEOUT_S
from tests.engine.clients.test_process_client import OPTIONS, tokens
from tests.engine.steps import Steps
from tests.fake_engine import byte_inputs
from tests.generate import prepare
from tests.server.live import is_running

PIPE = asyncio.subprocess.PIPE
MODULE = "tests.engine.stepped_engine"


async def ask(llm: AsyncEngine, seed: int, max_tokens: int = 60, cache_salt: str | None = None) -> dict[int, list[int]]:
    """Run a request whose id all clients use."""
    params = SamplingParams(n=2, max_tokens=max_tokens, seed=seed, ignore_eos=True)
    request = await prepare(llm, [10 + seed] * 20, params, "same")
    request = dataclasses.replace(request, cache_salt=cache_salt)
    outputs = [one async for one in llm.stream(request, OutputKind.CUMULATIVE)]
    assert outputs[-1].finished
    assert outputs[-1].error is None, outputs[-1].error
    return tokens(outputs[-1:])


def test_equal_ids_and_handles_of_several_clients_survive_kills_and_the_end_of_one_of_them(
    tmp_path: Path, steps: Steps
) -> None:
    config = EngineConfig.from_options(**OPTIONS)

    async def work(llm: AsyncEngine, client: ProcessClient) -> None:
        undisturbed = [await ask(llm, seed) for seed in range(3)]
        server = ClientServer(client, client._supervisor._sizes)
        await server.start(str(tmp_path / "clients"))
        remotes = [RemoteClient(str(tmp_path / "clients")) for _ in range(3)]
        for remote in remotes:
            await remote.start()
        others = [AsyncEngine(remote, byte_inputs()) for remote in remotes]
        steps.hold_after(20)
        running = [asyncio.create_task(ask(one, seed)) for seed, one in enumerate((llm, *others[:2]))]
        gone = asyncio.create_task(ask(others[2], 9, 400))
        while len(client._journal) < 4:
            await asyncio.sleep(0.002)
        assert {entry.request.request_id for entry in client._journal} == {"same"}
        assert sorted(entry.request.client_index for entry in client._journal) == [0, 1, 2, 3]
        await kill_held(client, steps)
        num_before = client.stats().num_steps
        steps.hold_next_engine_after(20)
        while not steps.is_held:
            await asyncio.sleep(0.002)
        await others[2].shutdown(WorkerDied("this client has died"))
        while 3 in {entry.request.client_index for entry in client._journal}:
            await asyncio.sleep(0.001)
        steps.release()
        assert await asyncio.gather(*running) == undisturbed
        assert isinstance((await asyncio.gather(gone, return_exceptions=True))[0], WorkerDied)
        assert await ask(others[0], 1) == undisturbed[1]
        while client.stats().num_running or client.stats().num_free_blocks < client.stats().num_blocks:
            await asyncio.sleep(0.01)
        assert client.stats().num_steps - num_before < 300  # the engine has aborted that of the client that is gone
        await server.close()

    run_engine(work, ProcessClient(config, STEP_TIMEOUT_S, MODULE), config)


def test_a_client_that_leaves_and_tries_again_with_the_same_id_gets_all_of_its_output_through_a_kill(
    steps: Steps,
) -> None:
    config = EngineConfig.from_options(**OPTIONS)

    async def work(llm: AsyncEngine, client: ProcessClient) -> None:
        undisturbed = await ask(llm, 1)
        for num_steps in (0, 6):  # 6: in which the end of the first one came
            steps.hold_after(6)
            first = asyncio.create_task(ask(llm, 5, 400))
            while not steps.is_held:
                await asyncio.sleep(0.002)
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            again = asyncio.create_task(ask(llm, 1))
            while not len(client._journal):
                await asyncio.sleep(0.001)
            steps.hold_after(num_steps)
            await kill_held(client, steps)
            steps.release()
            assert await again == undisturbed
            assert len(client._journal) == 0

    run_engine(work, ProcessClient(config, STEP_TIMEOUT_S, MODULE), config)


def test_clients_in_other_processes_survive_the_engine_and_one_another(tmp_path: Path, steps: Steps) -> None:
    config = EngineConfig.from_options(**OPTIONS)
    path = str(tmp_path / "clients")

    async def start(seed: int, num_tokens: int) -> asyncio.subprocess.Process:
        command = (sys.executable, "-m", "tests.engine.clients.remote_user", path, str(seed), str(num_tokens))
        return await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)

    async def work(llm: AsyncEngine, client: ProcessClient) -> None:
        undisturbed = [await ask(llm, seed, 200) for seed in range(2)]
        steps.hold_after(20)
        server = ClientServer(client, client._supervisor._sizes)
        await server.start(path)
        survivors = [await start(seed, 200) for seed in range(2)]
        victim = await start(9, 220)
        while len(client.sinks._sinks) < 4:
            await asyncio.sleep(0.01)
        for each in (*survivors, victim):
            assert each.stdin is not None
            each.stdin.close()
        while len(client._journal) < 3:
            await asyncio.sleep(0.002)
        await kill_held(client, steps)
        steps.release()
        victim.kill()
        while len(client._journal) > 2:
            await asyncio.sleep(0.001)
        assert all(entry.request.seed < 9 for entry in client._journal)
        found = [json.loads((await each.communicate())[0]) for each in survivors]
        assert [{int(index): tokens for index, tokens in each.items()} for each in found] == undisturbed
        assert client.num_deaths == 1
        while client.stats().num_running or client.stats().num_free_blocks < client.stats().num_blocks:
            await asyncio.sleep(0.01)
        await victim.wait()
        await server.close()

    run_engine(work, ProcessClient(config, STEP_TIMEOUT_S, MODULE), config)


async def see_what_the_engine_does(client: ProcessClient, remote: RemoteClient, far: AsyncEngine) -> None:
    """A client in another process sees the same as the one that has the engine."""
    steps: list[int] = []
    heard: list[ClientEvent] = []
    remote.on_step, remote.on_events = steps.append, heard.extend
    assert (await remote.look(0.0)) is not None  # from now on, steps are noted
    running: set[int] = set()
    while not running:
        asking = asyncio.create_task(ask(far, 3, 60))
        while not asking.done():
            running.update((await remote.look(0.0)).view.clients.tolist())  # type: ignore[union-attr]
    assert running == {remote.index}
    assert remote.stats().num_steps >= 60  # it came with the last token
    while sum(steps) < 2 * 60 + 20 or remote.stats() != client.stats():
        await asyncio.sleep(0.01)
    noted = (await remote.look(0.0)).steps  # type: ignore[union-attr]
    assert len(noted) >= 60
    assert (await client.look(0.0)).steps == noted  # type: ignore[union-attr]  # whoever looks, sees all
    assert (await client.look(noted[-2].ended_s)).steps == noted[-1:]  # type: ignore[union-attr]
    assert {type(event).__name__ for event in heard} >= {"Queued", "Admitted", "Ended"}
    remote.on_events = None
    assert remote.is_up
    await kill(client)
    late = RemoteClient(remote._path)  # while the next engine starts
    await late.start()
    async with AsyncEngine(late, byte_inputs()) as later:
        assert await ask(later, 3) == await ask(far, 3)
    while remote.num_deaths < 1 or not remote.is_up:
        await asyncio.sleep(0.01)
    assert client.on_events is None


def test_a_client_in_another_process_resets_the_cache_and_learns_of_errors_and_of_the_end(tmp_path: Path) -> None:
    config = EngineConfig.from_options(**OPTIONS)
    path = str(tmp_path / "clients")

    async def work(llm: AsyncEngine, client: ProcessClient) -> None:
        server = ClientServer(client, client._supervisor._sizes)
        await server.start(path)
        remote = RemoteClient(path)
        assert (await remote.start()).max_model_len == 512
        assert remote.index == 1
        far = AsyncEngine(remote, byte_inputs())
        assert await ask(far, 3) == await ask(llm, 3)
        assert await far.reset_prefix_cache() is True
        await see_what_the_engine_does(client, remote, far)
        with pytest.raises(RequestError, match="enable_lora"):
            await remote.load_adapter(LoraRef("a", "/nowhere", "a"))
        remote.unload_adapter(LoraRef("a", "/nowhere", "a"))
        with pytest.raises(AssertionError, match="cannot be encoded"):  # no check has seen it
            await ask(far, 3, cache_salt="\ud800")
        running = asyncio.create_task(ask(far, 3, 200))
        while not len(client._journal):
            await asyncio.sleep(0.001)
        await server.close()
        assert isinstance((await asyncio.gather(running, return_exceptions=True))[0], WorkerDied)
        assert len(client._journal) == 0
        with pytest.raises(WorkerDied, match="the process that has the engine has ended"):
            await far.reset_prefix_cache()
        await far.shutdown()
        assert await ask(llm, 3)

    run_engine(work, ProcessClient(config, STEP_TIMEOUT_S, MODULE), config)


def test_the_engine_and_its_clients_end_with_the_process_that_has_it(tmp_path: Path, steps: Steps) -> None:
    async def work() -> None:
        path = str(tmp_path / "clients")
        owner = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.engine.clients.engine_owner", path, stdout=PIPE
        )
        assert owner.stdout is not None
        engine_pid = int(await owner.stdout.readline())
        client = RemoteClient(path)
        await client.start()
        steps.hold_after(20)
        async with AsyncEngine(client, byte_inputs()) as llm:
            asking = asyncio.create_task(ask(llm, 1))
            while not steps.is_held:
                await asyncio.sleep(0.002)
            owner.kill()
            with pytest.raises(WorkerDied, match="the process that has the engine has ended"):
                await asking
            await client.wait_until_gone()
            assert not client.is_up
        await owner.wait()
        while is_running(engine_pid):
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(work(), MOST_S))
