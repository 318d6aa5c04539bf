"""What scripts written for vLLM's Python classes use, over an engine without a model."""

import asyncio
import copy
import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import pagoda
from pagoda import (
    LLM,
    AsyncLLM,
    ConfigError,
    EngineConfig,
    RequestError,
    RequestOutputKind,
    SamplingParams,
    TokensPrompt,
    UsageError,
)
from pagoda.base.config import PARTS
from pagoda.base.config_options import option_names
from pagoda.core.kv import KVCacheManager
from pagoda.engine.inputs.callers_tokenizer import CallersTokenizer
from pagoda.engine.inputs.chat_prompts import ChatFields, ChatOptions, chat_options
from pagoda.engine.inputs.input_processor import InputProcessor
from pagoda.engine.text_engine import TextEngine
from pagoda.engine.transcription.transcriber import TranscriptionFields, TranscriptionOptions
from pagoda.vllm_names import METHODS, MODULES
from tests.engine.step_per_command import step_per_command
from tests.fake_engine import byte_inputs, fake_core

SHORT = SamplingParams(max_tokens=4, seed=1, ignore_eos=True)


def inputs_with_defaults(**sampling: object) -> InputProcessor:
    inputs = byte_inputs()
    inputs.default_sampling = sampling
    return inputs


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM.over(lambda: TextEngine(fake_core(), inputs_with_defaults(temperature=0.3, max_tokens=5))) as llm:
        yield llm


def test_calls_take_what_vllms_take(llm: LLM) -> None:
    one = llm.generate(["a", TokensPrompt(prompt_token_ids=[1, 2])], SHORT, False, None, [1, 2])
    assert [len(output.outputs[0].token_ids) for output in one] == [4, 4]
    assert llm.generate("a", SHORT, priority=1)[0].finished
    messages = [{"role": "user", "content": "hi"}]
    chat = llm.chat(
        messages, SHORT, False, priority=3, chat_template_kwargs={"x": 1}, chat_template_content_format="auto"
    )
    assert len(chat[0].outputs[0].token_ids) == 4
    with pytest.raises(TypeError, match="chat has no option 'chat_templat'; did you mean 'chat_template'?"):
        llm.chat(messages, SHORT, chat_templat="x")


def test_the_models_own_sampling_parameters_are_the_default(llm: LLM) -> None:
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.3, max_tokens=5)
    (output,) = llm.generate("a")
    assert len(output.outputs[0].token_ids) <= 5
    assert output.finished


def test_parameters_that_were_changed_are_checked_together_when_they_are_used(llm: LLM) -> None:
    params = SHORT.clone()
    params.max_tokens = 2
    assert len(llm.generate("a", params)[0].outputs[0].token_ids) == 2
    params.min_tokens = 3
    with pytest.raises(ValueError, match="min_tokens=3"):
        llm.generate("a", params)


def test_logprobs_of_minus_one_are_as_many_as_the_limit_allows(llm: LLM) -> None:
    inputs = llm.llm_engine.input_processor
    prepared = inputs.params.prepare(SamplingParams(logprobs=-1, prompt_logprobs=-1)).params
    assert isinstance(prepared, SamplingParams)
    assert prepared.logprobs == prepared.prompt_logprobs == inputs.limits.max_logprobs == 20


def test_the_engine_can_be_asked_and_reset(llm: LLM) -> None:
    llm.generate("the same prompt " * 8, SHORT)
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    assert metrics["vllm:prefix_cache_queries"].value > 0
    assert metrics["vllm:num_requests_running"].kind == "gauge"
    assert llm.reset_prefix_cache() is True


def test_the_tokenizer_has_the_names_of_transformers(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    ids = llm.llm_engine.input_processor.tokenizer.encode("hello")
    assert tokenizer("hello").input_ids == tokenizer.encode("hello") == ids
    assert tokenizer(["hello", "a"], truncation=True, max_length=2)["attention_mask"][0] == [1, 1]
    assert tokenizer.decode(ids) == tokenizer.batch_decode([ids])[0] == "hello"
    assert (tokenizer.eos_token_id, len(tokenizer)) == (
        tokenizer.facts.eos_token_ids[0],
        tokenizer.vocab_size,
    )
    messages = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str)
    assert "hi" in text
    assert (
        tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        == llm.chat(messages, SHORT)[0].prompt_token_ids
    )


def test_the_tokenizer_can_be_copied_and_refuses_what_it_does_not_do(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert copy.copy(tokenizer).encode("hello") == tokenizer.encode("hello")
    with pytest.raises(AttributeError):
        CallersTokenizer.__new__(CallersTokenizer).no_such_name  # noqa: B018
    messages = [{"role": "user", "content": "hi"}]
    ids = tokenizer.apply_chat_template(messages)
    asked = tokenizer.apply_chat_template(messages, return_dict=True)
    assert asked == {"input_ids": ids, "attention_mask": [1] * len(ids)}
    with pytest.raises(RequestError, match="return_tensors: ids are lists here"):
        tokenizer.apply_chat_template(messages, return_tensors="pt")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="truncation: the ids come as they are"):
        tokenizer.apply_chat_template(messages, truncation=True, max_length=2)
    assert tokenizer.apply_chat_template(messages, padding=False, max_length=None) == ids
    with llm._thread.entered(), pytest.raises(UsageError, match="in use by the same thread"):
        tokenizer.apply_chat_template(messages)


def test_parameters_that_change_while_prompts_are_read_do_not_change_the_call(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SHORT.clone()
    inputs = llm.llm_engine.input_processor
    read = inputs.prompts.read

    def reading(*args: Any, **named: Any) -> Any:
        params.max_tokens = 1
        return read(*args, **named)

    monkeypatch.setattr(inputs.prompts, "read", reading)
    assert [len(output.outputs[0].token_ids) for output in llm.generate(["a", "b"], params)] == [4, 4]


@pytest.mark.parametrize("prompt", ["", [10**6]], ids=["empty", "out of the vocabulary"])
def test_errors_of_prompts_are_value_errors(llm: LLM, prompt: Any) -> None:
    with pytest.raises(ValueError, match=r"empty|vocabulary") as caught:
        llm.generate(prompt, SHORT)
    assert isinstance(caught.value, RequestError)


def test_engine_args_and_other_names_of_vllm() -> None:
    args = pagoda.AsyncEngineArgs(model="smollm2-135m", max_num_seqs=3, disable_log_requests=True)
    assert args.create_engine_config().scheduler.max_num_seqs == 3
    assert isinstance(AsyncLLM.from_engine_args(args), AsyncLLM)
    assert pagoda.EmbeddingRequestOutput is pagoda.PoolingRequestOutput
    assert isinstance(args, pagoda.EngineArgs)
    assert pagoda.EngineArgs("smollm2-135m").model == "smollm2-135m"
    assert pagoda.AsyncLLMEngine is AsyncLLM
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", pagoda.__version__)
    assert {"TokensPrompt", "TextPrompt", "RequestOutputKind", "LLMEngine"} <= set(pagoda.__all__)


def test_engine_args_hold_what_was_given() -> None:
    """They may be changed and made into a dictionary; what was not given stays the engine's to decide."""
    args = pagoda.EngineArgs("smollm2-135m", kv_cache_memory="1GiB", download_dir="/models")
    args.max_num_seqs = 3
    assert {name: value for name, value in asdict(args).items() if value is not None} == {
        "model": "smollm2-135m",
        "kv_cache_memory": "1GiB",
        "cache_dir": "/models",
        "max_num_seqs": 3,
    }
    config = args.create_engine_config()
    assert config == EngineConfig.for_engine(**asdict(args))
    assert config.cache.kv_cache_memory == 1 << 30
    assert config.given == ("cache_dir", "kv_cache_memory", "max_num_seqs", "model")
    assert replace(args, max_num_seqs=4).max_num_seqs == 4
    with pytest.raises(AttributeError):
        args.max_num_seq = 4  # type: ignore[attr-defined]
    for options, said in (
        ({"max_num_seq": 4}, "max_num_seqs"),
        ({"port": 1}, "pagoda serve"),
        ({"prefill.admit_whole_prompt": True}, r"write prefill=\{'admit_whole_prompt': ...\}"),
    ):
        with pytest.raises(ConfigError, match=said):
            pagoda.EngineArgs(**options)


@pytest.mark.parametrize("called", [pagoda.EngineArgs, LLM, AsyncLLM, AsyncLLM.create])
def test_signatures_name_every_option_of_an_engine(called: Any) -> None:
    engine = [kind for part, kind in PARTS.items() if part != "server"]
    names = {name for kind in engine for name in option_names(kind) if "." not in name}
    assert set(inspect.signature(called).parameters) == names


def test_signatures_name_every_option_of_a_conversation_and_of_a_transcription() -> None:
    names = dict.fromkeys(get_type_hints(ChatFields))
    assert chat_options(names) == ChatOptions(**dict.fromkeys(item.name for item in fields(ChatOptions)))
    assert get_type_hints(TranscriptionFields) == get_type_hints(TranscriptionOptions)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_vllms_modules_hold_names_of_pagoda(module: str) -> None:
    scope: dict[str, Any] = {}
    exec(f"import pagoda.{module}\nfrom pagoda.{module} import *", scope)
    assert {name: scope[name] for name in MODULES[module].split()} == {
        name: getattr(pagoda, name) for name in MODULES[module].split()
    }


def test_vllms_modules_are_made_when_they_are_imported() -> None:
    code = "import sys, pagoda; assert not {'pagoda.llm', 'pagoda.lora', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("from pagoda import GuidedDecodingParams", "pagoda has no GuidedDecodingParams: use pagoda.StructuredOutputs"),
        ("from pagoda.sampling_params import GuidedDecodingParams", "use pagoda.StructuredOutputsParams"),
        ("from pagoda.utils import FlexibleArgumentParser", "use argparse, and LLM"),
        ("from pagoda.model_executor.models import ModelRegistry", "docs/howto/add-a-model.md"),
        ("from pagoda import SamplingParam", "pagoda has no SamplingParam; did you mean 'SamplingParams'?"),
        ("import pagoda.nosuch", "No module named 'pagoda.nosuch'"),
    ],
)
def test_what_is_not_here_is_an_import_error_that_says_what_to_use(line: str, message: str) -> None:
    with pytest.raises(ImportError, match=re.escape(message)):
        exec(line, {})


def test_a_missing_attribute_is_an_attribute_error_that_says_what_to_use() -> None:
    with pytest.raises(AttributeError, match="pagoda has no VllmConfig: use pagoda.EngineConfig"):
        pagoda.VllmConfig  # pyright: ignore[reportAttributeAccessIssue]  # noqa: B018
    assert not hasattr(pagoda, "nosuch")


def test_a_missing_method_is_an_attribute_error_that_says_what_to_use(llm: LLM) -> None:
    for one in (llm, AsyncLLM("smollm2-135m")):
        with pytest.raises(AttributeError, match="LLM' object has no attribute 'sleep': an engine does not sleep"):
            getattr(one, "sleep")  # noqa: B009
        with pytest.raises(AttributeError, match="LLM' object has no attribute 'nosuch'$"):
            getattr(one, "nosuch")  # noqa: B009
    assert not hasattr(LLM, "sleep")
    assert METHODS.keys() & (vars(LLM).keys() | vars(AsyncLLM).keys()) == set()


def test_an_engine_is_stepped_by_hand() -> None:
    core = fake_core()
    engine = pagoda.LLMEngine(core, byte_inputs())
    assert engine.add_request("a", "hello", SHORT) == "a"
    delta = SamplingParams(max_tokens=4, seed=1, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    engine.add_request("b", TokensPrompt(prompt_token_ids=[1, 2]), delta, priority=1)
    engine.add_request("c", "gone", SHORT)
    engine.abort_request("c")
    with pytest.raises(RequestError, match="'a' is in use"):
        engine.add_request("a", "hello", SHORT)
    with pytest.raises(RequestError, match="prompt"):
        engine.add_request("d", "", SHORT)
    assert engine.get_num_unfinished_requests() == 2
    outputs: dict[str, list[int]] = {"a": [], "b": []}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[output.request_id].append(len(output.outputs[0].token_ids))
    assert outputs["a"] == [1, 2, 3, 4]
    assert sum(outputs["b"]) == 4
    engine.shutdown()


def test_an_asyncllm_can_be_shut_down_without_waiting() -> None:
    async def main() -> AsyncLLM:
        llm = AsyncLLM.over(lambda: TextEngine(fake_core(), byte_inputs()))
        llm.shutdown()  # before anything is loaded
        with pytest.raises(UsageError, match="closed"):
            await anext(llm.generate("a", SHORT))
        llm = await AsyncLLM.over(lambda: TextEngine(fake_core(), byte_inputs())).start()
        with step_per_command((await llm._running()).client.thread, num_free_steps=3):
            stream = llm.stream("a", SamplingParams(max_tokens=200, seed=1, ignore_eos=True))
            await anext(stream)
            llm.shutdown()
        with pytest.raises(UsageError, match="closed"):
            async for _ in stream:
                pass
        await llm.close()
        loading = AsyncLLM.over(lambda: TextEngine(fake_core(), byte_inputs()))
        start = asyncio.ensure_future(loading.start())
        await asyncio.sleep(0)
        loading.shutdown()
        with pytest.raises(UsageError, match="closed while it was loading"):
            await start
        await loading.close()
        return await AsyncLLM.over(lambda: TextEngine(fake_core(), byte_inputs())).start()

    llm = asyncio.run(main())
    llm.shutdown()  # after the loop
    running = llm._loading
    assert running is not None
    running.result().client.thread.join()


def test_llm_and_asyncllm_have_the_same_names_with_the_same_meaning(llm: LLM) -> None:
    async def main() -> None:
        async with AsyncLLM.over(lambda: TextEngine(fake_core(), inputs_with_defaults(max_tokens=5))) as other:
            tokenizer = await other.get_tokenizer()
            assert type(tokenizer) is type(llm.get_tokenizer())
            assert tokenizer("hello").input_ids == llm.get_tokenizer()("hello").input_ids
            assert await other.get_default_sampling_params() == SamplingParams(max_tokens=5)
            assert await other.reset_prefix_cache(reset_running_requests=True)

    asyncio.run(main())
    for name in ("generate", "chat", "stream", "stream_chat", "beam_search", "embed", "classify", "score", "encode"):
        assert {"lora_request"} <= inspect.signature(getattr(AsyncLLM, name)).parameters.keys()
    both = {name for name in vars(LLM) if not name.startswith("_") and name in vars(AsyncLLM)}
    assert vars(LLM).keys() - both - {"get_metrics", "llm_engine"} == {
        name for name in vars(LLM) if name.startswith("_")
    }


def test_parameters_that_change_while_a_conversation_is_rendered_do_not_change_the_call() -> None:
    async def num_tokens() -> int:
        params = SHORT.clone()
        async with AsyncLLM.over(lambda: TextEngine(fake_core(), byte_inputs())) as llm:
            outputs = llm.chat([{"role": "user", "content": "hi"}], params)
            first = asyncio.ensure_future(anext(outputs))
            await asyncio.sleep(0)  # the call has begun
            params.max_tokens = 1
            output = await first
            async for one in outputs:
                output = one
            return len(output.outputs[0].token_ids)

    assert asyncio.run(num_tokens()) == 4


def test_async_outputs_are_of_the_kind_that_was_asked_for() -> None:
    async def texts(kind: RequestOutputKind | None) -> list[int]:
        params = SamplingParams(max_tokens=4, seed=1, ignore_eos=True, output_kind=kind)
        async with AsyncLLM.over(lambda: TextEngine(fake_core(), byte_inputs())) as llm:
            return [len(o.outputs[0].token_ids) async for o in llm.generate("a", params)]

    assert sum(asyncio.run(texts(RequestOutputKind.DELTA))) == 4
    assert asyncio.run(texts(None))[-1] == 4
    assert asyncio.run(texts(RequestOutputKind.FINAL_ONLY)) == [4]


def test_the_page_of_names_names_what_there_is() -> None:
    page = (Path(__file__).parent.parent / "docs" / "howto" / "vllm-names.md").read_text()
    names = set(re.findall(r"`(pagoda\.[\w.]+)`", page))
    assert len(names) > 40
    for name in names:
        pkgutil.resolve_name(name)
    for method in re.findall(r"`(\w+)`", "".join(re.findall(r"\| ([^|]*) of the manager", page))):
        assert callable(getattr(KVCacheManager, method))
