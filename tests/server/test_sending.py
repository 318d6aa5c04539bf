"""Responses: a stream has ended before its client can know that; a whole answer is the same, however it is encoded."""

import asyncio
import threading
from collections.abc import AsyncGenerator

import msgspec
import pytest
from starlette.types import Message

from pagoda.server.dialects.openai.answers import PromptTokensDetails, Usage
from pagoda.server.dialects.openai.completions import CompletionChoice, CompletionResponse
from pagoda.server.request_state import RequestState
from pagoda.server.sending import DONE, EventStream, json_response, run_sized


@pytest.mark.parametrize("fails", [False, True])
def test_a_stream_ends_before_done_is_sent_and_only_once(fails: bool) -> None:
    happened: list[str] = []

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            yield b"data: 1\n\n"
            if fails:
                raise ValueError("x")
        finally:
            happened.append("closed")

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        if message.get("body") == DONE:
            happened.append("done")

    async def main() -> None:
        await EventStream(events(), lambda: happened.append("ended"))(
            {"type": "http", "state": RequestState()}, receive, send
        )

    asyncio.run(main())
    assert happened == ["closed", "ended", "done"]


def test_an_answer_of_many_choices_is_encoded_choice_by_choice() -> None:
    choices = [CompletionChoice(index, "a", None, "stop", None) for index in range(300)]
    usage = Usage(1, 1, 2, PromptTokensDetails(0))
    answer = CompletionResponse(id="a", created=1, model="a", choices=choices, usage=usage)
    expected = msgspec.json.encode(answer)
    response = json_response(answer)
    assert response.body == expected
    assert response.headers["content-length"] == str(len(expected))


def test_work_on_many_tokens_runs_on_a_thread() -> None:
    async def main() -> list[bool]:
        threads = [await run_sized(size, threading.current_thread) for size in (10, 10_000)]
        return [thread is threading.current_thread() for thread in threads]

    assert asyncio.run(main()) == [True, False]


def test_who_is_cancelled_during_work_on_a_thread_ends_after_it() -> None:
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        may_end.wait(60)
        ended.set()

    async def main() -> None:
        task = asyncio.create_task(run_sized(10_000, work))
        await asyncio.to_thread(begun.wait, 60)
        for _ in range(2):
            task.cancel()
            await asyncio.wait((task,), timeout=0)
            assert not task.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended.is_set()

    asyncio.run(main())
