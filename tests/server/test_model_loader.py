"""ModelLoader over engines that the test starts and ends: what is loaded, what waits, and what memory is taken."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any

import pytest

from pagoda.base.config import EngineConfig
from pagoda.base.errors import CapacityError, WorkerDied
from pagoda.engine.wire import EngineSizes
from pagoda.server.admission import Refusal
from pagoda.server.errors import ApiError
from pagoda.server.model_engine import LoadState, ModelEngine
from pagoda.server.model_loader import LoadRate, ModelLoader

SIZES = EngineSizes(8, 1, 8, 0)


class Client:
    """An engine that starts when the test lets it, or with an error."""

    def __init__(self) -> None:
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.fails: Exception | None = None
        self.is_running = False
        self.num_starts = self.num_stops = 0
        self.died: WorkerDied | None = None
        self._gone = asyncio.Event()

    async def start(self) -> EngineSizes:
        self.num_starts += 1
        self.died = None
        self._gone.clear()
        await self.may_start.wait()
        if self.fails is not None:
            raise self.fails
        self.is_running = True
        return SIZES

    async def stop(self) -> None:
        await asyncio.sleep(0)
        self.is_running = False
        self.num_stops += 1
        self._gone.set()

    async def shutdown(self) -> None:
        await self.stop()

    async def wait_until_gone(self) -> None:
        await self._gone.wait()

    def die(self) -> None:
        """No engine can be started any more."""
        self.is_running, self.died = False, WorkerDied("ten in a row")
        self._gone.set()


class House:
    """Models "a", "b", ... of some bytes, in a budget."""

    def __init__(self, sizes: list[int], budget: int, wait_s: float = 30.0, rate: LoadRate | None = None) -> None:
        self.clients = [Client() for _ in sizes]
        self.engines: list[ModelEngine] = []
        for name, size, client in zip("abcdef", sizes, self.clients, strict=False):
            known: Any = client
            config = EngineConfig.from_options(model=name)
            self.engines.append(ModelEngine(config, known, size, SIZES))
        self.loader = ModelLoader(self.engines, budget, wait_s, rate or LoadRate(1000))

    async def start(self) -> None:
        self.loader.start_first()
        for engine in self.engines:
            if engine.starting is not None:
                await engine.starting
        self.loader.begin()

    @property
    def loaded(self) -> str:
        return "".join(one.name for one in self.engines if one.state is LoadState.LOADED)

    def ask(self, index: int, key: str = "") -> "asyncio.Task[ExitStack]":
        """Hold a model; what the task returns ends the use when it is closed."""

        async def hold() -> ExitStack:
            at_end = ExitStack()
            await self.loader.hold(self.engines[index], at_end, key)
            return at_end

        return asyncio.create_task(hold())

    async def settle(self) -> None:
        for _ in range(30):
            await asyncio.sleep(0)


def loads(engine: ModelEngine) -> dict[str, float]:
    """How often a model was loaded, by the outcome."""
    (family,) = [one for one in engine.loads.families(("m", "0")) if one.name == "vllm:model_loads"]
    return {one.labels["outcome"]: one.value for one in family.samples}


def run(
    test: Callable[[House], Awaitable[None]],
    sizes: list[int],
    budget: int,
    wait_s: float = 30.0,
    rate: Callable[[], LoadRate] = lambda: LoadRate(1000),
) -> None:
    async def main() -> None:
        house = House(sizes, budget, wait_s, rate())
        await house.start()
        try:
            await test(house)
        finally:
            await house.loader.close()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_at_the_start_models_are_loaded_in_their_order_while_there_is_room() -> None:
    async def test(house: House) -> None:
        assert house.loaded == "ac"

    run(test, [4, 9, 3], budget=8)


def test_what_was_used_longest_ago_goes() -> None:
    async def test(house: House) -> None:
        assert house.loaded == "ab"
        for index in (1, 0):
            (await house.ask(index)).close()
        with await house.ask(2):
            assert house.loaded == "ac"
        with await house.ask(1):
            assert house.loaded == "bc"

    run(test, [4, 4, 4], budget=8)


def test_a_model_with_requests_is_never_unloaded() -> None:
    async def test(house: House) -> None:
        held = await house.ask(0)
        waiting = house.ask(1)
        await house.settle()
        assert (house.loaded, waiting.done()) == ("a", False)
        assert house.engines[1].state is LoadState.WAITING
        held.close()
        with await waiting:
            assert house.loaded == "b"

    run(test, [6, 6], budget=8)


def test_a_model_that_always_has_requests_does_not_keep_another_out() -> None:
    async def test(house: House) -> None:
        first = await house.ask(0)
        other = house.ask(1)
        await house.settle()
        newcomer = house.ask(0)  # waits behind the other model
        await house.settle()
        assert not newcomer.done()
        first.close()
        with await other:
            await house.settle()
            assert (house.loaded, newcomer.done()) == ("b", False)
        (await newcomer).close()
        assert house.loaded == "a"

    run(test, [6, 6], budget=8)


def test_who_gives_up_leaves_others_as_they_were() -> None:
    async def test(house: House) -> None:
        first = await house.ask(0)
        other, newcomer = house.ask(1), None
        await house.settle()
        newcomer = house.ask(0)
        await house.settle()
        other.cancel()
        second = await newcomer
        assert house.clients[1].num_starts == 0
        for one in (first, second):
            one.close()
        await house.settle()
        assert (house.loaded, house.engines[1].state) == ("a", LoadState.UNLOADED)

    run(test, [6, 6], budget=8)


def test_a_request_waits_for_a_load_to_begin_as_long_as_in_line() -> None:
    async def test(house: House) -> None:
        with await house.ask(0):
            with pytest.raises(Refusal, match=r"next to those that requests use \(a\): b takes 6 B of the 8 B"):
                await house.ask(1)
            assert house.loaded == "a"
            with await house.ask(0):
                pass
        house.clients[1].may_start.clear()
        loading = house.ask(1)
        await asyncio.sleep(0.6)  # longer than a request waits for the load to begin
        assert not loading.done()
        house.clients[1].may_start.set()
        (await loading).close()

    run(test, [6, 6], budget=8, wait_s=0.5)


def test_a_load_that_fails_concerns_its_requests_alone() -> None:
    async def test(house: House) -> None:
        house.clients[1].fails = CapacityError("memory ran out")
        (await house.ask(0)).close()
        asked = [house.ask(1) for _ in range(3)]
        for one in asked:
            with pytest.raises(ApiError, match="b could not be loaded: memory ran out") as caught:
                await one
            assert caught.value.status == 503
        assert (house.engines[1].state, house.engines[1].error) == (LoadState.UNLOADED, "memory ran out")
        assert (loads(house.engines[1]), house.engines[1].loads.memory_bytes) == ({"loaded": 0, "failed": 1}, 0)
        with await house.ask(0):
            pass
        house.clients[1].fails = None
        with await house.ask(1):
            assert (house.loaded, house.engines[1].error) == ("b", "")
        assert (loads(house.engines[1]), house.engines[1].loads.memory_bytes) == ({"loaded": 1, "failed": 1}, 6)

    run(test, [6, 6], budget=8)


def test_an_engine_that_cannot_be_restarted_is_loaded_again_by_the_next_request() -> None:
    async def test(house: House) -> None:
        house.clients[1].die()
        await house.settle()
        assert (house.loaded, house.engines[1].error) == ("a", "ten in a row")
        with await house.ask(1):
            assert house.loaded == "ab"

    run(test, [4, 4], budget=8)


def test_loads_are_limited_in_rate() -> None:
    async def test(house: House) -> None:
        for index in (1, 0):
            (await house.ask(index)).close()
        waiting = house.ask(1)
        await house.settle()
        assert (house.clients[0].num_starts, house.clients[1].num_starts) == (2, 1)
        assert not waiting.done()
        waiting.cancel()
        await house.settle()
        (await house.ask(0)).close()
        assert house.clients[1].num_starts == 1

    run(test, [6, 6], budget=8, rate=lambda: LoadRate(2, 3600.0))


def test_a_load_that_the_rate_delays_begins_by_itself() -> None:
    async def test(house: House) -> None:
        for index in (1, 0, 1, 0):
            (await house.ask(index)).close()
        assert house.loaded == "a"

    run(test, [6, 6], budget=8, rate=lambda: LoadRate(1, 0.02))


def test_unloading_when_idle() -> None:
    async def test(house: House) -> None:
        with await house.ask(0):
            house.loader.unload_when_idle(house.engines[0])
            await house.settle()
            assert house.loaded == "ab"
        await house.settle()
        assert house.loaded == "b"
        with await house.ask(0):
            assert house.loaded == "ab"
            house.loader.unload_when_idle(house.engines[0])
            (await house.ask(0)).close()  # wants it to stay
        await house.settle()
        assert house.loaded == "ab"

    run(test, [4, 4], budget=8)


def test_a_model_that_is_alone_stays() -> None:
    async def test(house: House) -> None:
        house.loader.unload_when_idle(house.engines[0])
        await house.settle()
        assert house.loaded == "a"

    run(test, [4], budget=8)


def test_waits_end_by_key_and_all_at_the_end() -> None:
    async def test(house: House) -> None:
        with await house.ask(0):
            one, two = house.ask(1, "1"), house.ask(1, "2")
            await house.settle()
            house.loader.end_waits(ApiError(400, "aborted"), "1")
            with pytest.raises(ApiError, match="aborted"):
                await one
            assert not two.done()
            house.loader.end_waits(ApiError(503, "shutting down"))
            with pytest.raises(ApiError, match="shutting down"):
                await two

    run(test, [6, 6], budget=8)


@pytest.mark.parametrize("seed", range(20))
def test_random_requests(seed: int) -> None:
    """Whatever comes: memory stays within the budget, no use loses its model, and every request ends."""
    rng = random.Random(seed)
    sizes = [rng.randint(1, 6) for _ in range(4)]

    async def test(house: House) -> None:
        held: list[tuple[int, ExitStack]] = []
        asked: list[tuple[int, asyncio.Task[ExitStack]]] = []

        def check() -> None:
            assert house.loader.taken <= 7
            for index, engine in enumerate(house.engines):
                assert engine.num_users >= sum(1 for at, _ in held if at == index)
            assert all(house.clients[index].is_running for index, _ in held)

        for _ in range(300):
            match rng.randrange(6):
                case 0 | 1:
                    index = rng.randrange(4)
                    asked.append((index, house.ask(index)))
                case 2 if held:
                    held.pop(rng.randrange(len(held)))[1].close()
                case 3 if asked:
                    asked.pop(rng.randrange(len(asked)))[1].cancel()
                case 4:
                    house.loader.unload_when_idle(rng.choice(house.engines))
                case _:
                    await asyncio.sleep(0)
            check()
            for index, task in [one for one in asked if one[1].done()]:
                asked.remove((index, task))
                held.append((index, task.result()))
            check()
        while asked or held:
            for _, one in held:
                one.close()
            held.clear()
            await house.settle()
            for index, task in [one for one in asked if one[1].done()]:
                asked.remove((index, task))
                held.append((index, task.result()))
        await house.settle()
        assert [one.num_users for one in house.engines] == [0] * 4
        assert not any(one.waiters for one in house.engines)

    run(test, sizes, budget=7)
