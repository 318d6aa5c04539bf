"""Run the jobs of a transcription in an event loop."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Protocol

from pagoda.base.errors import RequestError
from pagoda.base.outputs import RequestOutput
from pagoda.engine.outputs.mailbox import merged
from pagoda.engine.transcription.piece import Job, Question


class JobThreads(Protocol):
    """What advances a job without blocking the event loop: AsyncText."""

    def advance(self, job: Job, answer: RequestOutput | None) -> Awaitable["Question | list[Job] | None"]: ...


async def run_job(
    job: Job, text: JobThreads, ask: Callable[[Question], AsyncGenerator[RequestOutput, None]], at_once: int
) -> AsyncGenerator[RequestOutput, None]:
    """Run a job to its end, with all that it starts; yield the output of each of its requests.

    text: advances it on its threads.   ask: starts the request of a question, and yields its output.
    at_once: most requests of the job that run at the same time.
    Close the iterator to abort it. Raises RequestError, and what `ask` raises.
    """
    asked = await text.advance(job, None)
    while asked is not None:
        if isinstance(asked, list):
            places = asyncio.Semaphore(at_once)
            jobs = [_when_there_is_room(places, run_job(one, text, ask, at_once)) for one in asked]
            async with contextlib.aclosing(merged(jobs)) as outputs:
                async for output in outputs:
                    yield output
            asked = await text.advance(job, None)
            continue
        async with contextlib.aclosing(ask(asked)) as outputs:
            async for output in outputs:
                if output.finished:
                    if output.error is not None:
                        raise RequestError(output.error, "file")
                    if output.outputs[0].finish_reason == "abort":
                        raise RequestError("the transcription was aborted")
                    asked = await text.advance(job, output)
                    yield output


async def _when_there_is_room(
    places: asyncio.Semaphore, outputs: AsyncGenerator[RequestOutput, None]
) -> AsyncGenerator[RequestOutput, None]:
    async with places, contextlib.aclosing(outputs):
        async for output in outputs:
            yield output
