"""AsyncLLM: loading, whole outputs and deltas, closing, and what it has in common with LLM."""

import asyncio
import contextlib
import gc
import inspect
import itertools
import multiprocessing
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from pagoda import (
    LLM,
    AsyncLLM,
    ConfigError,
    PoolingParams,
    RequestError,
    RequestOutput,
    SamplingParams,
    UsageError,
)
from pagoda.engine.text_engine import TextEngine
from tests.cached_models import cached_model
from tests.engine.step_per_command import step_per_command
from tests.fake_engine import byte_inputs, fake_core

SHORT = SamplingParams(max_tokens=8, seed=1, ignore_eos=True)
LONG = SamplingParams(max_tokens=240, seed=1, ignore_eos=True)
HI = [{"role": "user", "content": "hi"}]


def run(test: Callable[[AsyncLLM], Awaitable[None]], step_s: float = 0.0) -> None:
    async def main() -> None:
        async with AsyncLLM.over(lambda: TextEngine(fake_core(step_s=step_s), byte_inputs())) as llm:
            await test(llm)

    asyncio.run(asyncio.wait_for(main(), 30))


async def collect(outputs: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in outputs]


def whole(prompt: Any) -> RequestOutput:
    with LLM.over(lambda: TextEngine(fake_core(), byte_inputs())) as llm:
        return llm.generate(prompt, SHORT)[0]


def test_generate_yields_everything_so_far_and_stream_what_is_new() -> None:
    expected = whole("p").outputs[0]

    async def test(llm: AsyncLLM) -> None:
        outputs = [output.outputs[0].text async for output in llm.generate("p", SHORT)]
        assert outputs[-1] == expected.text
        assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(outputs))
        with step_per_command((await llm._running()).client.thread, num_free_steps=3):
            stream = llm.stream("p", SHORT)
            deltas = [(await anext(stream)).outputs[0]]
        deltas += [output.outputs[0] async for output in stream]
        assert "".join(delta.text for delta in deltas) == expected.text
        assert [token for delta in deltas for token in delta.token_ids] == expected.token_ids
        assert len(deltas) > 1

    run(test)


def test_chats() -> None:
    expected = whole("<user>hi\n<assistant>").outputs[0]

    async def test(llm: AsyncLLM) -> None:
        *_, last = [output async for output in llm.chat(HI, SHORT)]
        assert (last.prompt, last.finished) == ("<user>hi\n<assistant>", True)
        deltas = [output.outputs[0].text async for output in llm.stream_chat(HI, SHORT, template_kwargs={"x": 1})]
        assert "".join(deltas) == last.outputs[0].text == expected.text

    run(test)


def test_both_classes_have_the_same_methods_with_the_same_arguments() -> None:
    names = {"generate", "chat", "stream", "stream_chat", "beam_search", "encode", "embed", "classify"}
    names |= {"score", "close"}
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
        with step_per_command((await llm._running()).client.thread, num_free_steps=3):
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

    run(test)


@pytest.mark.parametrize("reads", [False, True])
def test_a_request_that_follows_an_aborted_one_of_the_same_id_gets_its_own_output(reads: bool) -> None:
    expected = whole("second").outputs[0].token_ids

    async def test(llm: AsyncLLM) -> None:
        for attempt in range(10):
            with contextlib.suppress(TimeoutError):
                async with (
                    asyncio.timeout(0.02 + 0.001 * attempt),  # at different times of a step
                    contextlib.aclosing(llm.generate("first", LONG, "r")) as first,
                ):
                    async for _ in first:
                        if not reads:
                            await asyncio.sleep(10)
            outputs = [output.outputs[0] async for output in llm.generate("second", SHORT, "r")]
            assert (outputs[-1].token_ids, outputs[-1].finish_reason) == (expected, "length")
            assert all(output.token_ids == expected[: len(output.token_ids)] for output in outputs)
        assert (await llm.stats()).num_running == 0

    run(test, step_s=0.002)


def test_closing_while_conversations_wait_for_a_thread_raises_usage_errors() -> None:
    async def test(llm: AsyncLLM) -> None:
        chats = (await llm._engine()).input_processor.chats
        may_end, has_begun = threading.Event(), asyncio.Event()
        loop, write = asyncio.get_running_loop(), chats.write

        def held(*args: Any, **options: Any) -> Any:
            loop.call_soon_threadsafe(has_begun.set)
            may_end.wait(20)
            return write(*args, **options)

        chats.write = held  # type: ignore[method-assign]
        asks = [asyncio.create_task(collect(llm.chat(HI, SHORT))) for _ in range(12)]
        await has_begun.wait()
        await llm.close()
        may_end.set()
        errors = await asyncio.gather(*asks, return_exceptions=True)
        assert all(isinstance(error, UsageError) for error in errors), errors

    run(test)


def test_what_a_score_raises_is_no_group() -> None:
    async def test(llm: AsyncLLM) -> None:
        with pytest.raises(RequestError, match="tokens"):
            await llm.score("x" * 300, "y")
        scoring = asyncio.create_task(llm.score("x", "y"))
        await asyncio.sleep(0)
        await llm.close()
        with pytest.raises(UsageError, match="closed"):
            await scoring

    run(test, step_s=0.05)


def test_a_dropped_one_ends_its_thread() -> None:
    async def main() -> None:
        llm = AsyncLLM.over(lambda: TextEngine(fake_core(), byte_inputs()))
        assert (await collect(llm.generate("p", SHORT)))[-1].finished
        del llm
        gc.collect()
        while any(thread.name == "pagoda-engine" for thread in threading.enumerate()):
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(main(), 30))


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


def test_pooled_prompts_on_both_classes() -> None:
    async def test(llm: AsyncLLM) -> None:
        embedded = await llm.embed("one")
        assert len(embedded.outputs.embedding) == embedded.outputs.hidden_size == 8
        results = [output async for output in llm.encode("one", pooling_task="embed")]
        assert len(results) == 1
        assert results[0].outputs.data.tolist() == embedded.outputs.embedding
        assert (await llm.score("one", "one")).outputs.score == pytest.approx(1, abs=1e-5)
        with pytest.raises(RequestError, match="does not support classify; it supports generate, embed, score"):
            await llm.classify("one")
        assert await asyncio.gather(*(llm.embed("one") for _ in range(3)))

    run(test)
    with LLM.over(lambda: TextEngine(fake_core(), byte_inputs())) as llm:
        first, second = llm.embed(["one", "two"])
        assert first.outputs.embedding != second.outputs.embedding
        assert llm.encode("one", pooling_task="embed")[0].outputs.data.tolist() == first.outputs.embedding
        scores = [output.outputs.score for output in llm.score("one", ["two", "one"])]
        expected = sum(a * b for a, b in zip(first.outputs.embedding, second.outputs.embedding, strict=True))
        assert scores == pytest.approx([expected, 1], abs=1e-5)
        assert llm.score(["one", "two"], ["one", "two"])[1].outputs.score == pytest.approx(1, abs=1e-5)
        for call, message in (
            (lambda: llm.classify("one"), "this model does not support classify"),
            (lambda: llm.score(["a", "b"], "c"), "data_1: 2 texts cannot be paired with 1"),
            (lambda: llm.score(5, "c"), "data_1 is int, expected a string"),  # type: ignore[arg-type]
            (lambda: llm.embed(["a", ""]), r"prompts\[1\]: the prompt is empty"),
            (lambda: llm.embed("a", pooling_params=SamplingParams()), "pooling_params is SamplingParams"),  # type: ignore[arg-type]
            (lambda: llm.embed("a", pooling_params=PoolingParams(task="classify")), "PoolingParams has 'classify'"),
            (lambda: llm.embed("a", prompt_name="query"), "prompt_name: 'query' is unknown"),
        ):
            with pytest.raises(RequestError, match=message):
                call()


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
