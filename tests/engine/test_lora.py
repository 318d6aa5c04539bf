"""LoRA adapters in an engine of this process: which requests use which, when they are loaded, and what is refused."""

import asyncio
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagoda import LLM, AsyncLLM, BeamSearchParams, ConfigError, LoRARequest, RequestError, SamplingParams
from pagoda.base.lora import LoRAConfig
from pagoda.core.request import LoraRef
from pagoda.engine.inputs.adapters import AdapterUses
from pagoda.executors.in_process import InProcessExecutor
from pagoda.kernels.low_rank.packed import PackedLowRank
from pagoda.kernels.low_rank.table import LowRankPiece
from pagoda.loading.adapters.files import digest_of
from pagoda.worker.adapters import AdapterStore
from pagoda.worker.worker import Worker
from tests.device_under_test import DeviceUnderTest
from tests.engine.byte_llama import SMALL_ENGINE, write_byte_llama
from tests.engine.driver import write_tiny_llama
from tests.engine.lora_adapters import EVERYTHING, write_adapter
from tests.engine.step_per_command import step_per_command
from tests.worker.recalls import recall_steps

OPTIONS: dict[str, Any] = {
    **SMALL_ENGINE,
    "dtype": "float32",
    "max_num_batched_tokens": 64,
    "enable_lora": True,
    "max_loras": 2,
    "max_lora_rank": 24,
}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPT = "A prompt that is long enough for several blocks of the cache."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def folders(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three adapters by name."""
    folder = tmp_path_factory.mktemp("adapters")
    write_adapter(folder / "a", model, 4, 1)
    write_adapter(folder / "b", model, 24, 2, ("q_proj", "v_proj"))
    write_adapter(folder / "c", model, 7, 3, EVERYTHING)
    return {name: folder / name for name in "abc"}


@pytest.fixture(scope="module")
def llm(model: Path, on: DeviceUnderTest) -> Iterator[LLM]:
    with LLM(str(model), **on.engine(OPTIONS)) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm: LLM, folders: dict[str, Path]) -> dict[str, list[int]]:
    """The answer to PROMPT with each adapter, and with none (""), each alone."""
    found = {name: tokens(llm, PROMPT, ask(folders[name])) for name in "abc"}
    found[""] = tokens(llm, PROMPT, None)
    assert len({tuple(one) for one in found.values()}) == 4
    return found


def ask(folder: Path, name: str = "") -> LoRARequest:
    return LoRARequest(name or folder.name, 1, str(folder))


def tokens(llm: LLM, prompt: str, adapter: LoRARequest | None) -> list[int]:
    return llm.generate(prompt, GREEDY, lora_request=adapter)[0].outputs[0].token_ids


def store_of(llm: LLM) -> AdapterStore:
    executor = llm.llm_engine.core._executor
    assert isinstance(executor, InProcessExecutor)
    assert isinstance(executor.worker, Worker)
    assert executor.worker.store is not None
    return executor.worker.store


def loaded(llm: LLM) -> set[str]:
    """Return the digests of the adapters that it holds, once the worker has done what it was told so far."""
    executor = llm.llm_engine.core._executor
    assert isinstance(executor, InProcessExecutor)
    return executor._on_thread(lambda: {*store_of(llm)._slots, *store_of(llm)._aside})


def test_each_prompt_of_a_call_has_its_own_adapter(
    llm: LLM, folders: dict[str, Path], expected: dict[str, list[int]]
) -> None:
    """More adapters than run in one step, and than are kept: they take turns."""
    names = ["a", "", "b", "c", "a", "c", "", "b"]
    adapters = [ask(folders[name]) if name else None for name in names]
    outputs = llm.generate([PROMPT] * len(names), GREEDY, lora_request=adapters)
    assert [output.outputs[0].token_ids for output in outputs] == [expected[name] for name in names]
    assert len(store_of(llm)._slots) == 2


def test_adapters_take_turns_while_steps_overlap(
    model: Path, folders: dict[str, Path], expected: dict[str, list[int]], on: DeviceUnderTest
) -> None:
    """Loaded on the thread of the steps. Rows of ended requests leave their slot after the next one is loaded."""
    options = {**OPTIONS, "async_scheduling": True, "max_loras": 1, "max_cpu_loras": 1}
    with LLM(str(model), **on.engine(options)) as llm:
        names = ["a", "", "b", "c", "a", "b"]
        adapters = [ask(folders[name]) if name else None for name in names]
        outputs = llm.generate([PROMPT] * len(names), GREEDY, lora_request=adapters)
        assert [output.outputs[0].token_ids for output in outputs] == [expected[name] for name in names]
        assert len(store_of(llm)._slots) == 1


def test_adapters_in_steps_padded_for_graphs(
    model: Path,
    folders: dict[str, Path],
    expected: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    on: DeviceUnderTest,
) -> None:
    on.must_be_a_cpu("a GPU has graphs, in all other tests")
    recalls = recall_steps(monkeypatch)
    with LLM(str(model), **OPTIONS) as llm:
        for names in (["a", "", "b"], ["a", "c"], ["b", "b"]):
            adapters = [ask(folders[name]) if name else None for name in names]
            outputs = llm.generate([PROMPT] * len(names), GREEDY, lora_request=adapters)
            assert [output.outputs[0].token_ids for output in outputs] == [expected[name] for name in names]
    assert recalls.replays > 10


def test_the_least_recently_used_adapter_makes_room(llm: LLM, folders: dict[str, Path]) -> None:
    digests = {name: llm.llm_engine.input_processor.find_adapter(ask(folders[name])).digest for name in "abc"}
    for name in ("a", "b", "a", "c"):
        tokens(llm, PROMPT, ask(folders[name]))
    assert list(store_of(llm)._slots) == [digests["a"], digests["c"]]


def test_outputs_name_the_adapter_that_the_caller_gave(
    llm: LLM, folders: dict[str, Path], model: Path, on: DeviceUnderTest
) -> None:
    given = [ask(folders["a"], "of mine"), None]
    assert [output.lora_request for output in llm.generate([PROMPT, PROMPT], GREEDY, lora_request=given)] == given
    assert {id(delta.lora_request) for delta in llm.stream(PROMPT, GREEDY, lora_request=given[0])} == {id(given[0])}
    beams = llm.beam_search(PROMPT, BeamSearchParams(beam_width=2, max_tokens=2), lora_request=given[0])
    assert [one.lora_request for one in beams[0].sequences] == [given[0]] * 2

    async def main() -> list[object]:
        async with AsyncLLM(str(model), **on.engine(OPTIONS)) as llm:
            return [output.lora_request async for output in llm.generate(PROMPT, GREEDY, lora_request=given[0])]

    assert {id(one) for one in asyncio.run(main())} == {id(given[0])}


def test_embeddings_with_adapters(llm: LLM, folders: dict[str, Path], model: Path, on: DeviceUnderTest) -> None:
    """Each prompt with its own, in one batch with others; the same vectors as alone, and as AsyncLLM gives."""
    on.must_promise_bits()
    adapters = [ask(folders["a"]), None, ask(folders["b"]), ask(folders["c"]), ask(folders["a"])]
    alone = [llm.embed(PROMPT, lora_request=adapter)[0].outputs.embedding for adapter in adapters]
    assert len({tuple(vector) for vector in alone}) == 4
    together = llm.embed([PROMPT] * len(adapters), lora_request=adapters)
    assert [output.outputs.embedding for output in together] == alone
    (similar,) = llm.score(PROMPT, PROMPT, lora_request=adapters[2])
    assert similar.outputs.score == pytest.approx(1, abs=1e-6)
    raw = llm.encode(PROMPT, pooling_task="token_embed", lora_request=adapters[3])[0].outputs.data
    assert raw[-1].tolist() == alone[3]

    async def main() -> list[list[float]]:
        async with AsyncLLM(str(model), **on.engine(OPTIONS)) as llm:
            found = await asyncio.gather(*(llm.embed(PROMPT, lora_request=adapter) for adapter in adapters))
            return [output.outputs.embedding for output in found]

    assert asyncio.run(main()) == alone
    with pytest.raises(RequestError, match="2 lora_requests for 3 prompts"):
        llm.embed([PROMPT] * 3, lora_request=adapters[:2])


def test_streams_and_beams_use_adapters(
    llm: LLM, folders: dict[str, Path], expected: dict[str, list[int]], on: DeviceUnderTest
) -> None:
    on.must_promise_bits()
    deltas = llm.stream(PROMPT, GREEDY, lora_request=ask(folders["b"]))
    assert [token for delta in deltas for token in delta.outputs[0].token_ids] == expected["b"]
    params = BeamSearchParams(beam_width=1, max_tokens=12, ignore_eos=True)
    found = llm.beam_search([PROMPT, PROMPT], params, lora_request=[ask(folders["c"]), None], concurrency_limit=1)
    num_prompt = len(found[0].sequences[0].tokens) - 12
    assert [one.sequences[0].tokens[num_prompt:] for one in found] == [expected["c"], expected[""]]
    wide = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
    together = llm.beam_search([PROMPT] * 2, wide, lora_request=[ask(folders["c"]), ask(folders["a"])])
    alone = [llm.beam_search(PROMPT, wide, lora_request=ask(folders[name]))[0] for name in "ca"]
    assert [one.sequences for one in together] == [one.sequences for one in alone]


def test_a_name_whose_files_change_is_another_adapter(
    llm: LLM, model: Path, folders: dict[str, Path], expected: dict[str, list[int]], tmp_path: Path
) -> None:
    """Blocks of the old weights are not found by requests for the new ones; those of equal weights are."""
    folder = tmp_path / "mine"
    shutil.copytree(folders["a"], folder)
    assert tokens(llm, PROMPT, ask(folder)) == expected["a"]
    hits = llm.llm_engine.core.make_stats().prefix_hits
    shutil.rmtree(folder)
    shutil.copytree(folders["b"], folder)
    assert tokens(llm, PROMPT + "x", ask(folder)) == tokens(llm, PROMPT + "x", ask(folders["b"], "other name"))
    again = llm.llm_engine.core.make_stats().prefix_hits
    # PROMPT was asked of "b" before, by its own name: its blocks serve all names of the same content.
    assert again > hits
    fresh = write_adapter(folder, model, 5, 9)
    assert llm.llm_engine.input_processor.find_adapter(ask(folder)).digest == fresh.digest
    hits = llm.llm_engine.core.make_stats().prefix_hits
    assert tokens(llm, PROMPT, ask(folder)) not in expected.values()
    assert llm.llm_engine.core.make_stats().prefix_hits == hits


def test_a_file_that_changes_under_a_waiting_request_fails_only_that(
    llm: LLM, folders: dict[str, Path], expected: dict[str, list[int]], tmp_path: Path
) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(folders["a"], folder)
    lora = llm.llm_engine.input_processor.find_adapter(ask(folder))
    assert isinstance(lora, LoraRef)
    store_of(llm).unload(lora)
    shutil.rmtree(folder)
    shutil.copytree(folders["b"], folder)
    core, inputs = llm.llm_engine.core, llm.llm_engine.input_processor
    core.add_request(inputs.process("changed", PROMPT + "!", GREEDY, arrival_time_s=core.now(), lora=lora))
    core.add_request(inputs.process("good", PROMPT, GREEDY, arrival_time_s=core.now()))
    got: list[int] = []
    messages: dict[str, str | None] = {}
    while core.has_unfinished_requests():
        for outputs in core.step().values():
            got += outputs.token_ids.tolist()
            messages |= {finish.request_id: finish.message for finish in outputs.ends}
    assert got == expected[""]
    assert messages["good"] is None
    assert "its files have changed" in (messages["changed"] or "")


def test_an_adapter_is_unloaded_after_the_rows_that_use_it(
    llm: LLM, folders: dict[str, Path], expected: dict[str, list[int]]
) -> None:
    assert llm.add_lora(LoRARequest("a", 7, str(folders["a"])))
    digest = llm.llm_engine.input_processor.find_adapter(ask(folders["a"])).digest
    assert digest in loaded(llm)
    with step_per_command(llm._thread, num_free_steps=3):
        stream = llm.stream(PROMPT, GREEDY, lora_request=ask(folders["a"]))
        got = list(next(stream).outputs[0].token_ids)
        assert llm.remove_lora(7)
        assert not llm.remove_lora(7)
        assert digest in loaded(llm)
    got += [token for delta in stream for token in delta.outputs[0].token_ids]
    assert got == expected["a"]
    tokens(llm, "another step, which frees the row", None)
    assert digest not in loaded(llm)
    llm.add_lora(LoRARequest("a", 7, str(folders["a"])))
    assert tokens(llm, PROMPT, ask(folders["a"])) == expected["a"]
    llm.remove_lora(7)  # of an idle engine, at once
    assert digest not in loaded(llm)
    assert tokens(llm, PROMPT, ask(folders["a"])) == expected["a"]


def test_steps_go_on_while_an_adapter_is_read(
    model: Path, folders: dict[str, Path], expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a slow disk, say."""
    reads, goes_on, read = threading.Event(), threading.Event(), AdapterStore.read

    def read_slowly(store: AdapterStore, ref: LoraRef) -> object:
        reads.set()
        assert goes_on.wait(60)
        return read(store, ref)

    monkeypatch.setattr(AdapterStore, "read", read_slowly)
    with LLM(str(model), **OPTIONS) as llm, ThreadPoolExecutor(2) as callers:
        added = callers.submit(llm.add_lora, LoRARequest("a", 5, str(folders["a"])))
        assert reads.wait(60)
        waiting = callers.submit(tokens, llm, PROMPT, ask(folders["a"]))
        assert tokens(llm, PROMPT, None) == expected[""]
        assert not added.done()
        assert not waiting.done()
        goes_on.set()
        assert added.result(60)
        assert waiting.result(60) == expected["a"]


@pytest.mark.parametrize("fault", ["missing", "truncated", "not finite"])
def test_a_worker_refuses_an_adapter_that_only_it_may_be_unable_to_read(
    llm: LLM, folders: dict[str, Path], tmp_path: Path, fault: str
) -> None:
    """With a RequestError, which ends no group of ranks where others can read it."""
    folder = tmp_path / "a"
    if fault != "missing":
        shutil.copytree(folders["a"], folder)
        weights = folder / "adapter_model.safetensors"
        if fault == "truncated":
            weights.write_bytes(weights.read_bytes()[:-10])
        else:
            save_file({name: tensor * torch.inf for name, tensor in load_file(weights).items()}, weights)
    lora = LoraRef("a", str(folder), digest_of(folder) if fault != "missing" else "00")
    loaded = llm._thread.call(lambda engine: engine.core._executor.call("load_adapter", lora))
    try:
        with pytest.raises(RequestError, match="the adapter 'a' cannot be loaded: .*a"):
            loaded.result(60)
    finally:
        llm._thread.call(lambda engine: engine.core._executor.call("unload_adapter", lora)).result(60)


def test_memory_that_runs_out_while_an_adapter_gets_a_slot_fails_its_requests_alone(
    model: Path, folders: dict[str, Path], expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill, is_short = PackedLowRank.fill, threading.Event()

    def fill_if_there_is_memory(table: PackedLowRank, slot: int, pieces: Sequence[LowRankPiece]) -> None:
        if is_short.is_set():
            raise MemoryError
        fill(table, slot, pieces)

    monkeypatch.setattr(PackedLowRank, "fill", fill_if_there_is_memory)
    is_short.set()
    with LLM(str(model), **OPTIONS) as llm:
        adapters = [ask(folders["a"]), None]
        failed, other = (one.outputs[0] for one in llm.generate([PROMPT] * 2, GREEDY, lora_request=adapters))
        assert failed.finish_reason == "error"
        assert other.token_ids == expected[""]
        is_short.clear()
        assert tokens(llm, PROMPT, ask(folders["a"])) == expected["a"]


def test_adapters_loaded_at_the_same_time_are_used_in_turn(
    model: Path, folders: dict[str, Path], expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than are kept: none of them is ready in time to make room for another."""
    goes_on, read = threading.Event(), AdapterStore.read

    def read_late(store: AdapterStore, ref: LoraRef) -> object:
        assert goes_on.wait(60)
        return read(store, ref)

    monkeypatch.setattr(AdapterStore, "read", read_late)
    with LLM(str(model), **{**OPTIONS, "max_loras": 1, "max_cpu_loras": 1}) as llm, ThreadPoolExecutor(3) as callers:
        added = [callers.submit(llm.add_lora, LoRARequest(name, ord(name), str(folders[name]))) for name in "abc"]
        while len(loaded(llm)) < len(added):
            time.sleep(0.001)
        goes_on.set()
        assert all(one.result(60) for one in added)
        assert len(loaded(llm)) == 1
        for name in "abca":
            assert tokens(llm, PROMPT, ask(folders[name])) == expected[name]


def test_tables_that_a_step_made_are_written_between_steps(
    model: Path, tmp_path: Path, without_triton: Callable[[str], NoReturn], on: DeviceUnderTest
) -> None:
    """Those of Triton's kernels are tensors that change in place. These may be interpreted: the model is narrow."""
    if find_spec("triton") is None:
        without_triton("Triton is not installed")
    narrow = write_tiny_llama(tmp_path / "model")
    for number, rank in enumerate((4, 24, 7)):
        write_adapter(tmp_path / "abc"[number], narrow, rank, number)
    least = {"num_blocks": 16, "max_num_batched_tokens": 4, "max_num_seqs": 1, "tokenizer": str(model)}
    with LLM(str(narrow), **on.engine({**OPTIONS, **least, "kernels": "triton"})) as llm:
        one = SamplingParams(temperature=0, max_tokens=1)
        llm.generate({"prompt_token_ids": [5]}, one, lora_request=ask(tmp_path / "a"))
        for number, name in ((2, "b"), (3, "c")):
            llm.add_lora(LoRARequest(name, number, str(tmp_path / name)))
        assert len(loaded(llm)) == 2
        llm.remove_lora(3)
        assert len(loaded(llm)) == 1


def test_async_requests_finish_when_their_adapter_and_its_files_are_removed(
    model: Path, folders: dict[str, Path], expected: dict[str, list[int]], tmp_path: Path, on: DeviceUnderTest
) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(folders["c"], folder)
    given = LoRARequest("mine", 3, str(folder))

    async def test() -> None:
        async with AsyncLLM(str(model), **on.engine(OPTIONS)) as llm:

            async def collect(number: int) -> list[int]:
                outputs = llm.generate(PROMPT, GREEDY, str(number), lora_request=given)
                return [output async for output in outputs][-1].outputs[0].token_ids

            await llm.add_lora(given)
            with step_per_command((await llm._running()).client.thread):
                tasks = [asyncio.create_task(collect(number)) for number in range(12)]  # some of them have to wait
                while len((await llm._engine())._outputs.live_ids) < len(tasks):
                    await asyncio.sleep(0.001)
                assert await llm.remove_lora(3)
                shutil.rmtree(folder)
            assert await asyncio.gather(*tasks) == [expected["c"]] * 12
            with pytest.raises(RequestError, match="no adapter_config.json"):
                await collect(99)

    asyncio.run(test())


def nan_adapter(folders: dict[str, Path], folder: Path) -> Path:
    shutil.copytree(folders["a"], folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    next(iter(tensors.values()))[0, 0] = torch.nan
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def test_what_cannot_be_used_is_refused_by_name(
    llm: LLM, model: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    write_adapter(tmp_path / "large", model, 25, 1)
    write_adapter(tmp_path / "cut", model, 2, 1)
    (tmp_path / "cut" / "adapter_model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    for folder, message in (
        (tmp_path / "large", "its rank is 25, but max_lora_rank is 24"),
        (tmp_path / "cut", "truncated or corrupt safetensors|no tensors of a LoRA adapter"),
        (tmp_path / "none", "no adapter_config.json"),
    ):
        with pytest.raises(RequestError, match=message):
            llm.generate(PROMPT, GREEDY, lora_request=ask(folder))
        with pytest.raises(RequestError, match=message):
            llm.add_lora(ask(folder))
    broken = nan_adapter(folders, tmp_path / "nan")
    for call in (lambda: llm.add_lora(ask(broken)), lambda: tokens(llm, PROMPT, ask(broken))):
        with pytest.raises(RequestError, match="has values that are not finite"):
            call()
    outputs = llm.generate([PROMPT, PROMPT], GREEDY, lora_request=[ask(broken), None])
    assert "not finite" in (outputs[0].error or "")
    assert outputs[1].error is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("a", "lora_request is str, expected LoRARequest or a list"),
        (3, "lora_request is int, expected LoRARequest or a list"),
        ([None], "1 lora_requests for 2 prompts"),
    ],
)
def test_lora_requests_of_the_wrong_kind(llm: LLM, given: object, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate([PROMPT, PROMPT], GREEDY, lora_request=given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (("", 1, "x"), "lora_name must be a string of printable"),
        (("x\n", 1, "x"), "lora_name must be a string of printable"),
        (("x", 0, "x"), "lora_int_id must be at least 1"),
        (("x", True, "x"), "lora_int_id must be at least 1"),
        (("x", 1, ""), "lora_path must be a string of printable"),
        (("x", 1, "a\0b"), "lora_path must be a string of printable"),
        (("x", 1, "\ud800"), "lora_path must be a string of printable"),
    ],
)
def test_what_no_lora_request_can_be(values: tuple[str, int, str], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        LoRARequest(*values)


def test_without_enable_lora_adapters_are_refused(model: Path, folders: dict[str, Path]) -> None:
    with LLM(str(model), **{**OPTIONS, "enable_lora": False}) as llm:
        with pytest.raises(RequestError, match="LoRA adapters are off on this engine: set enable_lora"):
            llm.generate(PROMPT, GREEDY, lora_request=ask(folders["a"]))
        core, inputs = llm.llm_engine.core, llm.llm_engine.input_processor
        request = inputs.process("x", PROMPT, GREEDY, arrival_time_s=0.0, lora=LoraRef("a", "/x", "00"))
        with pytest.raises(RequestError, match="set enable_lora"):
            core.add_request(request)


def test_limits_that_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="max_cpu_loras=2 is less than max_loras=3"):
        LoRAConfig(max_loras=3, max_cpu_loras=2).check()
    assert LoRAConfig(max_loras=3).num_kept == 3


def test_an_adapter_is_unloaded_when_its_last_request_ends() -> None:
    uses, lora = AdapterUses(), LoraRef("a", "/a", "0")
    assert uses.unload(lora) is lora
    uses.begin(lora)
    uses.begin(lora)
    assert uses.unload(lora) is None
    assert uses.end(lora) is None
    assert uses.end(lora) is lora
    uses.begin(lora)
    assert uses.unload(lora) is None
    uses.keep(lora)  # loaded again
    assert uses.end(lora) is None
