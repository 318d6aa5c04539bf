"""Jobs in an event loop: how many run at once, what a stream may send, and how many sounds are in memory uncounted."""

import asyncio
import functools
import time
from collections.abc import AsyncGenerator, Callable, Coroutine

import numpy as np
import pytest

from pagoda.base.errors import RequestError
from pagoda.base.outputs import CompletionOutput, RequestOutput
from pagoda.base.request_limits import RequestLimits
from pagoda.engine.async_text import AsyncText
from pagoda.engine.transcription.piece import Question
from pagoda.engine.transcription.sound import SAMPLING_RATE, Sound
from pagoda.engine.transcription.transcriber import Transcriber, TranscriptionOptions
from tests.engine.transcription.speech_model import END, FIRST, inputs_of

OPTIONS = TranscriptionOptions(language="en", cut_at_silences=True)
TEXT = [FIRST, 40, 41, FIRST + 100, END]


def in_loop(test: Callable[[], Coroutine[object, object, None]]) -> Callable[[], None]:
    @functools.wraps(test)
    def run() -> None:
        asyncio.run(test())

    return run


def silence(seconds: float) -> Sound:
    return Sound(np.zeros(int(seconds * SAMPLING_RATE), np.float32), "silence.wav")


def finished(ids: list[int], reason: str = "stop") -> RequestOutput:
    output = CompletionOutput(0, token_ids=ids, cumulative_logprob=-0.1, finish_reason=reason)
    return RequestOutput("r", None, outputs=[output], finished=True)


@in_loop
async def test_no_more_pieces_of_a_sound_run_at_once_than_may() -> None:
    inputs = inputs_of()
    inputs.limits.max_num_seqs = 3
    text = AsyncText(inputs)
    transcription = Transcriber(inputs).begin(silence(200), OPTIONS)
    running, most, full = 0, 0, asyncio.Event()

    async def ask(question: Question) -> AsyncGenerator[RequestOutput, None]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 3:
            full.set()
        await asyncio.wait_for(full.wait(), 60)
        await asyncio.sleep(0.01)
        running -= 1
        yield finished(TEXT)

    async for _ in text.run_job(transcription.job(), ask):
        pass
    text.close()
    assert most == 3
    assert len(transcription.segments) > 6


@in_loop
async def test_segments_of_later_pieces_wait_until_those_before_are_final() -> None:
    text = AsyncText(inputs_of())
    sound = silence(80)
    sound.samples[: SAMPLING_RATE // 2] = 0.1 * np.sin(np.arange(SAMPLING_RATE // 2))  # tells the first piece
    transcription = Transcriber(inputs_of()).begin(sound, OPTIONS)
    may_end = asyncio.Event()

    async def ask(question: Question) -> AsyncGenerator[RequestOutput, None]:
        if np.ptp(question.prompt.media[0].features) > 0:
            await may_end.wait()
        yield finished(TEXT)

    num_pieces = 0
    async for _ in text.run_job(transcription.job(), ask):
        num_pieces += 1
        if not may_end.is_set():
            assert transcription.segments
            assert transcription.num_settled == 0
        if num_pieces == len(transcription._pieces) - 1:
            may_end.set()
    text.close()
    assert transcription.num_settled == len(transcription.segments) == num_pieces > 2


@in_loop
async def test_an_aborted_request_ends_the_transcription() -> None:
    text = AsyncText(inputs_of())
    transcription = Transcriber(inputs_of()).begin(silence(20), OPTIONS)

    async def ask(question: Question) -> AsyncGenerator[RequestOutput, None]:
        yield finished([FIRST, 40], "abort")

    with pytest.raises(RequestError, match="was aborted"):
        async for _ in text.run_job(transcription.job(), ask):
            pass
    text.close()


@in_loop
async def test_a_sound_is_counted_before_the_next_is_decoded() -> None:
    text = AsyncText(inputs_of())
    events: list[str] = []

    def begin(name: str) -> "asyncio.Task[object]":
        def read(limits: RequestLimits, is_left: Callable[[], bool]) -> Sound:
            events.append(f"read {name}")
            return silence(1)

        async def hold(num_bytes: int) -> None:
            await asyncio.sleep(0.01)
            events.append(f"hold {name} {num_bytes}")

        return asyncio.create_task(text.begin_transcription(read, OPTIONS, lambda limits: 7, hold))

    await asyncio.gather(*map(begin, "abc"))
    text.close()
    size = 2 * 4 * SAMPLING_RATE
    assert events == [entry for name in "abc" for entry in (f"hold {name} 7", f"read {name}", f"hold {name} {size}")]


@in_loop
async def test_a_cancelled_call_stops_its_decoding() -> None:
    text, loop = AsyncText(inputs_of()), asyncio.get_running_loop()
    begun, stopped = asyncio.Event(), asyncio.Event()

    def read(limits: RequestLimits, is_left: Callable[[], bool]) -> Sound:
        loop.call_soon_threadsafe(begun.set)
        until_s = time.monotonic() + 30
        while not is_left() and time.monotonic() < until_s:
            time.sleep(0.001)
        if is_left():
            loop.call_soon_threadsafe(stopped.set)
        return silence(1)

    call = asyncio.create_task(text.begin_transcription(read, OPTIONS))
    await begun.wait()
    call.cancel()
    await asyncio.wait_for(stopped.wait(), 20)
    text.close()
