"""Turns for a few workers: keys alternate, cancelled calls leave, and no turn is ever lost."""

import asyncio
import random

from pagoda.engine.fair_turns import FairTurns


def test_keys_alternate_and_each_keeps_its_order() -> None:
    async def run() -> list[str]:
        turns, served = FairTurns(1), []
        await turns.take("a")

        async def call(name: str) -> None:
            await turns.take(name[0])
            served.append(name)
            turns.release()

        calls = [asyncio.create_task(call(name)) for name in ("a1", "a2", "a3", "a4", "b1", "b2", "c1")]
        await asyncio.sleep(0)
        turns.release()
        await asyncio.gather(*calls)
        return served

    assert asyncio.run(run()) == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]


def test_cancelled_calls_leave_the_queue_and_lose_no_turn() -> None:
    async def run() -> None:
        choose = random.Random(1)
        turns, num_running, most = FairTurns(3), 0, 0

        async def call(key: str) -> None:
            nonlocal num_running, most
            await turns.take(key)
            num_running += 1
            most = max(most, num_running)
            try:
                await asyncio.sleep(choose.choice([0, 0, 0.001]))
            finally:
                num_running -= 1
                turns.release()

        for _ in range(50):
            calls = [asyncio.create_task(call(choose.choice("abc"))) for _ in range(20)]
            for one in choose.sample(calls, 12):
                await asyncio.sleep(0)
                one.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            assert not turns._waiting
            assert turns._num_free == 3
        assert most == 3

    asyncio.run(run())


def test_a_turn_of_a_call_that_is_cancelled_passes_to_the_next_call() -> None:
    async def run() -> None:
        turns = FairTurns(1)
        await turns.take("a")
        first, second = asyncio.create_task(turns.take("a")), asyncio.create_task(turns.take("b"))
        await asyncio.sleep(0)
        turns.release()  # `first` has the turn, but has not run yet
        first.cancel()
        await asyncio.wait_for(second, 5)

    asyncio.run(run())
