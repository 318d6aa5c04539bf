"""AsyncText: what waits for a thread is dropped when its caller leaves, and when the engine closes."""

import asyncio
import threading

import pytest

from pagoda.base.errors import UsageError
from pagoda.base.sampling_params import OutputRule, PromptReasoning, SamplingParams
from pagoda.base.structured_outputs import StructuredOutputsParams
from pagoda.engine.answers.reasoning import THINK, ReasoningTags
from pagoda.engine.async_text import AsyncText
from pagoda.engine.inputs.input_limits import InputLimits
from pagoda.engine.inputs.input_processor import InputProcessor
from pagoda.engine.inputs.params_preparer import ParamsPreparer
from pagoda.engine.tokenizers.byte_tokenizer import ByteTokenizer

LONG = "x" * 100_000
_WAIT_S = 30.0


class HeldTokenizer(ByteTokenizer):
    """Encodes when it may, and notes the texts that it began with."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.begun = threading.Semaphore(0)
        self.texts: list[str] = []

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.texts.append(text)
        self.begun.release()
        assert self.may_end.wait(_WAIT_S)
        return [len(text)]


async def start(text: AsyncText, tokenizer: HeldTokenizer, count: int) -> "list[asyncio.Task[list[int]]]":
    """Return tasks that encode long texts; the first ones have begun, the others wait for a thread."""
    tasks = [asyncio.create_task(text.encode(LONG + str(index))) for index in range(count)]
    while await asyncio.to_thread(tokenizer.begun.acquire, timeout=0.2):
        pass
    assert 0 < len(tokenizer.texts) < count
    return tasks


def make_text() -> tuple[AsyncText, HeldTokenizer]:
    tokenizer = HeldTokenizer()
    return AsyncText(InputProcessor(tokenizer, InputLimits(258, 10**6, 8))), tokenizer


def test_queued_texts_whose_callers_have_left_are_not_tokenised() -> None:
    async def run() -> None:
        text, tokenizer = make_text()
        tasks = await start(text, tokenizer, 12)
        num_begun = len(tokenizer.texts)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        tokenizer.may_end.set()
        assert await text.encode(LONG) == [len(LONG)]
        assert len(tokenizer.texts) == num_begun + 1
        text.close()

    asyncio.run(run())


def test_closing_ends_queued_texts_and_refuses_new_ones() -> None:
    async def run() -> None:
        text, tokenizer = make_text()
        tasks = await start(text, tokenizer, 12)
        num_begun = len(tokenizer.texts)
        text.close()
        tokenizer.may_end.set()
        ended = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), _WAIT_S)
        assert sum(isinstance(one, UsageError) for one in ended) == 12 - num_begun
        assert len(tokenizer.texts) == num_begun
        with pytest.raises(UsageError, match="closed"):
            await text.encode(LONG)
        with pytest.raises(UsageError, match="closed"):
            await text.prepare_params(SamplingParams(structured_outputs=StructuredOutputsParams(regex="a")))
        with pytest.raises(UsageError, match="closed"):
            await text.write_grammar(lambda: "start: x")

    asyncio.run(run())


def test_short_texts_do_not_wait_for_a_thread() -> None:
    async def run() -> None:
        text, tokenizer = make_text()
        tasks = await start(text, tokenizer, 12)
        assert text.decode([72, 105]) == "Hi"
        assert await text.detokenize([72, 105]) == "Hi"
        tokenizer.may_end.set()
        assert await text.encode("Hi") == [2]
        await asyncio.gather(*tasks)
        text.close()

    asyncio.run(run())


def test_parameters_that_change_while_the_prompt_is_read_do_not_change_the_request() -> None:
    async def run() -> None:
        tokenizer = HeldTokenizer()
        text = AsyncText(InputProcessor(tokenizer, InputLimits(10**6, 10**6, 8)))
        params = SamplingParams(max_tokens=3)
        making = asyncio.create_task(text.make_request(LONG, params, "r", arrival_time_s=0.0))
        assert await asyncio.to_thread(tokenizer.begun.acquire, timeout=_WAIT_S)
        params.max_tokens = 5
        params.prompt_logprobs = 10**6  # which no check has seen
        tokenizer.may_end.set()
        request = await making
        assert request.sampling is not None
        assert (request.sampling.max_tokens, request.sampling.prompt_logprobs) == (3, None)
        text.close()

    asyncio.run(run())


def test_a_long_prompt_is_searched_for_an_open_thought_on_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def tags(_preparer: ParamsPreparer, _params: SamplingParams) -> ReasoningTags:
        threads.append(threading.current_thread())
        return THINK

    async def run() -> None:
        text = AsyncText(InputProcessor(ByteTokenizer(), InputLimits(10**6, 10**6, 8)))
        for prompt, is_open in (("<think>Hm", True), ("<think>" + "a" * 5000, True), ("a" * 5000, False)):
            params = await text.prepare_params(SamplingParams(thinking_token_budget=5))
            threads.clear()
            made = await text.make_request(prompt, params, "r", arrival_time_s=0.0)
            assert made.sampling is not None
            assert made.sampling.rule == OutputRule("", 5, PromptReasoning("think", is_open))
            assert [one is threading.main_thread() for one in threads] == [len(prompt) < 100]
        text.close()

    monkeypatch.setattr(ParamsPreparer, "_reasoning_tags", tags)
    asyncio.run(run())


def test_errors_reach_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> list[int]:
        raise KeyError("x")

    async def run() -> None:
        text, tokenizer = make_text()
        monkeypatch.setattr(tokenizer, "encode", fail)
        for _ in range(10):  # more often than there are threads: each is free again
            with pytest.raises(KeyError):
                await text.encode(LONG)
        text.close()

    asyncio.run(run())
