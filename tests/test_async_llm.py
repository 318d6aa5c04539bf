"""AsyncLLM: loading, whole outputs and deltas, closing, and what it has in common with LLM."""

import asyncio
import inspect
import itertools
import multiprocessing
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from pagoda import (
    LLM,
    AsyncLLM,
    ConfigError,
    NotSupportedError,
    RequestError,
    RequestOutput,
    SamplingParams,
    UsageError,
)
from pagoda.engine.async_engine import AsyncEngine
from pagoda.engine.clients.thread_client import ThreadClient
from pagoda.engine.llm_engine import LLMEngine
from tests.cached_models import cached_model
from tests.fake_engine import byte_inputs, fake_core

SHORT = SamplingParams(max_tokens=8, seed=1, ignore_eos=True)
LONG = SamplingParams(max_tokens=240, seed=1, ignore_eos=True)
HI = [{"role": "user", "content": "hi"}]


def run(test: Callable[[AsyncLLM], Awaitable[None]], step_s: float = 0.0) -> None:
    async def main() -> None:
        client = ThreadClient(lambda: fake_core(step_s=step_s))
        await client.start()
        async with AsyncLLM.over(AsyncEngine(client, byte_inputs())) as llm:
            await test(llm)

    asyncio.run(asyncio.wait_for(main(), 30))


async def collect(outputs: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in outputs]


def whole(prompt: Any) -> RequestOutput:
    with LLM.over(LLMEngine(fake_core(), byte_inputs())) as llm:
        return llm.generate(prompt, SHORT)[0]


def test_generate_yields_everything_so_far_and_stream_what_is_new() -> None:
    expected = whole("p").outputs[0]

    async def test(llm: AsyncLLM) -> None:
        outputs = [output.outputs[0].text async for output in llm.generate("p", SHORT)]
        assert outputs[-1] == expected.text
        assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(outputs))
        deltas = [output.outputs[0] async for output in llm.stream("p", SHORT)]
        assert "".join(delta.text for delta in deltas) == expected.text
        assert [token for delta in deltas for token in delta.token_ids] == expected.token_ids
        assert len(deltas) > 1

    run(test, step_s=0.002)


def test_chats() -> None:
    expected = whole("<user>hi\n<assistant>").outputs[0]

    async def test(llm: AsyncLLM) -> None:
        *_, last = [output async for output in llm.chat(HI, SHORT)]
        assert (last.prompt, last.finished) == ("<user>hi\n<assistant>", True)
        deltas = [output.outputs[0].text async for output in llm.stream_chat(HI, SHORT, template_kwargs={"x": 1})]
        assert "".join(deltas) == last.outputs[0].text == expected.text

    run(test)


def test_both_classes_have_the_same_methods_with_the_same_arguments() -> None:
    names = {"generate", "chat", "stream", "stream_chat", "beam_search", "embed", "classify", "score", "close"}
    for name in (*names, "get_tokenizer"):
        assert callable(getattr(LLM, name))
        assert callable(getattr(AsyncLLM, name))
    assert inspect.signature(LLM.__init__) == inspect.signature(AsyncLLM.__init__)
    for name in ("generate", "chat", "stream", "stream_chat"):
        ours, theirs = inspect.signature(getattr(AsyncLLM, name)), inspect.signature(getattr(LLM, name))
        assert list(ours.parameters)[2] == list(theirs.parameters)[2] == "sampling_params"


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda llm: llm.generate("", SHORT), "empty"),
        (lambda llm: llm.generate(["a", "b"], SHORT), "the prompt is a list of str"),
        (lambda llm: llm.generate(HI, SHORT), "pass them to chat"),
        (lambda llm: llm.stream({"role": "user"}, SHORT), "pass messages to chat"),
        (lambda llm: llm.chat("hi", SHORT), "messages is str"),
        (lambda llm: llm.chat(["a", "b"], SHORT), r"messages\[0\] is str"),
        (lambda llm: llm.generate("a", {"temperature": 0}), "sampling_params is dict"),
    ],
    ids=["empty", "strings", "messages", "message", "chat of a string", "chat of strings", "params"],
)
def test_mistakes_raise_before_anything_runs(call: Callable[[AsyncLLM], Any], says: str) -> None:
    async def test(llm: AsyncLLM) -> None:
        with pytest.raises(RequestError, match=says):
            await anext(call(llm))

    run(test)


def test_closing_ends_what_is_in_flight_and_refuses_the_rest() -> None:
    async def test(llm: AsyncLLM) -> None:
        stream = llm.stream("p", LONG)
        await anext(stream)
        await llm.close()
        with pytest.raises(UsageError, match="closed while it generated"):
            await collect(stream)
        with pytest.raises(UsageError, match="this AsyncLLM is closed"):
            await anext(llm.generate("p", SHORT))
        with pytest.raises(UsageError, match="this AsyncLLM is closed"):
            await llm.start()
        await llm.close()

    run(test, step_s=0.005)


def test_it_belongs_to_one_event_loop() -> None:
    async def test(llm: AsyncLLM) -> None:
        await llm.start()

        async def elsewhere() -> None:
            with pytest.raises(UsageError, match="another event loop"):
                await anext(llm.generate("p", SHORT))

        await asyncio.to_thread(asyncio.run, elsewhere())

    run(test)


def _use_in_child(llm: AsyncLLM) -> None:
    async def use() -> None:
        try:
            await anext(llm.generate("p", SHORT))
        except UsageError as error:
            if "is a fork of it" in str(error):
                await llm.close()
                os._exit(7)

    asyncio.run(use())


def test_a_forked_child_gets_an_error() -> None:
    async def test(llm: AsyncLLM) -> None:
        child = multiprocessing.get_context("fork").Process(target=_use_in_child, args=(llm,))
        await asyncio.to_thread(child.start)
        await asyncio.to_thread(child.join, 20)
        assert child.exitcode == 7

    run(test)


def test_planned_methods_name_what_is_missing() -> None:
    async def test(llm: AsyncLLM) -> None:
        for call in (
            llm.embed("a"),
            llm.classify("a"),
            llm.score("a", "b"),
        ):
            with pytest.raises(NotSupportedError, match="is planned and not available yet: "):
                await call

    run(test)
    with LLM.over(LLMEngine(fake_core(), byte_inputs())) as llm:
        for method, arguments in (
            (llm.embed, ("a",)),
            (llm.classify, ("a",)),
            (llm.score, ("a", "b")),
        ):
            with pytest.raises(NotImplementedError, match=f"{method.__name__} is planned and not available yet: "):
                method(*arguments)


def test_options_are_checked_when_it_is_made() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs"):
        AsyncLLM(max_num_sequences=3)
    with pytest.raises(ConfigError, match="max_num_seqs=0"):
        AsyncLLM(max_num_seqs=0)
    with pytest.raises(ConfigError, match="port is an option of `pagoda serve`"):
        AsyncLLM(port=8000)


def test_a_load_that_fails_may_be_tried_again() -> None:
    async def main() -> None:
        llm = AsyncLLM("smollm2-136m")
        for _ in range(2):
            with pytest.raises(ConfigError, match="smollm2-135m"):
                await llm.start()
        await llm.close()

    asyncio.run(main())


def test_smollm2_answers() -> None:
    cached_model("smollm2-135m")

    async def last_text(llm: AsyncLLM) -> str:
        greedy = SamplingParams(max_tokens=4, temperature=0.0)
        return [output async for output in llm.generate("The capital of France is", greedy)][-1].outputs[0].text

    async def main() -> None:
        async with AsyncLLM("smollm2-135m", max_num_seqs=4, max_model_len=512, kv_cache_memory="64MiB") as llm:
            texts = await asyncio.gather(*(last_text(llm) for _ in range(3)))
            assert all(text.startswith(" Paris") for text in texts)

    asyncio.run(main())
