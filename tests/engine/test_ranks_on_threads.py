"""Ranks as threads of one process: whatever the schedule, a request has the logits it has alone, to the bit."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.make_random_model import SHAPES, make
from pagoda.core.request import LoraRef
from tests.engine import test_structured_output as with_grammars
from tests.engine.byte_llama import write_byte_llama
from tests.engine.lora_adapters import EVERYTHING, write_adapter
from tests.engine.random_schedules import (
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
from tests.engine.test_batch_invariance import LORA, MAX_MODEL_LEN, VOCAB, adapted, tiny_watched

OPTIONS: dict[str, object] = {"dtype": "bfloat16", "max_model_len": MAX_MODEL_LEN, "ranks_on_threads": True, **LORA}
TWO = {"tensor_parallel_size": 2}
RANKS: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "two": (TWO, TWO),
    "two stages": ({}, {"pipeline_parallel_size": 2}),
    "three stages": ({}, {"pipeline_parallel_size": 3}),
    "two stages of two": (TWO, {**TWO, "pipeline_parallel_size": 2}),
}
"""The ranks that compute what is expected, and those that are tested: stages change no bits."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    shape = {"hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 3, "num_attention_heads": 4}
    make(replace(SHAPES["tiny"], tie_word_embeddings=True, num_key_value_heads=2, head_dim=32, **shape), folder, seed=1)
    return folder


@pytest.fixture(scope="module")
def adapters(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[LoraRef, ...]:
    """For all layers, and for one of them, which only one stage has."""
    folder = tmp_path_factory.mktemp("adapters")
    return (
        write_adapter(folder / "large", llama, 24, 2, EVERYTHING),
        write_adapter(folder / "some", llama, 16, 3, ("q_proj", "v_proj", "down_proj"), layers=(1,)),
    )


def check(
    model: Path,
    watched: list[Watched],
    expected: Trace,
    ranks: dict[str, int],
    seeds: Iterable[int],
    adapters: tuple[LoraRef, ...] = (),
) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in seeds:
        rng = np.random.default_rng(seed)
        drawn = random_options(rng, MAX_MODEL_LEN)
        script = random_script(rng, watched, VOCAB, 12, 16, adapters)
        if seed % 2:
            drawn["speculative_config"] = random_speculation(rng, str(model))
            if drawn["speculative_config"]["method"] == "layer_skip":  # type: ignore[index]
                drawn["speculative_config"] = {
                    "method": "draft_model",
                    "model": str(model),
                    "num_speculative_tokens": 3,
                }
        drawn |= {"async_scheduling": False, "threads": 1, "max_loras": int(rng.integers(1, 3))}
        if seed % 3 == 0:
            drawn |= {"preemption_mode": "swap", "num_host_blocks": 400}
        drawn["pipeline_depth"] = ranks.get("pipeline_parallel_size", 1)
        core, trace = make_engine(model, counts, {**OPTIONS, **ranks, **drawn})
        try:
            play(core, trace, script)
            stats = core.make_stats()
        finally:
            core.shutdown()
        counts.update({"preempted": stats.preemptions, "swapped": stats.swap_outs, "accepted": stats.accepted_tokens})
        assert not differences(expected, trace, script.requests), f"schedule {seed}: {drawn}"
    return counts


@pytest.mark.parametrize(
    ("name", "num_schedules"),
    [
        ("two", 5),
        ("two stages of two", 5),
        *(pytest.param(name, 10, marks=pytest.mark.slow) for name in RANKS),
    ],
)
def test_random_schedules_change_no_bits(
    name: str, num_schedules: int, llama: Path, adapters: tuple[LoraRef, ...]
) -> None:
    """With drafts, forks, beams, adapters, poolings, swaps and preemptions."""
    reference, ranks = RANKS[name]
    watched = adapted(tiny_watched(), adapters)
    expected = alone(llama, watched, {**OPTIONS, **reference, "num_blocks": 100, "ranks_on_threads": bool(reference)})
    end = 100 * list(RANKS).index(name) + 10
    counts = check(llama, watched, expected, ranks, range(end - num_schedules, end), adapters)
    missing = {"chunks", "swapped", "preempted", "forks", "beams copied", "accepted"} - set(+counts)
    assert not missing, counts


@pytest.mark.parametrize(
    ("name", "seeds"),
    [
        ("two", (501, 503)),
        *(pytest.param(name, range(500, 504), marks=pytest.mark.slow) for name in ("two", "two stages of two")),
    ],
)
def test_grammars_change_no_bits(name: str, seeds: Sequence[int], tmp_path: Path) -> None:
    """One rank has the grammars; the others get the tokens. With drafts and beams that follow them, too."""
    model = write_byte_llama(tmp_path / "model")
    reference, ranks = RANKS[name]
    watched = with_grammars.watched_requests()
    expected = alone(model, watched, {**OPTIONS, **reference, "num_blocks": 100})
    counts = check(model, watched, expected, ranks, seeds)
    assert not {"chunks", "forks", "accepted"} - set(+counts), counts
