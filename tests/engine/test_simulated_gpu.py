"""Engines on a simulated GPU: in steps of every kind, each tensor is where it must be, and tokens are a CPU's."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from pagoda.base.sampling_params import SamplingParams
from pagoda.core.request import LoraRef
from tests.engine.driver import write_tiny_llama
from tests.engine.random_schedules import Script, Trace, Watched, make_engine, play, random_options, random_script
from tests.engine.test_batch_invariance import (
    EMBEDS,
    LORA,
    MAX_MODEL_LEN,
    VOCAB,
    adapted,
    adapters,
    embedded,
    llama,
    mixed,
    tiny_watched,
)
from tests.simulated_gpu import SimulatedGpu, simulated_gpu

__all__ = ["adapters", "llama", "mixed"]


@pytest.fixture
def gpu(without_triton: Callable[[str], NoReturn]) -> Iterator[SimulatedGpu]:
    if find_spec("triton") is None:
        without_triton("Triton is not installed")
    with simulated_gpu() as made:
        yield made


def played(model: Path, script: Script, options: dict[str, object], device: str) -> tuple[Trace, Counter[str]]:
    counts: Counter[str] = Counter()
    settings = {"kernels": "torch", "dtype": "float32", "max_model_len": MAX_MODEL_LEN, "device": device}
    core, trace = make_engine(model, counts, {**settings, **options}, logits=False)
    play(core, trace, script)
    stats = core.make_stats()
    core.shutdown()
    counts.update({"prefix hits": stats.prefix_hits, "preempted": stats.preemptions, "swapped": stats.swap_outs})
    counts.update({"drafted": stats.drafted_tokens, "accepted": stats.accepted_tokens})
    return trace, counts


def check(
    model: Path,
    watched: list[Watched],
    options: dict[str, object],
    seeds: Sequence[int],
    adapters: tuple[LoraRef, ...] = (),
    num_groups: int = 1,
) -> Counter[str]:
    """Play a random schedule for each seed on the GPU and on the CPU; return what happened in them.

    The kernels are torch's, whose last bits depend on where in memory a tensor begins.
    """
    counts: Counter[str] = Counter()
    for seed in seeds:
        rng = np.random.default_rng(seed)
        drawn = {**random_options(rng, MAX_MODEL_LEN), **options}
        for name in ("num_blocks", "num_host_blocks"):
            drawn[name] *= num_groups  # type: ignore[operator]
        script = random_script(rng, watched, VOCAB, 8, 4, adapters)
        on_cpu, _ = played(model, script, drawn, "cpu")
        on_gpu, counted = played(model, script, drawn, "cuda")
        counts += counted
        assert on_gpu.tokens == on_cpu.tokens
        assert on_gpu.prompt_logprobs.keys() == on_cpu.prompt_logprobs.keys()
        assert on_gpu.pooled.keys() == on_cpu.pooled.keys()
        for request, vector in on_gpu.pooled.items():
            expected = np.frombuffer(on_cpu.pooled[request], np.float32)
            np.testing.assert_allclose(np.frombuffer(vector, np.float32), expected, atol=1e-5)
    return counts


def test_schedules(gpu: SimulatedGpu, llama: Path) -> None:
    """With prompt embeddings."""
    counts = check(llama, embedded(tiny_watched(), 192), EMBEDS, [13])
    assert not {"chunks", "forks", "beams copied", "prefix hits", "preempted", "swapped", "swapped in"} - set(+counts)


def test_schedules_with_adapters_and_drafts(gpu: SimulatedGpu, llama: Path, adapters: tuple[LoraRef, ...]) -> None:
    drafting = {"method": "draft_model", "model": str(llama), "num_speculative_tokens": 3, "adaptive": False}
    options = {**LORA, "speculative_config": drafting}
    counts = check(llama, adapted(tiny_watched(), adapters), options, [8, 9], adapters)
    assert not {"chunks", "forks", "beams copied", "preempted", "accepted"} - set(+counts)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ngram", "suffix", "layer_skip"])
def test_schedules_of_other_drafters(gpu: SimulatedGpu, llama: Path, method: str) -> None:
    drafting = {"method": method, "num_speculative_tokens": 3, "adaptive": False}
    assert check(llama, tiny_watched(), {"speculative_config": drafting}, range(3, 9))["drafted"] > 0


@pytest.mark.slow
def test_windows_and_several_groups(gpu: SimulatedGpu, mixed: Path) -> None:
    counts = check(mixed, tiny_watched(), {}, range(10, 20), num_groups=3)
    assert not {"chunks", "forks", "prefix hits", "preempted", "swapped"} - set(+counts), counts


def test_graphs(gpu: SimulatedGpu, tmp_path: Path) -> None:
    """Triton's kernels, with decode steps of one and two rows captured and replayed."""
    model = write_tiny_llama(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    script = Script([Watched([5, 6, 7], params, 1), Watched([8, 9], params, 2)], [0, 1], {}, set())
    options: dict[str, object] = {"num_blocks": 40}
    on_cpu, _ = played(model, script, options, "cpu")
    on_gpu, _ = played(model, script, {**options, "kernels": "triton"}, "cuda")
    assert on_gpu.tokens == on_cpu.tokens
    assert gpu.num_graphs >= 2
    assert gpu.num_replays > 3


def test_graphs_of_steps_with_prompts(gpu: SimulatedGpu, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Prompts next to decodes: their steps have graphs, too."""
    model = write_tiny_llama(tmp_path)
    answers = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (4, 1, 1)]
    watched = [Watched(list(range(5 + i, 11 + i)), params, 10 * i) for i, params in enumerate(answers)]
    script = Script(watched, [0, 1, 2], {}, set())
    options: dict[str, object] = {"num_blocks": 40, "kernels": "triton", "batch_invariant": True}
    on_cpu, _ = played(model, script, {"num_blocks": 40}, "cpu")
    with caplog.at_level(logging.DEBUG, "pagoda"):
        on_gpu, _ = played(model, script, options, "cuda")
    assert on_gpu.tokens == on_cpu.tokens
    captured = [record.getMessage() for record in caplog.records if record.msg.startswith("captured a graph")]
    assert any("max_query_len=8" in message for message in captured), captured
    assert not any("no graph could be captured" in record.getMessage() for record in caplog.records)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["draft_model", "layer_skip"])
def test_graphs_of_drafts(gpu: SimulatedGpu, tmp_path: Path, method: str, caplog: pytest.LogCaptureFixture) -> None:
    """Steps that verify drafts are captured and replayed, and so are those that a model drafts with."""
    model = write_tiny_llama(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    script = Script([Watched([5, 6, 7], params, 1)], [0], {}, set())
    drafting: dict[str, object] = {"method": method, "num_speculative_tokens": 2, "adaptive": False}
    if method == "draft_model":
        drafting["model"] = str(model)
    options: dict[str, object] = {"num_blocks": 40, "speculative_config": drafting}
    on_cpu, _ = played(model, script, options, "cpu")
    with caplog.at_level(logging.DEBUG, "pagoda"):
        on_gpu, _ = played(model, script, {**options, "kernels": "triton"}, "cuda")
    assert on_gpu.tokens == on_cpu.tokens
    captured = [record.getMessage() for record in caplog.records if record.msg.startswith("captured a graph")]
    drafts_with = "num_layers=1" if method == "layer_skip" else "max_query_len=2"  # lacks two tokens if all were right
    for what in ("max_query_len=3", drafts_with):
        assert any(what in of_graph for of_graph in captured), captured
    assert gpu.num_replays > gpu.num_graphs


@pytest.mark.slow
def test_memory_is_measured_with_the_largest_steps_and_graphs(
    gpu: SimulatedGpu, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the model and of its draft model, whose graphs are used later."""
    model = write_tiny_llama(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    script = Script([Watched([5, 6, 7], params, 1)], [0], {}, set())
    drafting = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 2, "adaptive": False}
    options: dict[str, object] = {"kv_cache_memory": 2**19, "max_num_seqs": 2, "max_num_batched_tokens": 16}
    options["max_model_len"] = 16
    options["speculative_config"] = drafting
    on_cpu, _ = played(model, script, options, "cpu")
    with caplog.at_level(logging.DEBUG, "pagoda"):
        on_gpu, _ = played(model, script, {**options, "kernels": "triton"}, "cuda")
    assert on_gpu.tokens == on_cpu.tokens
    messages = [record.getMessage() for record in caplog.records]
    measured = next(i for i, message in enumerate(messages) if "for the largest step" in message)
    captured = [message for message in messages[:measured] if message.startswith("captured a graph")]
    for size in ("num_tokens=2, num_rows=2, max_query_len=1", "max_query_len=3", "max_query_len=2"):
        assert any(size in of_graph for of_graph in captured), captured
    assert gpu.num_replays > 3  # of the model and of its draft model
