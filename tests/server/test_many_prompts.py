"""However many prompts a request has, others get turns of the event loop when it ends: counted, not timed."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from pagoda.base.outputs import RequestOutput
from pagoda.engine.outputs import mailbox
from pagoda.server.generation import Generation
from pagoda.server.request_state import RequestState

COUNT = 1_000


class Progress:
    """How much was done between two turns of others."""

    def __init__(self) -> None:
        self.done = 0
        self.steps: list[int] = []

    async def watch(self, work: Callable[[], Awaitable[object]]) -> None:
        """Run `work` next to a task that only wants its turns."""

        async def look() -> None:
            last = 0
            while True:
                self.steps.append(self.done - last)
                last = self.done
                await asyncio.sleep(0)

        looking = asyncio.create_task(look())
        await work()
        self.steps.append(self.done - sum(self.steps))
        looking.cancel()


def test_a_client_that_leaves_thousands_of_prompts_delays_others_by_few_of_them() -> None:
    progress = Progress()

    async def prompt() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            progress.done += 1

    async def work() -> None:
        tasks = [asyncio.create_task(prompt()) for _ in range(COUNT)]
        await asyncio.sleep(0)
        await mailbox._cancel(tasks)
        assert all(task.cancelled() for task in tasks)

    asyncio.run(progress.watch(work))
    assert progress.done == COUNT
    assert max(progress.steps) <= 16


def test_prompts_are_all_cancelled_though_cancelling_them_is_cancelled() -> None:
    async def main() -> None:
        tasks = [asyncio.create_task(asyncio.Event().wait()) for _ in range(COUNT)]
        await asyncio.sleep(0)
        cancelling = asyncio.create_task(mailbox._cancel(tasks))
        await asyncio.sleep(0)
        cancelling.cancel()
        await asyncio.gather(cancelling, return_exceptions=True)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert cancelling.cancelled()
        assert all(task.cancelled() for task in tasks)

    asyncio.run(main())


def test_the_prompts_of_a_request_end_when_its_reader_leaves() -> None:
    """A Generation cancels in pieces, too."""
    progress = Progress()

    class Stuck(Generation):
        async def _follow(self, index: int) -> AsyncGenerator[RequestOutput, None]:
            try:
                if index == COUNT - 1:
                    yield RequestOutput("a", None, outputs=[])
                await asyncio.Event().wait()
            finally:
                progress.done += 1

    async def work() -> None:
        requests: Any = [type("R", (), {"num_prompt_tokens": 1, "sampling": None})()] * COUNT
        scope: Any = {"state": RequestState()}
        admitted: Any = type("A", (), {"arrived_s": 0.0, "at_end": contextlib.ExitStack()})()
        serving: Any = type("S", (), {"observed": type("O", (), {"metrics": None})()})()
        stuck = Stuck(serving, scope, "a", requests, admitted)
        async with stuck.outputs() as outputs:
            async for _ in outputs:
                break

    asyncio.run(progress.watch(work))
    assert progress.done == COUNT
    assert max(progress.steps) <= 16
