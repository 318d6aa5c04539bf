"""Ranks in processes of their own: whatever the schedule, each request gets what it gets alone on as many ranks."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.engine.byte_llama import VOCAB, write_byte_llama
from tests.engine.random_schedules import alone, differences, make_engine, play, random_options, random_script
from tests.engine.test_batch_invariance import MAX_MODEL_LEN, watched_requests

RANKS: dict[str, dict[str, object]] = {
    "one": {"distributed_executor_backend": "mp"},
    "two": {"tensor_parallel_size": 2},
    "two stages": {"pipeline_parallel_size": 2},
}
SCHEDULES = 2  # one of them with drafts


@pytest.mark.parametrize(
    "ranks",  # on threads, in test_ranks_on_threads.py, there are stages in a quick run, too
    [pytest.param("one", marks=pytest.mark.slow), "two", pytest.param("two stages", marks=pytest.mark.slow)],
)
def test_random_schedules_change_nothing(ranks: str, tmp_path: Path) -> None:
    model = write_byte_llama(tmp_path / "model")
    options = {**RANKS[ranks], "dtype": "bfloat16", "max_model_len": MAX_MODEL_LEN}
    watched = watched_requests(VOCAB, [1, 2, 7, 90, 16, 33, 250, 12])
    # One rank in a process of its own computes what one in this process does, and so do stages.
    one: dict[str, object] = {"distributed_executor_backend": "auto", "pipeline_parallel_size": 1}
    expected = alone(model, watched, options if ranks == "two" else {**options, **one})
    counts: Counter[str] = Counter()
    for seed in range(SCHEDULES):
        rng = np.random.default_rng(seed)
        drawn = random_options(rng, MAX_MODEL_LEN)
        if ranks != "one":
            depth = 2 if ranks == "two stages" else 1
            drawn |= {"async_scheduling": False, "pipeline_depth": depth, "threads": 1}
        if seed % 2:
            drawn["speculative_config"] = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
        script = random_script(rng, watched, VOCAB, 8, 20)
        core, trace = make_engine(model, counts, {**options, **drawn}, logits=False)
        try:
            play(core, trace, script)
        finally:
            core.shutdown()
        picked = {each.seed for each in script.requests}
        found = differences(expected, trace, [each for each in watched if each.seed in picked])
        assert not [line for line in found if "logits" not in line], (seed, drawn)
    assert counts["chunks"] > 20
    assert counts["most rows"] > 8
