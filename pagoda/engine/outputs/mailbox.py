"""What readers on an event loop get.

Mailbox: a request's unread outputs, merged into one, so that a slow reader costs little memory. merged: the outputs of
several requests, in the order of time.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pagoda.base.errors import fresh
from pagoda.base.outputs import CompletionOutput, Logprob, RequestOutput
from pagoda.engine.outputs.output_processor import OutputKind


class Mailbox:
    """For one writer and one reader on an event loop. Holds at most one output; later ones are merged into it."""

    def __init__(self, kind: OutputKind) -> None:
        self._kind = kind
        self._output: RequestOutput | None = None
        self._unread: dict[int, GatheredPart] = {}
        self._error: Exception | None = None
        self._filled = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """Add an output. Takes time in proportion to its own size, however much is unread."""
        if self._output is not None and self._kind is OutputKind.DELTA:
            if not self._unread:
                self._add_parts(self._output)
            self._add_parts(output)
        self._output = output
        self._filled.set()

    def _add_parts(self, output: RequestOutput) -> None:
        for part in output.outputs:
            unread = self._unread.get(part.index)
            if unread is None:
                self._unread[part.index] = GatheredPart.of(part)
            else:
                unread.add(part)

    def fail(self, error: Exception) -> None:
        """Make `get` raise `error` after the pending output has been read."""
        self._error = error
        self._filled.set()

    async def get(self) -> RequestOutput:
        """Wait for output; return all that arrived since the last call, merged. Raises the error given to `fail`."""
        await self._filled.wait()
        self._filled.clear()
        output, self._output = self._output, None
        unread, self._unread = self._unread, {}
        if output is None:
            assert self._error is not None
            raise fresh(self._error)
        if self._error is not None:
            self._filled.set()
        if unread:
            output = dataclasses.replace(output, outputs=[unread[index].merged() for index in sorted(unread)])
        return output


@dataclass(slots=True)
class GatheredPart:
    """Consecutive deltas of one sequence, as one.   last: the newest."""

    last: CompletionOutput
    texts: list[str]
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None

    @classmethod
    def of(cls, part: CompletionOutput) -> "GatheredPart":
        logprobs = list(part.logprobs) if part.logprobs is not None else None
        return cls(part, [part.text], list(part.token_ids), logprobs)

    def add(self, part: CompletionOutput) -> None:
        self.last = part
        self.texts.append(part.text)
        self.token_ids += part.token_ids
        if self.logprobs is not None and part.logprobs is not None:
            self.logprobs += part.logprobs
        else:
            self.logprobs = None

    def merged(self) -> CompletionOutput:
        return dataclasses.replace(
            self.last, text="".join(self.texts), token_ids=self.token_ids, logprobs=self.logprobs
        )


# ---- several requests


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
