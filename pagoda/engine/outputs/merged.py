"""Yield what several async generators yield."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

T = TypeVar("T")

PROMPTS_PER_TURN = 16
"""Prompts of one call to prepare or start per turn of the event loop, so that others are not delayed."""


async def merged(each: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Yield what several generators yield, in the order of time. All are closed with this one.

    Some start, yield or end per turn of the event loop, so that others are not delayed.
    """
    # One slot per generator: backpressure from a slow reader reaches all of them.
    queue: asyncio.Queue[tuple[T] | Exception | None] = asyncio.Queue(len(each))

    async def pump(outputs: AsyncGenerator[T, None]) -> None:
        try:
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    await queue.put((output,))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks: list[asyncio.Task[None]] = []
    try:
        for outputs in each:
            tasks.append(asyncio.create_task(pump(outputs)))
            if len(tasks) % PROMPTS_PER_TURN == 0:
                await asyncio.sleep(0)
        num_open, num_items = len(tasks), 0
        while num_open:
            item = await queue.get()
            num_items += 1
            if num_items % PROMPTS_PER_TURN == 0:  # a full queue never waits
                await asyncio.sleep(0)
            if item is None:
                num_open -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item[0]
    finally:
        await _cancel(tasks)


async def _cancel(tasks: Sequence["asyncio.Task[None]"]) -> None:
    """Cancel tasks and wait for their ends, some per turn of the event loop."""
    try:
        for at in range(0, len(tasks), PROMPTS_PER_TURN):
            some = tasks[at : at + PROMPTS_PER_TURN]
            for task in some:
                task.cancel()
            await asyncio.gather(*some, return_exceptions=True)
    finally:  # if this is cancelled, none may go on running
        for task in tasks:
            task.cancel()
