"""What processes around one engine ask of each other by name, and what clients in other processes are told of it."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagoda.base.config import EngineConfig
from pagoda.base.errors import CapacityError, PagodaError, RequestError, WorkerDied
from pagoda.base.sampling_params import SamplingParams
from pagoda.core.request import LoraRef, Request
from pagoda.core.scheduler_output import EngineCoreOutputs
from pagoda.engine import wire
from pagoda.engine.clients import client_server
from pagoda.engine.clients.calls import Services
from pagoda.engine.clients.client_server import ClientServer, read_frame
from pagoda.engine.clients.process_client import ProcessClient
from pagoda.engine.clients.remote_client import RemoteClient
from tests.engine.clients.test_process_client import OPTIONS

SIZES = wire.EngineSizes(512, 16, 256, 0)


class Late(PagodaError):
    """An error with fields, of which calls.py knows nothing."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s, self.param, self._cause = retry_after_s, None, ValueError("stays here")


async def until(holds: Callable[[], object]) -> None:
    while not holds():
        await asyncio.sleep(0.001)


def run(
    work: Callable[[ProcessClient, ClientServer, str], Awaitable[None]],
    path: Path,
    services: Services | None = None,
    on_left: Callable[[int], object] = lambda _: None,
) -> None:
    """Do the work with a server whose engine has given its sizes and is down."""

    async def main() -> None:
        engine = ProcessClient(EngineConfig.from_options(**OPTIONS))
        sizes = asyncio.get_running_loop().create_future()
        sizes.set_result(SIZES)
        server = ClientServer(engine, sizes, services, on_left)
        await server.start(str(path / "clients"))
        try:
            await asyncio.wait_for(work(engine, server, str(path / "clients")), 60)
        finally:
            await server.close()

    asyncio.run(main())


async def connected(path: str, services: Services | None = None) -> RemoteClient:
    client = RemoteClient(path)
    client.calls.offer(services or {})
    assert await client.start() == SIZES
    return client


def test_clients_call_services_which_know_who_calls(tmp_path: Path) -> None:
    posted: list[tuple[int, str]] = []
    left: list[int] = []

    def post(client: int, text: str) -> None:
        posted.append((client, text))

    async def describe(client: int, lora: LoraRef, numbers: tuple[int, ...] = (1,)) -> dict[str, object]:
        await asyncio.sleep(0)
        assert isinstance(lora, LoraRef)
        return {"client": client, "name": lora.name, "numbers": numbers, "posted": list(posted)}

    async def refuse(_: int, kind: str) -> None:
        raise {
            "request": RequestError("no such field", "n"),
            "capacity": CapacityError("full"),
            "died": WorkerDied("gone"),
            "late": Late("come again", 7),
            "other": ValueError("a bug"),
        }[kind]

    async def work(engine: ProcessClient, server: ClientServer, path: str) -> None:
        one, other = await connected(path), await connected(path)
        lora = LoraRef("name", "/path", "digest")
        one.calls.post("post", "first")
        told = await one.calls.call("describe", lora, (3, 4))
        assert told == {"client": 1, "name": "name", "numbers": [3, 4], "posted": [[1, "first"]]}
        assert (await other.calls.call("describe", lora, returns=dict[str, Any]))["client"] == 2
        with pytest.raises(RequestError, match="no such field") as refused:
            await one.calls.call("refuse", "request")
        assert refused.value.param == "n"
        with pytest.raises(CapacityError, match="full"):
            await one.calls.call("refuse", "capacity")
        with pytest.raises(WorkerDied, match="gone"):
            await one.calls.call("refuse", "died")
        with pytest.raises(Late, match="^come again$") as late:
            await one.calls.call("refuse", "late")
        assert (late.value.retry_after_s, late.value.param) == (7, None)
        with pytest.raises(PagodaError, match="failed: ValueError: a bug"):
            await one.calls.call("refuse", "other")
        with pytest.raises(PagodaError, match="nobody"):
            await one.calls.call("nobody")
        with pytest.raises(PagodaError, match="no wire form for type"):
            await one.calls.call("describe_type")
        one.calls.post("refuse", "request")  # nobody waits for it
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(one.calls.call("describe", lora), 0)
        await one.shutdown()
        await until(lambda: left == [1])
        with pytest.raises(WorkerDied):
            await one.calls.call("describe", lora)
        assert (await other.calls.call("describe", lora))["client"] == 2

    run(
        work,
        tmp_path,
        {"post": post, "describe": describe, "refuse": refuse, "describe_type": lambda _: int},
        left.append,
    )


def test_all_clients_are_asked_and_those_that_do_not_answer_are_left_out(tmp_path: Path) -> None:
    async def never() -> int:
        await asyncio.Event().wait()
        return 0

    async def later(number: int) -> int:
        await asyncio.sleep(0)
        return number + 1

    def fail(_: int) -> int:
        raise ValueError

    async def work(engine: ProcessClient, server: ClientServer, path: str) -> None:
        assert await server.ask("count", 1, timeout_s=60) == {}
        clients = [
            await connected(path, {"count": lambda number: number, "wait": lambda: 7}),
            await connected(path, {"count": later, "wait": never}),
            await connected(path, {"count": fail, "wait": lambda: 9}),
        ]
        assert await server.ask("count", 1, timeout_s=60, returns=int) == {1: 1, 2: 2}
        assert await server.ask("wait", timeout_s=0.05) == {1: 7, 3: 9}
        waiting = asyncio.create_task(server.ask("wait", timeout_s=60))
        await asyncio.sleep(0)
        await clients[1].shutdown()
        assert await waiting == {1: 7, 3: 9}
        assert await server.ask("wait", timeout_s=60) == {1: 7, 3: 9}

    run(work, tmp_path)


def test_calls_wait_until_a_client_offers_functions(tmp_path: Path) -> None:
    async def work(engine: ProcessClient, server: ClientServer, path: str) -> None:
        client = RemoteClient(path)
        await client.start()
        asking = [asyncio.create_task(server.ask("count", number, timeout_s=60, returns=int)) for number in (1, 2)]
        assert await server.ask("count", 3, timeout_s=0.05) == {}
        client.calls.offer({"count": lambda number: number})
        assert [await one for one in asking] == [{1: 1}, {1: 2}]

    run(work, tmp_path)


def test_a_client_waits_for_an_engine_that_starts_later_or_learns_that_none_does(tmp_path: Path) -> None:
    async def main() -> None:
        engine = ProcessClient(EngineConfig.from_options(**OPTIONS))
        for does_start in (True, False):
            sizes = asyncio.get_running_loop().create_future()
            server = ClientServer(engine, sizes)
            path = str(tmp_path / f"{does_start}")
            await server.start(path)
            client = RemoteClient(path)
            starting = asyncio.create_task(client.start())
            await until(lambda server=server: len(server._tasks) > 1)
            assert not starting.done()
            if does_start:
                sizes.set_result(SIZES)
                assert await starting == SIZES
            else:
                sizes.set_exception(WorkerDied("it does not load"))
                with pytest.raises(WorkerDied, match="the process that has the engine has ended"):
                    await starting
                assert client.died is not None
            await server.close()
            await client.wait_until_gone()

    asyncio.run(main())


def test_clients_learn_that_no_engine_can_be_started_any_more(tmp_path: Path) -> None:
    async def work(engine: ProcessClient, server: ClientServer, path: str) -> None:
        before = await connected(path)
        assert (before.died, before.is_up) == (None, False)
        engine._supervisor.died = WorkerDied("for good")
        engine.on_give_up(engine.died)
        for client in (before, await connected(path)):
            await client.wait_until_gone()
            assert "for good" in str(client.died)
            with pytest.raises(WorkerDied, match="for good"):
                await client.next_outputs()
            with pytest.raises(WorkerDied, match="for good"):
                await client.reset_prefix_cache()
            with pytest.raises(WorkerDied, match="for good"):
                await client.load_adapter(LoraRef("name", "/path", "digest"))
            assert await client.look() is None

    run(work, tmp_path)


def test_a_request_that_cannot_be_read_ends_with_an_error_and_no_other_does(tmp_path: Path) -> None:
    async def work(engine: ProcessClient, server: ClientServer, path: str) -> None:
        client = await connected(path)
        prompt = np.arange(4, dtype=np.int32)
        client.add_request(Request("good", prompt, SamplingParams(), handle=1))
        client.add_request(Request("bad", prompt, SamplingParams(n=2), handle=2, cache_salt=3))  # type: ignore[arg-type]
        ends = (await client.next_outputs()).ends
        assert [(end.request_id, end.handle, end.sequence) for end in ends] == [("bad", 2, 0), ("bad", 2, 1)]
        assert "cannot be read" in str(ends[0].message)
        assert [entry.request.key for entry in engine._journal] == [(client.index, 1)]
        await client.shutdown()
        await until(lambda: not len(engine._journal))

    run(work, tmp_path)


def test_a_client_that_reads_late_gets_all_and_one_that_never_reads_is_left_and_nobody_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_server, "MAX_UNREAD_BYTES", 8 * 2**20)
    left: list[int] = []
    step = EngineCoreOutputs(*(np.zeros(4096, dtype) for dtype in (np.int64, np.int32, np.int32, np.int32)))

    async def work(engine: ProcessClient, server: ClientServer, path: str) -> None:
        quick = await connected(path)
        late, late_writer = await asyncio.open_unix_connection(path)
        await read_frame(late)
        _, never_writer = await asyncio.open_unix_connection(path)
        await until(lambda: len(server._connections) == 3)
        num_steps = 0
        while not left:
            num_steps += 1
            assert num_steps < 1000
            for index in (1, 2, 3) if num_steps <= 40 else (1, 3):
                engine.sinks.put(index, step)
            assert (await quick.next_outputs()).handles.tolist() == step.handles.tolist()
        assert left == [3]
        codec, num_read = wire.Codec(wire.FromServer), 0
        while num_read < 40:
            num_read += isinstance(codec.decode(await read_frame(late)), wire.StepOutputs)
        late_writer.close()
        never_writer.close()

    run(work, tmp_path, on_left=left.append)
