"""EventStream: a stream has ended, and its id is free, before its client can know that."""

import asyncio
from collections.abc import AsyncGenerator

import pytest
from starlette.types import Message

from pagoda.server.streams import DONE, EventStream


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
        await EventStream(events(), lambda: happened.append("ended"))({"type": "http"}, receive, send)

    asyncio.run(main())
    assert happened == ["closed", "ended", "done"]
