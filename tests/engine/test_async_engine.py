"""AsyncEngine over an engine on a thread: streams, cancellation, aborts, refusals, a dying engine."""

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from pagoda import RequestError, RequestOutput, SamplingParams, WorkerDied
from pagoda.base.outputs import Logprob
from pagoda.core.scheduler_output import EngineCoreOutputs, LogprobColumns, ModelRunnerOutput, SchedulerOutput
from pagoda.engine.async_engine import AsyncEngine
from pagoda.engine.clients.thread_client import ThreadClient
from pagoda.engine.executor import Executor
from pagoda.engine.outputs import output_processor
from pagoda.engine.outputs.mailbox import Mailbox
from pagoda.engine.outputs.output_processor import OutputKind, PromptLogprobs
from pagoda.engine.text_engine import TextEngine
from pagoda.executors.fake import FakeExecutor
from pagoda.llm import LLM
from tests.engine.step_per_command import step_per_command
from tests.fake_engine import MAX_LEN, byte_inputs, fake_core
from tests.generate import generate, prepare

SHORT = SamplingParams(max_tokens=8, seed=1, ignore_eos=True)
LONG = SamplingParams(max_tokens=240, seed=1, ignore_eos=True)


def run(test: Callable[[AsyncEngine], Awaitable[None]], executor: Executor | None = None, step_s: float = 0.0) -> None:
    """Run `test` on an AsyncEngine of its own."""

    async def main() -> None:
        client = ThreadClient(lambda: TextEngine(fake_core(executor, step_s=step_s), byte_inputs()), "test")
        await client.start()
        async with AsyncEngine(client, byte_inputs()) as llm:
            await test(llm)

    asyncio.run(asyncio.wait_for(main(), 30))


async def collect(llm: AsyncEngine, prompt: str, params: SamplingParams = SHORT, **more: Any) -> list[RequestOutput]:
    return [output async for output in generate(llm, prompt, params, **more)]


def held(llm: AsyncEngine) -> contextlib.AbstractContextManager[None]:
    """In the block, let the engine compute three steps, and one for each command."""
    client = llm._client
    assert isinstance(client, ThreadClient)
    return step_per_command(client.thread, num_free_steps=3)


async def until_running(llm: AsyncEngine, count: int) -> None:
    """Wait until so many requests run; if none, no block is in use."""
    client = llm._client
    assert isinstance(client, ThreadClient)
    while (stats := await client.stats()).num_running != count or (not count and stats.kv_usage):
        await asyncio.sleep(0.005)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def expected_text(prompt: str, params: SamplingParams = SHORT) -> str:
    with LLM.over(lambda: TextEngine(fake_core(), byte_inputs())) as llm:
        return llm.generate(prompt, params)[0].outputs[0].text


def test_concurrent_requests_get_the_outputs_they_get_alone() -> None:
    prompts = [f"prompt {i}" for i in range(30)]
    expected = [expected_text(prompt) for prompt in prompts]

    async def test(llm: AsyncEngine) -> None:
        results = await asyncio.gather(*(collect(llm, prompt) for prompt in prompts))
        assert [outputs[-1].outputs[0].text for outputs in results] == expected
        assert all(outputs[-1].finished for outputs in results)
        assert [outputs[-1].prompt for outputs in results] == prompts

    run(test)


@pytest.mark.parametrize("kind", list(OutputKind))
def test_deltas_join_to_the_text_and_the_other_kinds_end_with_it(kind: OutputKind) -> None:
    expected = expected_text("p")

    async def test(llm: AsyncEngine) -> None:
        outputs = await collect(llm, "p", kind=kind)
        if kind is OutputKind.DELTA:
            assert "".join(output.outputs[0].text for output in outputs) == expected
            assert sum(len(output.outputs[0].token_ids) for output in outputs) == 8
        else:
            assert outputs[-1].outputs[0].text == expected
            assert kind is OutputKind.CUMULATIVE or len(outputs) == 1

    run(test)


def test_a_stop_string_frees_the_engine() -> None:
    async def test(llm: AsyncEngine) -> None:
        tokens = (await collect(llm, "go", LONG))[-1].outputs[0].token_ids
        at = next(i for i, token in enumerate(tokens) if 33 <= token < 127)
        stop = chr(tokens[at])
        params = SamplingParams(max_tokens=240, seed=1, stop=stop, ignore_eos=True)  # type: ignore[arg-type]
        last = (await collect(llm, "go", params))[-1].outputs[0]
        assert (last.finish_reason, last.stop_reason) == ("stop", stop)
        assert last.token_ids == tokens[: at + 1]
        await until_running(llm, 0)

    run(test)


def test_leaving_the_iteration_aborts_the_request() -> None:
    async def test(llm: AsyncEngine) -> None:
        with held(llm):
            async with contextlib.aclosing(generate(llm, "p", LONG)) as outputs:
                async for _ in outputs:
                    break
            await until_running(llm, 0)
        assert (await collect(llm, "next"))[-1].finished

    run(test)


def test_cancelling_the_reader_aborts_the_request() -> None:
    async def test(llm: AsyncEngine) -> None:
        with held(llm):
            reader = asyncio.create_task(collect(llm, "p", LONG))
            await until_running(llm, 1)
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
            await until_running(llm, 0)

    run(test)


def test_an_abort_ends_the_readers_iteration() -> None:
    async def test(llm: AsyncEngine) -> None:
        with held(llm):
            reader = asyncio.create_task(collect(llm, "p", LONG, request_id="mine"))
            await until_running(llm, 1)
            assert await llm.abort(["mine", "unknown"]) == ["mine"]
        last = (await reader)[-1]
        assert last.finished
        assert last.outputs[0].finish_reason == "abort"
        assert await llm.abort(["mine"]) == []

    run(test)


def test_bad_requests_are_refused_before_they_run() -> None:
    async def test(llm: AsyncEngine) -> None:
        with pytest.raises(RequestError, match="empty"):
            await collect(llm, "")
        with pytest.raises(RequestError, match="vocabulary"):
            await collect(llm, "x", SamplingParams(stop_token_ids=[999]))  # type: ignore[arg-type]
        request = await prepare(llm, "x", LONG, "same")
        with held(llm):
            stream = llm.stream(request)
            await anext(stream)
            with pytest.raises(RequestError, match="'same' is in use"):
                await anext(llm.stream(await prepare(llm, "y", SHORT, "same")))
            await stream.aclose()
        assert (await collect(llm, "y", request_id="same"))[-1].finished

    run(test)


def test_an_id_that_is_used_again_before_the_last_output_was_read_is_the_later_requests() -> None:
    expected = expected_text("later", LONG)

    async def test(llm: AsyncEngine) -> None:
        first = llm.stream(await prepare(llm, "first", SHORT, "same"))
        await anext(first)
        await until(lambda: "same" not in llm._outputs)
        later = llm.stream(await prepare(llm, "later", LONG, "same"))
        texts = [(await anext(later)).outputs[0].text]
        await first.aclose()
        texts += [output.outputs[0].text async for output in later]
        assert "".join(texts) == expected

    run(test, step_s=0.002)


class DyingExecutor(FakeExecutor):
    def submit(self, output: SchedulerOutput) -> "Future[ModelRunnerOutput]":
        if self.num_steps == 4:
            self.shutdown()
        return super().submit(output)


def test_a_dead_engine_fails_every_reader_and_later_requests() -> None:
    async def test(llm: AsyncEngine) -> None:
        results = await asyncio.gather(*(collect(llm, p, LONG) for p in ("a", "b")), return_exceptions=True)
        assert [type(result) for result in results] == [WorkerDied, WorkerDied]
        with pytest.raises(WorkerDied):
            await collect(llm, "c")

    run(test, DyingExecutor(64, MAX_LEN, vocab_size=258))


def test_shutting_down_ends_what_is_in_flight() -> None:
    async def test(llm: AsyncEngine) -> None:
        with held(llm):
            reader = asyncio.create_task(collect(llm, "p", LONG))
            await until_running(llm, 1)
            await llm.shutdown()
        assert (await reader)[-1].outputs[0].finish_reason == "abort"
        await llm.shutdown()

    run(test)


def test_text_services() -> None:
    async def test(llm: AsyncEngine) -> None:
        assert await llm.text.encode("é") == list("é".encode())
        assert await llm.text.encode("x" * 5000) == [120] * 5000
        assert llm.text.decode([104, 105, 257]) == "hi<eos>"
        assert await llm.text.token_strings([104, 257, 0xC3]) == ["h", "<eos>", "Ã"]
        rendered = await llm.text.render_chat([{"role": "user", "content": "hi"}])
        assert rendered.text == "<user>hi\n<assistant>"
        assert llm.text.tokenizer_facts()["vocab_size"] == 258
        assert await llm.reset_prefix_cache()

    run(test)


def test_the_logprobs_of_a_long_prompt_delay_no_other_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are converted in pieces, between which the loop turns, after the tokens of that step are delivered."""
    size = 250
    columns = LogprobColumns(np.ones((size, 21), np.int32), np.zeros((size, 21), np.float32), np.ones(size, np.int32))
    events: list[str] = []
    plain_entry, plain_put = output_processor.LogprobTexts.entry, Mailbox.put

    def entry(*of: Any) -> dict[int, Logprob]:
        if events[-1:] != ["convert"]:
            events.append("convert")
        return plain_entry(*of)

    def put(mailbox: Mailbox, output: RequestOutput) -> None:
        events.append(f"put {output.request_id}")
        plain_put(mailbox, output)

    async def turn() -> None:
        while True:
            events.append("turn")
            await asyncio.sleep(0)

    async def test(llm: AsyncEngine) -> None:
        plain = llm._client.next_outputs

        async def with_logprobs() -> EngineCoreOutputs:
            outputs = await plain()
            if 2 not in outputs.handles.tolist():
                return outputs
            events.append("step")
            return dataclasses.replace(outputs, prompt_logprobs={2: columns})

        llm._client.next_outputs = with_logprobs  # type: ignore[method-assign]
        monkeypatch.setattr(output_processor.LogprobTexts, "entry", entry)
        monkeypatch.setattr(Mailbox, "put", put)
        turning = asyncio.create_task(turn())
        params = SamplingParams(max_tokens=100, ignore_eos=True, detokenize=False)
        asking = dataclasses.replace(params, max_tokens=1, prompt_logprobs=20)
        with held(llm):
            other = asyncio.create_task(collect(llm, "x", params, request_id="other"))
            await until(lambda: "put other" in events)
            asked = asyncio.create_task(collect(llm, "y" * size, asking, request_id="asking"))
            await until(lambda: "asking" in llm._outputs)
        (output,) = await asked
        assert len(output.prompt_logprobs or []) == size
        await other
        turning.cancel()

    run(test, step_s=0.002)
    (step,) = (at for at, event in enumerate(events) if event == "step")
    after = [event for event in events[step:] if event != "turn"]
    assert after.index("put other") < after.index("convert"), "it waited for them"
    assert events.count("convert") >= 4, "pieces without a turn of the loop between them count as one"


def test_log_probabilities_of_many_prompts_are_converted_one_piece_per_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    size, num_requests = 129, 12
    columns = LogprobColumns(np.ones((size - 1, 21), np.int32), np.zeros((size - 1, 21), np.float32), np.ones(size - 1))
    turn, pieces = 0, list[int]()
    plain_convert = PromptLogprobs.convert_some

    def convert(self: PromptLogprobs) -> bool:
        pieces.append(turn)
        return plain_convert(self)

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    async def test(llm: AsyncEngine) -> None:
        plain = llm._client.next_outputs

        async def with_logprobs() -> EngineCoreOutputs:
            outputs = await plain()
            return dataclasses.replace(outputs, prompt_logprobs=dict.fromkeys(outputs.handles.tolist(), columns))

        llm._client.next_outputs = with_logprobs  # type: ignore[method-assign]
        monkeypatch.setattr(PromptLogprobs, "convert_some", convert)
        counting = asyncio.create_task(count_turns())
        asking = SamplingParams(max_tokens=1, ignore_eos=True, prompt_logprobs=20)
        prompts = ["y" * size] * num_requests
        each = await asyncio.gather(*(collect(llm, one, asking, request_id=f"r{i}") for i, one in enumerate(prompts)))
        assert [len(outputs[-1].prompt_logprobs or []) for outputs in each] == [size] * num_requests
        counting.cancel()

    run(test)
    assert len(pieces) == 2 * num_requests
    assert len(set(pieces)) == len(pieces)


def test_log_probabilities_that_cannot_be_read_end_their_request_alone() -> None:
    torn = LogprobColumns(np.ones((1, 3), np.int32), np.zeros((1, 3), np.float32), np.ones(3, np.int32))

    async def test(llm: AsyncEngine) -> None:
        plain = llm._client.next_outputs

        async def with_torn() -> EngineCoreOutputs:
            outputs = await plain()
            return dataclasses.replace(outputs, prompt_logprobs={1: torn} if 1 in outputs.handles.tolist() else {})

        llm._client.next_outputs = with_torn  # type: ignore[method-assign]
        params = SamplingParams(max_tokens=240, ignore_eos=True, prompt_logprobs=2)
        broken, other = await asyncio.gather(collect(llm, "first", params), collect(llm, "second", LONG))
        assert "the log-probabilities of the prompt could not be processed" in (broken[-1].error or "")
        assert (broken[-1].finished, broken[-1].outputs[0].finish_reason) == (True, "error")
        assert len(other[-1].outputs[0].token_ids) == 240
        assert llm.died is None
        await until_running(llm, 0)

    run(test)
