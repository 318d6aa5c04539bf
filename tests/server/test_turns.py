"""However many outputs and choices a request has, others get turns of the event loop: counted, not timed."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Any

import msgspec
import pytest

from pagoda.base.outputs import CompletionOutput, Logprob, RequestOutput
from pagoda.server import generation as generation_module
from pagoda.server import json_answer
from pagoda.server.answers import CompletionChoice, CompletionResponse, PromptTokensDetails, Usage
from pagoda.server.generation import Generation
from pagoda.server.json_answer import JsonAnswer
from pagoda.server.respond import gather, stream_events
from pagoda.server.turns import Turns

COUNT = 1_000
USAGE = Usage(1, 1, 2, PromptTokensDetails(0))


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


class ManyOutputs:
    """A Generation all of whose outputs are there at once."""

    def __init__(self, num_logprobs: int) -> None:
        entries: Any = [{1: Logprob(-1.0, 1, "a")}] * num_logprobs
        self.num_prompt_tokens = self.num_output_tokens = self.num_cached_tokens = 1
        self._outputs = [
            RequestOutput("a", None, outputs=[CompletionOutput(0, "a", [1], logprobs=entries)], finished=True)
            for _ in range(COUNT)
        ]

    def outputs(self) -> Any:
        async def each() -> AsyncGenerator[tuple[int, RequestOutput], None]:
            for index, output in enumerate(self._outputs):
                yield index, output

        return contextlib.aclosing(each())


class CountingFormat:
    """An AnswerFormat that only counts."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def chunk(self) -> Any:
        return CompletionResponse(id="a", created=1, model="a", choices=[], usage=USAGE)

    def opening(self) -> Iterator[Any]:
        return iter(())

    async def chunk_choice(self, index: int, delta: object, output: object) -> CompletionChoice:
        self._progress.done += 1
        return CompletionChoice(index, "a", None, None, None)

    async def add(self, index: int, delta: object, output: object) -> None:
        self._progress.done += 1

    async def whole(self, usage: object, timings: object) -> msgspec.Struct:
        return self.chunk()


class Options:
    """What is read of a body."""

    stream_options = None
    return_timings = False


@pytest.mark.parametrize(("num_logprobs", "most"), [(0, 32), (5, 10), (64, 1)])
@pytest.mark.parametrize("streams", [True, False])
def test_making_choices_gives_turns(streams: bool, num_logprobs: int, most: int) -> None:
    progress = Progress()
    generation: Any = ManyOutputs(num_logprobs)
    body: Any = Options()

    async def work() -> None:
        if streams:
            async for _ in stream_events(generation, CountingFormat(progress), body):
                pass
        else:
            await gather(generation, CountingFormat(progress), body)

    asyncio.run(progress.watch(work))
    assert progress.done == COUNT
    assert max(progress.steps) <= most


def test_encoding_many_choices_gives_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    progress = Progress()
    encode = json_answer._encode

    def counted(value: Any) -> bytes:
        progress.done += 1
        return encode(value)

    monkeypatch.setattr(json_answer, "_encode", counted)
    choices = [CompletionChoice(index, "a", None, "stop", None) for index in range(COUNT)]
    answer = CompletionResponse(id="a", created=1, model="a", choices=choices, usage=USAGE)
    sent = bytearray()

    async def send(message: Any) -> None:
        sent.extend(message.get("body", b""))

    async def work() -> None:
        await JsonAnswer(answer)({"type": "http"}, None, send)  # type: ignore[arg-type]

    asyncio.run(progress.watch(work))
    assert len(msgspec.json.decode(bytes(sent))["choices"]) == COUNT
    assert progress.done > COUNT
    assert max(progress.steps) <= 128


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
        await generation_module._cancel(tasks)
        assert all(task.cancelled() for task in tasks)

    asyncio.run(progress.watch(work))
    assert progress.done == COUNT
    assert max(progress.steps) <= 16


def test_prompts_are_all_cancelled_though_cancelling_them_is_cancelled() -> None:
    async def main() -> None:
        tasks = [asyncio.create_task(asyncio.Event().wait()) for _ in range(COUNT)]
        await asyncio.sleep(0)
        cancelling = asyncio.create_task(generation_module._cancel(tasks))
        await asyncio.sleep(0)
        cancelling.cancel()
        await asyncio.gather(cancelling, return_exceptions=True)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert cancelling.cancelled()
        assert all(task.cancelled() for task in tasks)

    asyncio.run(main())


def test_little_work_takes_no_turn_of_its_own() -> None:
    progress = Progress()

    async def work() -> None:
        turns = Turns()
        for _ in range(20):
            await turns.did(2)
            progress.done += 1

    asyncio.run(progress.watch(work))
    assert max(progress.steps) == 20


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
        requests: Any = [type("R", (), {"num_prompt_tokens": 1})()] * COUNT
        scope: Any = type("H", (), {"scope": {"state": {"timings": {}, "key": ""}}})()
        stuck = Stuck(None, scope, "a", requests, contextlib.ExitStack())  # type: ignore[arg-type]
        async with stuck.outputs() as outputs:
            async for _ in outputs:
                break

    asyncio.run(progress.watch(work))
    assert progress.done == COUNT
    assert max(progress.steps) <= 16
