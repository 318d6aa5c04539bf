"""LLM: batches in order, one bad prompt among good ones, streams, Ctrl-C, closing."""

import asyncio
import functools
import inspect
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

import pagoda
from pagoda import (
    LLM,
    AsyncLLM,
    BeamSearchParams,
    ConfigError,
    LoRARequest,
    PoolingParams,
    RequestError,
    RequestOutput,
    SamplingParams,
    WorkerDied,
)
from pagoda.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from pagoda.engine.inputs.input_processor import InputProcessor
from pagoda.engine.text_engine import TextEngine
from pagoda.executors.fake import FakeExecutor
from tests.cached_models import cached_model
from tests.fake_engine import MAX_LEN, byte_inputs, fake_core

SHORT = SamplingParams(max_tokens=8, seed=1, ignore_eos=True)


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM.over(lambda: TextEngine(fake_core(), byte_inputs())) as llm:
        yield llm


def wait_until_idle(llm: LLM) -> None:
    """Wait until no request is left in the engine and no step in flight."""
    while llm.llm_engine.has_unfinished_requests() or llm.llm_engine.core.has_unfinished_requests():
        time.sleep(0.001)


def text_of(output: RequestOutput) -> str:
    return output.outputs[0].text


def test_outputs_are_in_the_order_of_prompts_and_do_not_depend_on_the_batch(llm: LLM) -> None:
    prompts = [f"prompt number {i}" * (1 + i % 4) for i in range(20)]
    params = [SamplingParams(max_tokens=3 + i % 7, seed=i, ignore_eos=True) for i in range(20)]
    together = llm.generate(prompts, params)  # type: ignore[arg-type]
    assert [o.prompt for o in together] == prompts
    assert [len(o.outputs[0].token_ids) for o in together] == [p.max_tokens for p in params]
    for prompt, param, output in zip(prompts, params, together, strict=True):
        assert llm.generate(prompt, param)[0].outputs[0].token_ids == output.outputs[0].token_ids


@pytest.mark.parametrize("prompt", ["text", [1, 2, 3], {"prompt": "text"}, {"prompt_token_ids": [1, 2]}])
def test_a_single_prompt_is_a_batch_of_one(llm: LLM, prompt: object) -> None:
    outputs = llm.generate(prompt, SHORT)  # type: ignore[arg-type]
    assert len(outputs) == 1
    assert outputs[0].finished
    assert len(outputs[0].outputs[0].token_ids) == 8


@pytest.mark.parametrize("num_outputs", [1, 4])
def test_outputs_that_outgrow_the_kv_cache_keep_their_texts(num_outputs: int) -> None:
    params = SamplingParams(n=num_outputs, max_tokens=150, seed=1, ignore_eos=True)
    with LLM.over(lambda: TextEngine(fake_core(num_blocks=6), byte_inputs())) as llm:
        (output,) = llm.generate("x" * 30, params)
    assert output.error is None
    assert [part.finish_reason for part in output.outputs] == ["length"] * num_outputs
    assert all(part.token_ids and part.text for part in output.outputs)


@pytest.mark.parametrize("depth", [2, 3])
def test_a_stop_string_ends_a_request_with_steps_in_flight(llm: LLM, depth: int) -> None:
    """It is found in the text when further tokens are on their way: they are dropped."""
    plain = llm.generate([f"prompt {i}" for i in range(6)], SamplingParams(max_tokens=60, seed=3, ignore_eos=True))
    stops = [text_of(output)[10 + i : 12 + i] for i, output in enumerate(plain)]
    params = [SamplingParams(max_tokens=60, seed=3, ignore_eos=True, stop=(stop,)) for stop in stops]
    prompts = [f"prompt {i}" for i in range(6)]
    expected = llm.generate(prompts, params)
    with LLM.over(lambda: TextEngine(fake_core(depth=depth), byte_inputs())) as ahead:
        got = ahead.generate(prompts, params)
        assert (
            ahead.generate("next", SHORT)[0].outputs[0].token_ids == llm.generate("next", SHORT)[0].outputs[0].token_ids
        )
    assert [output.outputs[0].finish_reason for output in expected] == ["stop"] * 6
    for one, other in zip(expected, got, strict=True):
        assert one.outputs == other.outputs


def test_no_prompts_no_outputs(llm: LLM) -> None:
    assert llm.generate([]) == []


def test_one_bad_prompt_does_not_hurt_the_others(llm: LLM) -> None:
    outputs = llm.generate(["good", "", "x" * MAX_LEN, [300], "also good"], SHORT)
    assert [o.error is None for o in outputs] == [True, False, False, False, True]
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "error", "error", "length"]
    assert "empty" in (outputs[1].error or "")
    assert all(o.finished for o in outputs)
    assert outputs[1].prompt == ""


def test_a_single_bad_prompt_raises(llm: LLM) -> None:
    with pytest.raises(RequestError, match="empty"):
        llm.generate("")


def test_lists_must_match(llm: LLM) -> None:
    with pytest.raises(RequestError, match="1 sampling_params for 2 prompts"):
        llm.generate(["a", "b"], [SHORT])
    with pytest.raises(RequestError, match="1 priority for 2 prompts"):
        llm.generate(["a", "b"], SHORT, priority=[1])


_CHAT = [{"role": "user", "content": "hi"}]
_CALLS: dict[str, tuple[object, ...]] = {
    "generate": ("a",),
    "chat": (_CHAT,),
    "stream": ("a",),
    "stream_chat": (_CHAT,),
    "beam_search": ("a", BeamSearchParams(beam_width=2, max_tokens=2)),
    "encode": ("a",),
    "embed": ("a",),
    "classify": ("a",),
    "score": ("a", "b"),
}
"""Every method that starts requests of texts -> arguments."""


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """The priority, salt and adapter of each request, none of which runs."""
    seen: list[tuple[object, ...]] = []

    def make_request(self: InputProcessor, *args: object, **given: object) -> None:
        seen.append((given["priority"], given["cache_salt"], given["lora"]))
        raise RequestError("it was seen")

    monkeypatch.setattr(InputProcessor, "make_request", make_request)
    for name in ("find_adapter", "remembered_adapter"):
        monkeypatch.setattr(InputProcessor, name, lambda _, lora_request: lora_request)
    return seen


OPTIONS = {"priority": 7, "cache_salt": "mine", "lora_request": LoRARequest("pirate", 1, "folder")}


@pytest.mark.parametrize("method", _CALLS)
def test_every_request_has_the_priority_salt_and_adapter_of_its_call(
    llm: LLM, seen: list[tuple[object, ...]], method: str
) -> None:
    with pytest.raises(RequestError, match="it was seen"):
        getattr(llm, method)(*_CALLS[method], **OPTIONS)
    assert set(seen) == {tuple(OPTIONS.values())}


@pytest.mark.parametrize("method", _CALLS)
def test_async_requests_have_them_too(seen: list[tuple[object, ...]], method: str) -> None:
    async def call() -> None:
        async with AsyncLLM.over(lambda: TextEngine(fake_core(), byte_inputs())) as llm:
            made = getattr(llm, method)(*_CALLS[method], **OPTIONS)
            if not inspect.isasyncgen(made):
                await made
            async for _ in made:
                pass

    with pytest.raises(RequestError, match="it was seen"):
        asyncio.run(call())
    assert set(seen) == {tuple(OPTIONS.values())}


def test_priorities_and_adapters_may_be_one_for_each(llm: LLM) -> None:
    calls = (llm.generate, llm.encode, llm.embed, llm.classify)
    for call in (*calls, functools.partial(llm.beam_search, params=BeamSearchParams(beam_width=2, max_tokens=2))):
        for options in ({"priority": [1]}, {"priority": "high"}, {"lora_request": [None]}):
            with pytest.raises(RequestError, match=next(iter(options))):
                call(["a", "b"], **options)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda llm: llm.generate(None), "prompts is NoneType"),
        (lambda llm: llm.generate(5), "prompts is int"),
        (lambda llm: llm.generate({"a"}), "prompts is set"),
        (lambda llm: llm.generate(["a", {"b"}]), r"prompts\[1\] is set"),
        (lambda llm: llm.beam_search(5, BeamSearchParams(beam_width=2, max_tokens=2)), "prompts is int"),
        (lambda llm: llm.generate("a", {"temperature": 0}), "sampling_params is dict"),
        (lambda llm: llm.generate("a", PoolingParams()), "sampling_params is PoolingParams"),
        (lambda llm: llm.chat("hello"), "messages is str"),
    ],
    ids=["no prompt", "number", "set", "set in a list", "beams of a number", "dict", "pooling", "chat of text"],
)
def test_arguments_of_another_kind_are_refused_by_name(llm: LLM, call: Callable[[LLM], object], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        call(llm)


def test_n_returns_several_sequences(llm: LLM) -> None:
    (output,) = llm.generate(["a"], SamplingParams(n=3, seed=5, max_tokens=6, ignore_eos=True))
    alone = [llm.generate("a", SamplingParams(seed=5 + i, max_tokens=6, ignore_eos=True))[0] for i in range(3)]
    assert [part.index for part in output.outputs] == [0, 1, 2]
    assert [part.token_ids for part in output.outputs] == [one.outputs[0].token_ids for one in alone]


def test_a_stop_string_ends_the_request_in_the_engine_too(llm: LLM) -> None:
    letters = SamplingParams(max_tokens=60, seed=3, allowed_token_ids=None, ignore_eos=True)
    tokens = llm.generate("go", letters)[0].outputs[0].token_ids
    printable = next(i for i, token in enumerate(tokens) if 33 <= token < 127)
    stop = chr(tokens[printable])
    (output,) = llm.generate(["go"], SamplingParams(max_tokens=60, seed=3, stop=stop, ignore_eos=True))  # type: ignore[arg-type]
    assert output.outputs[0].stop_reason == stop
    assert output.outputs[0].token_ids == tokens[: printable + 1]
    assert stop not in text_of(output)
    wait_until_idle(llm)


def test_chat_renders_one_or_many_conversations(llm: LLM) -> None:
    hi, bye = [{"role": "user", "content": "hi"}], [{"role": "user", "content": "bye"}]
    (one,) = llm.chat(hi, SHORT)
    assert one.prompt == "<user>hi\n<assistant>"
    assert [o.prompt for o in llm.chat([hi, bye], SHORT)] == ["<user>hi\n<assistant>", "<user>bye\n<assistant>"]
    (templated,) = llm.chat(hi, SHORT, chat_template="{{ messages[0].content }}", add_generation_prompt=False)
    assert templated.prompt == "hi"
    with pytest.raises(RequestError, match="messages is empty"):
        llm.chat([], SHORT)
    good, bad = llm.chat([hi, [{"role": "user"}]], SHORT)  # type: ignore[list-item]
    assert (good.error, bad.error) == (None, "messages[0] has no content")


def test_a_stream_yields_what_generate_returns(llm: LLM) -> None:
    deltas = list(llm.stream("a stream", SHORT))
    (whole,) = llm.generate("a stream", SHORT)
    assert "".join(map(text_of, deltas)) == text_of(whole)
    assert [t for d in deltas for t in d.outputs[0].token_ids] == whole.outputs[0].token_ids
    assert [d.finished for d in deltas] == [False] * 7 + [True]


def test_leaving_a_stream_ends_its_request(llm: LLM) -> None:
    stream = llm.stream("a stream", SamplingParams(max_tokens=200, ignore_eos=True))
    assert len(list(itertools.islice(stream, 3))) == 3
    stream.close()  # type: ignore[attr-defined]
    wait_until_idle(llm)
    assert text_of(llm.generate("next", SHORT)[0]) is not None


def test_streams_and_batches_may_interleave(llm: LLM) -> None:
    expected = [text_of(llm.generate(p, SHORT)[0]) for p in ("one", "two", "three")]
    one, two = llm.stream("one", SHORT), llm.stream("two", SHORT)
    texts = ["", "", ""]
    texts[0] += text_of(next(one))
    texts[1] += text_of(next(two))
    texts[2] = text_of(llm.generate("three", SHORT)[0])
    texts[0] += "".join(map(text_of, one))
    texts[1] += "".join(map(text_of, two))
    assert texts == expected


class InterruptingExecutor(FakeExecutor):
    """Presses Ctrl-C in the middle of its third step."""

    def submit(self, output: SchedulerOutput) -> "Future[ModelRunnerOutput]":
        if self.num_steps == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return super().submit(output)


def test_ctrl_c_ends_the_batch_and_not_the_llm() -> None:
    core = fake_core(InterruptingExecutor(64, MAX_LEN, vocab_size=258))
    with LLM.over(lambda: TextEngine(core, byte_inputs())) as llm:
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b"], SamplingParams(max_tokens=100, ignore_eos=True))
        wait_until_idle(llm)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert len(llm.generate(["a", "b"], SHORT)) == 2


def test_another_thread_may_use_it(llm: LLM) -> None:
    found: list[RequestOutput] = []
    thread = threading.Thread(target=lambda: found.extend(llm.generate(["a"], SHORT)))
    thread.start()
    thread.join()
    assert found[0].finished


class DyingExecutor(FakeExecutor):
    def submit(self, output: SchedulerOutput) -> "Future[ModelRunnerOutput]":
        if self.num_steps == 2:
            self.shutdown()
        return super().submit(output)


def test_a_dead_worker_is_an_error_and_closing_is_idempotent() -> None:
    llm = LLM.over(lambda: TextEngine(fake_core(DyingExecutor(64, MAX_LEN, vocab_size=258)), byte_inputs()))
    with pytest.raises(WorkerDied):
        llm.generate(["a"], SHORT)
    llm.close()
    llm.close()


def test_unknown_models_and_options_are_named() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs"):
        LLM(max_num_sequences=3)
    with pytest.raises(ConfigError, match="smollm2-135m"):
        LLM("smollm2-135")


def test_importing_pagoda_imports_neither_torch_nor_numpy() -> None:
    heavy = "[m for m in ('torch', 'numpy', 'tokenizers') if m in sys.modules]"
    code = f"import sys, pagoda; pagoda.SamplingParams(); print({heavy})"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_public_names() -> None:
    assert {"LLM", "AsyncLLM", "SamplingParams", "PoolingParams", "EngineConfig"} <= set(pagoda.__all__)
    for name in pagoda.__all__:
        assert getattr(pagoda, name).__name__ == name
    assert set(pagoda.__all__) <= set(dir(pagoda))
    with pytest.raises(AttributeError, match="nothing_here"):
        _ = pagoda.nothing_here  # type: ignore[attr-defined]


def test_smollm2_answers() -> None:
    cached_model("smollm2-135m")
    with LLM(max_num_seqs=4, max_model_len=512, kv_cache_memory=64 << 20) as llm:
        france, bad = llm.generate(["The capital of France is", ""], SamplingParams(max_tokens=4, temperature=0.0))
        assert text_of(france).startswith(" Paris")
        assert bad.error is not None
        messages = [{"role": "user", "content": "What is the capital of Italy? Answer with one word."}]
        deltas = list(llm.stream_chat(messages, SamplingParams(max_tokens=20, temperature=0.0)))
        assert "Rome" in "".join(map(text_of, deltas))
        assert deltas[-1].finished


def test_a_closed_llm_s_weights_need_no_garbage_collection() -> None:
    """Neither the kernels that hold them nor the recorded forward refer to themselves."""
    program = """
import gc, sys
from pagoda import LLM, SamplingParams
from pagoda.kernels.linear.packed import PackedWeight
def count():
    return sum(isinstance(one, PackedWeight) for one in gc.get_objects())
gc.disable()
with LLM(sys.argv[1], max_model_len=64, kv_cache_memory="16MiB", kernels="native") as llm:
    llm.generate("word", SamplingParams(max_tokens=2))
    held = count()
del llm
print(held, count())
"""
    command = [sys.executable, "-c", program, str(cached_model("smollm2-135m").path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    held, left = map(int, done.stdout.split())
    assert held > 100
    assert left == 0


@pytest.mark.slow
def test_five_llms_in_a_row_hold_no_more_memory_than_one() -> None:
    """Each has threads of its own, whose scratch is freed with them."""
    program = """
import gc, sys
from pathlib import Path
from pagoda import LLM, SamplingParams
gc.disable()
for _ in range(5):
    with LLM(sys.argv[1], max_model_len=2048, kv_cache_memory="64MiB") as llm:
        llm.generate("word " * 1500, SamplingParams(max_tokens=2))
    del llm
    print(int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) >> 10)
"""
    command = [sys.executable, "-c", program, str(cached_model("smollm2-135m").path)]
    done = subprocess.run(command, capture_output=True, text=True)
    held = [int(mib) for mib in done.stdout.split()]
    assert len(held) == 5, done.stderr
    assert held[-1] - held[0] < 32, held
