"""A request has the same logits, to the bit, and the same tokens in any batch: native kernels, replayed; or a GPU's.

Alone, in batches of up to 64, in chunks of any size, after preemption and swap, with prefix hits, in any row and any
blocks, on one and two threads, greedy and seeded (docs/reference/scheduler-contract.md, section 10, rule 7).
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from ctypes import byref
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from safetensors.torch import load_file

from benchmarks.make_random_model import SHAPES, make
from pagoda.base.config import ParallelConfig
from pagoda.base.pooling import PoolingParams
from pagoda.base.sampling_params import BeamSearchOptions, SamplingParams
from pagoda.core.request import LoraRef, PromptEmbeds
from pagoda.kernels.batch import AttentionMetadata
from pagoda.kernels.native.abi import Shared
from pagoda.kernels.native.arguments import fill_group
from pagoda.kernels.native.library import load as native_library
from pagoda.loading.model_files import ModelFiles
from tests.cached_models import cached_model
from tests.device_under_test import DeviceUnderTest
from tests.engine.driver import write_tiny_llama
from tests.engine.lora_adapters import EVERYTHING, write_adapter
from tests.engine.random_schedules import (
    FIRST_FILLER_SEED,
    METHODS,
    Foresight,
    Script,
    Trace,
    Watched,
    alone,
    differences,
    make_engine,
    play,
    random_options,
    random_script,
    random_speculation,
)
from tests.models.packed_writer import Packing, write_packed
from tests.models.tiny import make_model, save
from tests.worker.lagging_device import LaggingDevice
from tests.worker.recalls import recall_steps

pytestmark = pytest.mark.usefixtures("on_the_device")

MAX_MODEL_LEN = 384
VOCAB = 160  # ids below are in every tiny model
MODES: dict[str, dict[str, object]] = {
    "bf16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int8 kv": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "int8, int8 kv": {"dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "int8"},
}
SAMPLED_MODES = [
    "bf16",
    "int8, int8 kv",
    pytest.param("int8", marks=pytest.mark.slow),
    pytest.param("int8 kv", marks=pytest.mark.slow),
]
"""Those of a quick run have each kind of weights and of cache; the other pairs of them are slow."""
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
KINDS = [
    GREEDY,
    SamplingParams(temperature=0.9, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=1.1, top_k=20, top_p=0.9, max_tokens=12, n=2, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=16, repetition_penalty=1.2, frequency_penalty=0.5, ignore_eos=True),
    SamplingParams(temperature=0.7, min_p=0.05, max_tokens=6, prompt_logprobs=2, logprobs=2, ignore_eos=True),
    SamplingParams(n=2, max_tokens=16, ignore_eos=True, beam_search=BeamSearchOptions()),
    PoolingParams(task="embed"),
    PoolingParams(task="token_embed", normalize=False),
]


def watched_requests(vocab_size: int, lengths: list[int]) -> list[Watched]:
    """Half of them share a beginning; contexts of more than 256 positions are attended to in several segments."""
    rng = np.random.default_rng(3)
    head = rng.integers(3, vocab_size, 70).tolist()
    found = []
    for i, length in enumerate(lengths):
        own = rng.integers(3, vocab_size, length).tolist()
        prompt = (head + own)[:length] if i % 2 else own
        params = KINDS[i % len(KINDS)]
        skips = isinstance(params, PoolingParams) and params.task == "token_embed"
        found.append(Watched(prompt, params, 10 * i, skips_prefix=skips))
    return found


@functools.cache
def tiny_watched() -> list[Watched]:
    return watched_requests(VOCAB, [1, 2, 7, 90, 16, 33, 64, 75, 250, 12, 5, 280, 40, 128, 31, 100, 19, 71, 255, 8])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """So wide that kernels with no promise (torch's) differ from one batch to another."""
    folder = tmp_path_factory.mktemp("llama")
    wide = {"hidden_size": 192, "intermediate_size": 448, "head_dim": 48}
    make(replace(SHAPES["tiny"], tie_word_embeddings=False, **wide), folder, seed=1)
    return folder


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Several KV groups, one of them with a sliding window."""
    return write_tiny_llama(tmp_path_factory.mktemp("mixed"), 3, window=40, mixed=True)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two of six experts per token, so that batches group their tokens by expert in many ways."""
    folder = tmp_path_factory.mktemp("experts")
    make(SHAPES["tiny-moe"], folder, seed=2)
    return folder


def check(
    model: Path | ModelFiles,
    watched: list[Watched],
    expected: Trace,
    options: dict[str, object],
    seeds: Iterable[int],
    vocab_size: int,
    *,
    most_watched: int = 16,
    most_fillers: int = 56,
    num_groups: int = 1,
    draft_model: Path | None = None,
    adapters: Sequence[LoraRef] = (),
    ahead: bool = False,
    num_failures: int = 0,
    methods: Sequence[str] = METHODS,
) -> Counter[str]:
    """Play a random schedule for each seed, with drafts if there is a draft model; return what happened in them.

    ahead: schedule steps before the results of earlier ones are there, in all of them.
    num_failures: of the first steps of each schedule, so many run out of memory.   methods: that draft.
    """
    counts: Counter[str] = Counter()
    for seed in seeds:
        rng = np.random.default_rng(seed)
        drawn = random_options(rng, MAX_MODEL_LEN)
        for name in ("num_blocks", "num_host_blocks"):
            drawn[name] *= num_groups  # type: ignore[operator]
        if ahead:
            drawn |= {"async_scheduling": True, "pipeline_depth": int(rng.integers(2, 4))}
        script = random_script(rng, watched, vocab_size, most_watched, most_fillers, adapters)
        if adapters:
            drawn |= {"max_loras": int(rng.integers(1, len(adapters) + 1))}
        if draft_model is not None:
            drawn |= {"speculative_config": random_speculation(rng, str(draft_model), methods)}
        failing = frozenset(rng.integers(1, 12, num_failures).tolist())
        core, trace = make_engine(model, counts, {"max_model_len": MAX_MODEL_LEN, **options, **drawn}, failing=failing)
        play(core, trace, script)
        stats = core.make_stats()
        core.shutdown()
        counts.update({"prefix hits": stats.prefix_hits, "preempted": stats.preemptions, "swapped": stats.swap_outs})
        counts.update({"drafted": stats.drafted_tokens, "accepted": stats.accepted_tokens})
        counts.update([f"threads {drawn['threads']}", f"depth {drawn['pipeline_depth']}"])
        seeds = {each.seed for each in script.requests if each.seed < FIRST_FILLER_SEED}
        counts.update({"failed": len(seeds & trace.failed), "not failed": len(seeds - trace.failed)})
        assert not differences(expected, trace, script.requests), f"schedule {seed}: {drawn}"
    return counts


def reference(model: Path | ModelFiles, watched: list[Watched], options: dict[str, object]) -> Trace:
    trace = alone(model, watched, {"max_model_len": MAX_MODEL_LEN, "num_blocks": 100, **options})
    # They say different things, except where outputs of one prompt begin alike.
    assert len(set(trace.logits.values())) > 0.8 * len(trace.logits)
    return trace


@functools.cache
def tiny_reference(model: Path, mode: str) -> Trace:
    """What `tiny_watched` get alone."""
    return reference(model, tiny_watched(), MODES[mode])


@pytest.mark.parametrize("mode", SAMPLED_MODES)
def test_a_sample_of_schedules(llama: Path, mode: str) -> None:
    expected = tiny_reference(llama, mode)
    counts = check(llama, tiny_watched(), expected, MODES[mode], (7, 10, 11), VOCAB)
    missing = {"chunks", "swapped", "preempted", "prefix hits", "forks", "threads 1", "threads 2"} - set(+counts)
    assert not missing, counts


@pytest.mark.parametrize(("mode", "has_drafts"), [("processed_logprobs", False), ("processed_logits", True)])
def test_processed_logprobs(llama: Path, mode: str, has_drafts: bool) -> None:
    """They have the same bits in any batch, too, whatever else is in it: others ask for none."""
    options = {**MODES["bf16"], "logprobs_mode": mode}
    watched = [
        replace(each, params=replace(each.params, logprobs=3)) if isinstance(each.params, SamplingParams) else each
        for each in tiny_watched()
    ]
    expected = reference(llama, watched, options)
    assert len(expected.logprobs) > 10
    draft_model, seeds = (llama, range(870, 872)) if has_drafts else (None, range(860, 863))
    counts = check(llama, watched, expected, options, seeds, VOCAB, draft_model=draft_model)
    assert counts["accepted" if has_drafts else "preempted"]


@pytest.mark.parametrize(
    ("threads", "mode"),
    [
        (1, "bf16"),
        (2, "int8, int8 kv"),
        pytest.param(2, "bf16", marks=pytest.mark.slow),
        pytest.param(1, "int8, int8 kv", marks=pytest.mark.slow),
        *(pytest.param(n, mode, marks=pytest.mark.slow) for n in (1, 2) for mode in ("int8", "int8 kv")),
    ],
)
def test_batches_of_all_sizes(llama: Path, mode: str, threads: int) -> None:
    """Four requests of one row each, at random places of batches of 4 to 64."""
    watched = [each for each in tiny_watched() if len(each.prompt) in (2, 16, 40, 90)]
    expected = tiny_reference(llama, mode)
    rng = np.random.default_rng(threads)
    counts: Counter[str] = Counter()
    options = {"max_num_seqs": 64, "num_blocks": 400, "threads": threads, "max_model_len": MAX_MODEL_LEN}
    core, trace = make_engine(llama, counts, {**MODES[mode], **options})
    for size in (4, 5, 6, 7, 9, 12, 13, 16, 17, 24, 31, 33, 48, 63, 64):
        trace.clear()
        counts.clear()
        prompts = rng.integers(3, VOCAB, (size - 4, 5)).tolist()
        requests = [*watched, *(Watched(prompt, GREEDY, FIRST_FILLER_SEED + i) for i, prompt in enumerate(prompts))]
        rng.shuffle(requests)  # type: ignore[arg-type]  # a list is what it takes
        play(core, trace, Script(requests, [0] * size, {}, set()))
        assert counts["most rows"] == size
        assert not differences(expected, trace, requests), size
    core.shutdown()


def test_steps_launched_ahead_change_no_bits(
    llama: Path, on_the_device: DeviceUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: the host gets a step's tokens late, and has launched the next steps by then."""
    on_the_device.must_be_a_cpu("a GPU does this itself, in all other tests")
    late: list[LaggingDevice] = []

    def lagging(config: ParallelConfig, index: int) -> LaggingDevice:
        late.append(LaggingDevice(delay_s=0.002))
        return late[-1]

    expected = tiny_reference(llama, "bf16")
    monkeypatch.setattr("pagoda.worker.loaded_model.select_device", lagging)
    counts = check(llama, tiny_watched(), expected, {**MODES["bf16"]}, range(6, 9), VOCAB, ahead=True)
    missing = {"chunks", "swapped", "preempted", "forks"} - set(+counts)
    assert not missing, counts
    assert sum(device.most_behind for device in late) > len(late)


@pytest.mark.slow
def test_schedules_on_triton(
    llama: Path, without_triton: Callable[[str], NoReturn], device_under_test: DeviceUnderTest
) -> None:
    """With --batch-invariant, on the kernels of a GPU; in Triton's interpreter, so with few requests."""
    if find_spec("triton") is None:
        without_triton("Triton is not installed")
    options = {**device_under_test.options, "kernels": "triton", "batch_invariant": True, "dtype": "bfloat16"}
    watched = [each for each in tiny_watched() if len(each.prompt) in (2, 7, 33, 280)]
    watched = [replace(each, params=replace(each.params, max_tokens=5)) for each in watched]
    expected = reference(llama, watched, options)
    check(llama, watched, expected, options, range(800, 803), VOCAB, most_watched=4, most_fillers=2)


@pytest.mark.parametrize("kind", ["cls", "mean"])
def test_schedules_of_other_poolings(llama: Path, kind: str) -> None:
    """They need more than the last hidden state: what chunks leave is kept over preemptions and swaps."""
    options: dict[str, object] = {"dtype": "bfloat16", "pooling_type": kind}
    asked = [replace(each, params=PoolingParams(task="embed"), skips_prefix=True) for each in tiny_watched()]
    watched = [each if i % 4 == 3 else asked[i] for i, each in enumerate(tiny_watched())]
    expected = alone(llama, watched, {"max_model_len": MAX_MODEL_LEN, "num_blocks": 100, **options})
    assert len(set(expected.pooled.values())) >= (15 if kind == "mean" else 8)  # prompts may begin alike
    counts = check(llama, watched, expected, options, range(700, 706), VOCAB)
    missing = {"chunks", "swapped", "preempted"} - set(+counts)
    assert not missing, counts


def test_windows_and_several_groups(mixed: Path) -> None:
    expected = reference(mixed, tiny_watched(), {"dtype": "bfloat16", "num_blocks": 300})
    check(mixed, tiny_watched(), expected, {"dtype": "bfloat16"}, range(100, 102), VOCAB, num_groups=3)


@pytest.mark.parametrize("mode", ["bf16", "int8 kv"])
def test_a_long_beginning_that_rows_share(llama: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its segments are read once for all rows that have it in the same blocks, which these schedules must have."""
    head = np.random.default_rng(4).integers(3, VOCAB, 270).tolist()
    watched = [
        replace(each, prompt=head + each.prompt[:20])
        for each in tiny_watched()
        if not isinstance(each.params, PoolingParams)
    ]
    expected = reference(llama, watched, MODES[mode])
    library = native_library()
    saved = 0

    def fill_and_count(record: Shared, metadata: AttentionMetadata) -> None:
        nonlocal saved
        fill_group(record, metadata)
        if metadata.max_query_len == 1:
            saved += int(metadata.seq_lens.sum()) - library["attention_positions"](byref(record), 1)

    monkeypatch.setattr("pagoda.kernels.replay.program.fill_group", fill_and_count)
    check(llama, watched, expected, MODES[mode], range(40, 44), VOCAB)
    assert saved > 10_000


def check_family(name: str, num_groups: int, watched: list[Watched], seeds: range, folder: Path) -> Counter[str]:
    """Play schedules of a tiny model of tests/models/tiny.py, in bf16; return what happened in them."""
    shape = {"vocab_size": VOCAB, "max_position_embeddings": MAX_MODEL_LEN, "eos_token_id": 2}
    if name.startswith("gemma4"):
        shape["vocab_size_per_layer_input"] = VOCAB
    model, options = save(make_model(name, **shape), folder), {"dtype": "bfloat16"}
    expected = reference(model, watched, {**options, "num_blocks": 100 * num_groups})
    most = min(16, len(watched))
    return check(model, watched, expected, options, seeds, VOCAB, most_watched=most, num_groups=num_groups)


@pytest.mark.parametrize(
    ("name", "num_groups"),
    [("deepseek-v3", 1), ("gemma4-shared", 3), ("lfm2", 1), ("mamba2", 1), ("qwen3-next", 2)],
)
def test_other_ways_to_attend(name: str, num_groups: int, tmp_path: Path, on_the_device: DeviceUnderTest) -> None:
    """Latent attention and groups of experts; heads of two sizes, and layers that share K and V; states."""
    on_the_device.must_compute(name)
    counts = check_family(name, num_groups, tiny_watched(), range(11, 15), tmp_path)
    missing = {"chunks", "swapped", "preempted", "prefix hits", "forks"} - set(+counts)
    assert not missing, counts


OTHER_FAMILIES = {
    "gpt-oss": 3, "gemma2": 3, "cohere": 1, "gpt-neox": 1, "gpt2": 1, "qwen2-moe": 1, "falcon-h1": 1, "nemotron-h": 1,
    "llama4": 4, "gemma4-moe": 2,
}  # fmt: skip
"""Model -> its KV groups, without that of states: sinks; soft caps; parallel blocks that turn pairs of neighbours, and
a part of each head; learned positions; shared experts; attention and states in each layer; layers of one part each;
chunks of the text and queries that grow; experts next to an MLP."""


@pytest.mark.parametrize("name", OTHER_FAMILIES)
def test_a_schedule_of_other_families(name: str, tmp_path: Path, on_the_device: DeviceUnderTest) -> None:
    """One request of each kind, and one with a long context."""
    on_the_device.must_compute(name)
    watched = [each for i, each in enumerate(tiny_watched()) if i < len(KINDS) or len(each.prompt) == 280]
    counts = check_family(name, OTHER_FAMILIES[name], watched, range(13, 14), tmp_path)
    missing = {"chunks", "swapped", "preempted", "prefix hits", "forks"} - set(+counts)
    assert not missing, counts


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHER_FAMILIES)
def test_schedules_of_other_families(name: str, tmp_path: Path, on_the_device: DeviceUnderTest) -> None:
    on_the_device.must_compute(name)
    counts = check_family(name, OTHER_FAMILIES[name], tiny_watched(), range(11, 31), tmp_path)
    missing = {"chunks", "swapped", "preempted", "prefix hits", "forks"} - set(+counts)
    assert not missing, counts


@pytest.mark.parametrize(
    "packing", [Packing("awq", group=64), Packing("gptq", group=64, symmetric=True)], ids=["awq", "gptq"]
)
def test_checkpoints_of_4_bits(llama: Path, packing: Packing, tmp_path: Path) -> None:
    """With drafts of the same weights, and without."""
    packed = tmp_path / "packed"
    write_packed(llama, packing, packed, tmp_path / "values")
    expected = reference(packed, tiny_watched(), {"dtype": "bfloat16"})
    counts = check(packed, tiny_watched(), expected, {"dtype": "bfloat16"}, range(900, 902), VOCAB)
    assert not {"chunks", "preempted", "prefix hits"} - set(+counts), counts
    counts = check(packed, tiny_watched(), expected, {"dtype": "bfloat16"}, range(905, 907), VOCAB, draft_model=packed)
    assert counts["accepted"] > 0  # two schedules: it may be all of them


@pytest.mark.parametrize("mode", SAMPLED_MODES)
def test_a_sample_of_schedules_with_drafts(llama: Path, mode: str) -> None:
    """Every method, in all kinds of schedules: the bits are those without drafts."""
    expected = tiny_reference(llama, mode)
    first = 500 + 10 * list(MODES).index(mode)
    counts = check(llama, tiny_watched(), expected, MODES[mode], range(first, first + 4), VOCAB, draft_model=llama)
    assert 0 < counts["accepted"] < counts["drafted"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_hundred_schedules_with_drafts(llama: Path, mixed: Path, mode: str) -> None:
    """25 per mode, every fifth of them on the model with several groups."""
    options = MODES[mode]
    first = 20_000 + 100 * list(MODES).index(mode)
    expected = tiny_reference(llama, mode)
    check(llama, tiny_watched(), expected, options, range(first, first + 20), VOCAB, draft_model=llama)
    options = {**options, "dtype": "bfloat16"}
    expected = reference(mixed, tiny_watched(), {**options, "num_blocks": 300})
    check(
        mixed,
        tiny_watched(),
        expected,
        options,
        range(first + 20, first + 25),
        VOCAB,
        num_groups=3,
        draft_model=mixed,
    )


LORA: dict[str, object] = {"enable_lora": True, "max_lora_rank": 40}


@pytest.fixture(scope="module")
def adapters(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[LoraRef, ...]:
    """Of ranks 3 to 40, for different layers and parts of them."""
    folder = tmp_path_factory.mktemp("adapters")
    return (
        write_adapter(folder / "small", llama, 3, 1),
        write_adapter(folder / "large", llama, 40, 2, EVERYTHING),
        write_adapter(folder / "some", llama, 16, 3, ("q_proj", "v_proj", "down_proj"), layers=(1,)),
    )


def adapted(watched: list[Watched], adapters: Sequence[LoraRef]) -> list[Watched]:
    """Every request with an adapter or none; the first of each kind, with all of them, so that they share prompts."""
    choices = [None, *adapters]
    found = [replace(each, adapter=choices[i // 2 % len(choices)]) for i, each in enumerate(watched)]
    shared = next(each for each in watched if len(each.prompt) == 90)
    return found + [
        replace(shared, adapter=choice, seed=1000 + 10 * i, params=GREEDY) for i, choice in enumerate(choices)
    ]


@functools.cache
def adapted_reference(model: Path, adapters: tuple[LoraRef, ...], mode: str) -> Trace:
    """What those of `adapted` get alone."""
    return reference(model, adapted(tiny_watched(), adapters), {**MODES[mode], **LORA})


@pytest.mark.parametrize("mode", ["bf16", "int8"])
def test_adapters(llama: Path, adapters: tuple[LoraRef, ...], mode: str) -> None:
    """A request's bits depend neither on its neighbours' adapters nor on their number; blocks are shared by none."""
    options, watched = {**MODES[mode], **LORA}, adapted(tiny_watched(), adapters)
    expected = adapted_reference(llama, adapters, mode)
    assert len({tuple(expected.tokens[1000 + 10 * i]) for i in range(len(adapters) + 1)}) == len(adapters) + 1
    first = 600 + 10 * list(MODES).index(mode)
    counts = check(llama, watched, expected, options, range(first, first + 4), VOCAB, adapters=adapters)
    missing = {"chunks", "preempted", "prefix hits", "forks"} - set(+counts)
    assert not missing, counts


def test_adapters_with_drafts(llama: Path, adapters: tuple[LoraRef, ...]) -> None:
    options, watched = {**MODES["bf16"], **LORA}, adapted(tiny_watched(), adapters)
    expected = adapted_reference(llama, adapters, "bf16")
    counts = check(llama, watched, expected, options, range(640, 642), VOCAB, draft_model=llama, adapters=adapters)
    assert 0 < counts["accepted"] < counts["drafted"]


# Seeds of schedules that show it if steps on top of a failed one are not computed again, or its blocks stay cached.
@pytest.mark.parametrize(("has_drafts", "seeds"), [(False, (684, 693, 746, 763)), (True, (684, 685))])
def test_steps_that_run_out_of_memory_end_their_own_sequences_only(
    llama: Path, adapters: tuple[LoraRef, ...], has_drafts: bool, seeds: tuple[int, ...]
) -> None:
    """What was launched on top of them is computed again: all other sequences have the bits that they have alone."""
    options, watched = {**MODES["bf16"], **LORA}, adapted(tiny_watched(), adapters)
    expected = adapted_reference(llama, adapters, "bf16")
    counts = check(
        llama,
        watched,
        expected,
        options,
        seeds,
        VOCAB,
        most_fillers=16,
        draft_model=llama if has_drafts else None,
        adapters=adapters,
        num_failures=4,
        ahead=not has_drafts,
    )
    missing = {"failed", "not failed", "depth 2" if not has_drafts else "depth 1"} - set(+counts)
    assert not missing, counts


@pytest.mark.parametrize("name", ["lfm2", "mamba2", "qwen3.5"])
def test_failures_leave_no_wrong_state(name: str, tmp_path: Path, on_the_device: DeviceUnderTest) -> None:
    """Rows that go on, fork or find blocks on top of a failed step start again from a state that it did not write."""
    on_the_device.must_compute(name)
    shape = {"vocab_size": VOCAB, "max_position_embeddings": MAX_MODEL_LEN, "eos_token_id": 2}
    model, options = save(make_model(name, **shape), tmp_path), MODES["bf16"]
    watched = [each for i, each in enumerate(tiny_watched()) if i % 2]
    expected = reference(model, watched, {**options, "num_blocks": 200})
    most: dict[str, Any] = {"most_watched": len(watched), "most_fillers": 16}
    counts = check(model, watched, expected, options, range(684, 690), VOCAB, **most, num_failures=4, ahead=True)
    assert not {"failed", "not failed", "depth 2", "prefix hits"} - set(+counts), counts


@pytest.mark.parametrize("name", ["lfm2", "mamba2", "qwen3.5"])
def test_drafts_with_states_change_no_bits(
    name: str, tmp_path: Path, on_the_device: DeviceUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state that has passed rejected drafts is not gone on from, by outputs of one prompt either; some steps fail."""
    on_the_device.must_compute(name)
    shape = {"vocab_size": VOCAB, "max_position_embeddings": MAX_MODEL_LEN, "eos_token_id": 2}
    model, options = save(make_model(name, **shape), tmp_path / name), MODES["bf16"]
    small = save(make_model("llama", **shape), tmp_path / "llama")
    watched = [each for i, each in enumerate(tiny_watched()) if i % 2 or i % len(KINDS) == 2]
    expected = reference(model, watched, {**options, "num_blocks": 200})
    most: dict[str, Any] = {"most_watched": len(watched), "most_fillers": 16, "num_failures": 2}
    methods = [method for method in METHODS if method != "layer_skip"]
    counts = check(
        model, watched, expected, options, range(700, 703), VOCAB, draft_model=small, methods=methods, **most
    )
    assert counts["drafted"]

    # Those drafts are hardly ever right.
    texts = {
        each.seed + sequence: each.prompt + expected.tokens[each.seed + sequence]
        for each in watched
        for sequence in range(each.num_seqs)
        if each.seed in expected.tokens
    }
    monkeypatch.setattr("pagoda.worker.speculation.registry._drafter_of", lambda *_: Foresight(texts, VOCAB))
    drafting = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 12, "adaptive": False}}
    counts = check(model, watched, expected, {**options, **drafting}, (703, 705, 716), VOCAB, **most)
    assert not {"failed", "prefix hits", "preempted", "forks"} - set(+counts), counts
    assert 0.3 * counts["drafted"] < counts["accepted"] < counts["drafted"], counts


@pytest.mark.parametrize("has_drafts", [False, True])
def test_steps_padded_for_graphs_change_no_bits(
    llama: Path,
    adapters: tuple[LoraRef, ...],
    has_drafts: bool,
    on_the_device: DeviceUnderTest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU, with steps launched ahead: whatever is in the rows that fill a batch up."""
    on_the_device.must_be_a_cpu("a GPU does this itself, in all other tests")
    options, watched = {**MODES["bf16"], **LORA}, adapted(tiny_watched(), adapters)
    expected = adapted_reference(llama, adapters, "bf16")
    recalls = recall_steps(monkeypatch)
    first, draft_model = (660, llama) if has_drafts else (650, None)
    seeds = range(first, first + (1 if has_drafts else 2))
    check(llama, watched, expected, options, seeds, VOCAB, draft_model=draft_model, adapters=adapters, ahead=True)
    assert recalls.replays > 20


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_hundred_schedules_of_adapters(llama: Path, adapters: tuple[LoraRef, ...], mode: str) -> None:
    """25 per mode."""
    options, watched = {**MODES[mode], **LORA}, adapted(tiny_watched(), adapters)
    first = 30_000 + 100 * list(MODES).index(mode)
    expected = adapted_reference(llama, adapters, mode)
    check(llama, watched, expected, options, range(first, first + 25), VOCAB, adapters=adapters)


EMBEDS: dict[str, object] = {"enable_prompt_embeds": True}


def embedded(watched: list[Watched], size: int) -> list[Watched]:
    """The same with embeddings in all or some places of most prompts, many of which begin alike."""
    rng = np.random.default_rng(8)
    head = rng.normal(size=(70, size)).astype(np.float32)
    found = []
    for i, each in enumerate(watched):
        asks_logprobs = isinstance(each.params, SamplingParams) and each.params.prompt_logprobs is not None
        count = len(each.prompt) if i % 3 else int(rng.integers(len(each.prompt) + 1))
        if asks_logprobs or i % 5 == 4 or not count:
            found.append(each)
            continue
        own = rng.normal(size=(count, size)).astype(np.float32)
        embeds = np.concatenate([head, own[70:]])[:count] if i % 2 else own
        positions = np.arange(count, dtype=np.int32)
        if i % 4 == 3:  # as in a conversation: in several places among tokens
            positions = positions[np.isin(positions % 40, range(5, 30))] if count > 5 else positions
        prompt = np.array(each.prompt)
        prompt[positions] = 0
        given = PromptEmbeds(positions, embeds[positions]) if len(positions) else None
        found.append(replace(each, prompt=prompt.tolist(), embeds=given))
    return found


def as_embeddings(watched: list[Watched], model: Path) -> list[Watched]:
    """The same with embeddings in place of all tokens of prompts that have some, unless their tokens are penalized."""
    table = load_file(model / "model.safetensors")["model.embed_tokens.weight"].float().numpy()
    found = []
    for each in watched:
        is_penalized = isinstance(each.params, SamplingParams) and each.params.repetition_penalty != 1
        if each.embeds is not None and not is_penalized:
            values = table[each.prompt]
            values[each.embeds.positions] = each.embeds.values
            each = replace(each, prompt=[0] * len(values), embeds=PromptEmbeds.of_first(values))
        found.append(each)
    return found


@pytest.mark.parametrize("mode", ["bf16", "int8, int8 kv"])
def test_prompt_embeddings(llama: Path, mode: str) -> None:
    """Embeddings among tokens, in chunks, computed again after preemption, and found in the prefix cache.

    They give the same bits as prompts that are embeddings as a whole.
    """
    options, watched = {**MODES[mode], **EMBEDS}, embedded(tiny_watched(), 192)
    expected = reference(llama, as_embeddings(watched, llama), options)
    counts = check(llama, watched, expected, options, range(800, 805), VOCAB)
    missing = {"chunks", "swapped", "preempted", "prefix hits", "forks"} - set(+counts)
    assert not missing, counts


def test_prompt_embeddings_with_adapters_and_drafts(llama: Path, adapters: list[LoraRef]) -> None:
    options = {**MODES["bf16"], **LORA, **EMBEDS}
    watched = embedded(adapted(tiny_watched(), adapters), 192)
    expected = reference(llama, watched, options)
    counts = check(llama, watched, expected, options, range(850, 852), VOCAB, draft_model=llama, adapters=adapters)
    assert 0 < counts["accepted"] < counts["drafted"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_hundred_schedules_of_prompt_embeddings(llama: Path, mixed: Path, mode: str) -> None:
    """25 per mode, every fifth of them on the model with several groups."""
    options, watched = {**MODES[mode], **EMBEDS}, embedded(tiny_watched(), 192)
    first = 40_000 + 100 * list(MODES).index(mode)
    expected = reference(llama, watched, options)
    check(llama, watched, expected, options, range(first, first + 20), VOCAB)
    options, watched = {**options, "dtype": "bfloat16"}, embedded(tiny_watched(), 48)
    expected = reference(mixed, watched, {**options, "num_blocks": 300})
    check(mixed, watched, expected, options, range(first + 20, first + 25), VOCAB, num_groups=3)


@pytest.mark.parametrize("mode", SAMPLED_MODES)
def test_experts(experts: Path, mode: str) -> None:
    expected = tiny_reference(experts, mode)
    check(experts, tiny_watched(), expected, MODES[mode], range(300, 302), VOCAB)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_hundred_schedules_of_experts(experts: Path, mode: str) -> None:
    """25 per mode."""
    first = 9000 + 100 * list(MODES).index(mode)
    expected = tiny_reference(experts, mode)
    check(experts, tiny_watched(), expected, MODES[mode], range(first, first + 25), VOCAB)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_thousand_schedules(llama: Path, mixed: Path, mode: str) -> None:
    """250 a mode, every fifth of them on the model with several groups."""
    options = MODES[mode]
    first = 1000 * (1 + list(MODES).index(mode))
    expected = tiny_reference(llama, mode)
    counts = check(llama, tiny_watched(), expected, options, range(first, first + 200), VOCAB)
    print(mode, dict(counts))
    expected = reference(mixed, tiny_watched(), {**options, "num_blocks": 300})
    check(mixed, tiny_watched(), expected, options, range(first + 200, first + 250), VOCAB, num_groups=3)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [*MODES, "gguf"])
def test_schedules_of_a_real_model(mode: str) -> None:
    files = cached_model("smollm2-135m")
    options = MODES.get(mode, {"dtype": "bfloat16", "quantization": "gguf"})
    watched = watched_requests(49152, [3, 40, 270, 75, 17, 90, 130, 33])
    expected = reference(files, watched, options)
    num = 20 if mode in ("bf16", "int8") else 4
    counts = check(files, watched, expected, options, range(num), 49152, most_watched=8, most_fillers=24)
    print(mode, dict(counts))


@pytest.mark.parametrize("mode", SAMPLED_MODES)
def test_decoding_gives_the_same_bits_as_prefilling(llama: Path, mode: str) -> None:
    """The logits of a decode step are those of a prompt that ends there, in one piece or in several."""
    decoded_is_prefilled(llama, [each for each in tiny_watched() if len(each.prompt) in (7, 75, 250)], MODES[mode])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["bf16", "int8", "int8 kv"])
def test_decoding_gives_the_same_bits_as_prefilling_with_a_real_model(mode: str) -> None:
    watched = watched_requests(49152, [7, 75, 250])
    decoded_is_prefilled(cached_model("smollm2-135m"), watched, MODES[mode])


def decoded_is_prefilled(model: Path | ModelFiles, watched: list[Watched], mode: dict[str, object]) -> None:
    watched = [Watched(each.prompt, GREEDY, each.seed) for each in watched]
    expected = reference(model, watched, mode)
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    for budget, cached in ((1024, False), (13, False), (1024, True)):
        options = {"max_model_len": MAX_MODEL_LEN, "num_blocks": 200, "max_num_seqs": 8, "threads": 2}
        options |= {"max_num_batched_tokens": budget, "enable_prefix_caching": cached}
        core, trace = make_engine(model, Counter(), {**mode, **options})
        whole = [
            Watched(each.prompt + expected.tokens[each.seed][:k], one, each.seed)
            for each in watched
            for k in range(len(expected.tokens[each.seed]))
        ]
        play(core, trace, Script(whole, [0] * len(whole), {}, set()))
        hits = core.make_stats().prefix_hits
        core.shutdown()
        assert trace.logits == expected.logits
        assert (hits > 0) == cached
