"""The cost model learns what it is shown, and knows recorded steps that it has not seen.

data/step_times.jsonl: CPU time of steps of smollm2-135m on one core of an AMD EPYC (Zen 5), every third step that
`benchmarks/step_costs.py --cpu-time --threads 1` wrote.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pagoda.core.cost_model import TERMS, CostModel, RowWork
from pagoda.core.kv import KVGroupKind, KVGroupSpec
from pagoda.core.scheduler_output import ModelRunnerOutput, SchedulerOutput


def chunks(start: list[int], num_new: list[int]) -> RowWork:
    return RowWork(np.array(start, np.int32), np.array(num_new, np.int32))


def recorded() -> list[tuple[RowWork, float]]:
    lines = (Path(__file__).parent / "data" / "step_times.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    return [(chunks(step["start"], step["num_new"]), step["compute_us"] / 1e6) for step in steps]


def true_s(step: RowWork) -> float:
    start, new = step.start.astype(float), step.num_new.astype(float)
    pairs, read = (new * (start + new / 2)).sum(), (start + new).sum()
    return float(0.01 + 0.0002 * len(start) + 0.0005 * new.sum() + 1e-6 * pairs + 2e-6 * read)


def fitted(groups: tuple[KVGroupSpec, ...] = ()) -> CostModel:
    rng = np.random.default_rng(3)
    costs = CostModel(groups)
    for _ in range(400):
        num_rows = int(rng.integers(1, 17))
        start, new = rng.integers(0, 2000, num_rows), np.ones(num_rows, np.int64)
        if rng.random() < 0.5:
            start[0], new[0] = rng.integers(0, 2000), rng.integers(2, 1000)
        step = chunks(start.tolist(), new.tolist())
        costs.observe_step(step, true_s(step))
    return costs


@pytest.mark.parametrize(
    "step",
    [
        chunks([500], [1]),
        chunks([100] * 16, [1] * 16),
        chunks([0], [900]),
        chunks([1900], [900]),
        chunks([0] + [1000] * 8, [300] + [1] * 8),
    ],
    ids=["decode", "decodes", "prompt", "long-prefix", "mixed"],
)
def test_steps_that_follow_the_terms_are_predicted(step: RowWork) -> None:
    predicted = fitted().terms_s([step]).sum()
    assert predicted == pytest.approx(true_s(step), rel=0.03)


def test_attention_over_a_long_prefix_costs_more() -> None:
    costs = fitted()
    assert costs.added_s(chunks([4000], [500])) > costs.added_s(chunks([0], [500])) + 0.9 * 500 * 4000 * 1e-6


def test_a_window_bounds_what_a_token_attends_to() -> None:
    costs = fitted((KVGroupSpec(KVGroupKind.WINDOW, 256),))
    far, near = (costs.terms_s([chunks([start], [64])])[0, TERMS.index("attention")] for start in (4000, 1000))
    assert far == near


def test_no_coefficient_is_negative_whatever_was_measured() -> None:
    rng = np.random.default_rng(5)
    costs = CostModel()
    for _ in range(200):
        costs.observe_step(chunks([int(rng.integers(0, 99))], [int(rng.integers(1, 999))]), float(rng.random()) + 1e-3)
    assert (costs.terms_s([chunks([7, 9], [200, 1])]) >= 0).all()


def test_pieces_of_the_token_price_that_no_step_reached_cost_what_the_last_one_does() -> None:
    costs = CostModel()
    for num_tokens in range(1, 100):
        costs.observe_step(chunks([0], [num_tokens]), 0.001 + 0.0001 * num_tokens)
    assert costs.added_s(chunks([0], [1000])) > 0.05


def test_few_disturbed_steps_hardly_change_the_fit() -> None:
    costs, step = CostModel(), chunks([0], [200])
    for number in range(200):
        size = chunks([0], [1 + number * 5 % 600])
        costs.observe_step(size, true_s(size) * (10 if number % 12 == 0 else 1))
    assert costs.terms_s([step]).sum() == pytest.approx(true_s(step), rel=0.1)


def test_recent_steps_replace_old_ones() -> None:
    costs, step = CostModel(), chunks([0], [100])
    for seconds in (1.0, 0.1):
        for _ in range(60):
            costs.observe_step(step, seconds)
    assert costs.terms_s([step]).sum() == pytest.approx(0.1, rel=0.01)


def test_the_same_measurements_give_the_same_answers() -> None:
    step = chunks([10, 20], [30, 1])
    assert (fitted().terms_s([step]) == fitted().terms_s([step])).all()


def test_the_time_of_an_encoder_is_told_from_that_of_tokens() -> None:
    costs, rng = fitted(), np.random.default_rng(5)
    for _ in range(40):
        step = replace(chunks([0], [int(rng.integers(1, 300))]), num_encoded=int(rng.integers(50, 500)))
        costs.observe_step(step, true_s(step) + 1e-4 * step.num_encoded)
    step = chunks([0], [100])
    assert costs.added_s(replace(step, num_encoded=200)) - costs.added_s(step) == pytest.approx(0.02, rel=0.1)
    assert costs.added_s(step) == pytest.approx(fitted().added_s(step), rel=0.1)


def test_steps_without_a_duration_are_left_out() -> None:
    costs, rows = CostModel(), np.zeros(1, np.int32)
    output = SchedulerOutput(1, rows, rows, rows + 50, rows, rows, 50)
    costs.observe(output, ModelRunnerOutput(1, rows[:, None], rows))
    assert costs.added_s(chunks([0], [50])) == 0.0


def test_recorded_steps_are_predicted_before_they_are_seen() -> None:
    costs, errors = CostModel(), list[float]()
    for number, (step, seconds) in enumerate(recorded()):
        if number >= 60:
            errors.append(abs(float(costs.terms_s([step]).sum()) / seconds - 1))
        costs.observe_step(step, seconds)
    assert np.median(errors) < 0.1
    assert np.percentile(errors, 90) < 0.35


# (tokens, measured ms of computing them again, blocks): the same machine and model, see docs/measurements/engine.md.
CASES = [(10, 2.73, 1), (34, 11.39, 3), (130, 47.61, 9), (514, 215.39, 33), (1502, 804.57, 94)]


@pytest.mark.parametrize("block_ms", [0.2, 1.0, 2.0, 2.6, 3.0, 3.6, 5.0])
def test_the_cheaper_side_is_chosen_on_recorded_cases(block_ms: float) -> None:
    """Copies took 0.1 to 0.4 ms per block, where swapping always wins; slower ones stand for a slower host."""
    costs = CostModel()
    for step, seconds in recorded():
        costs.observe_step(step, seconds)
    costs.observe_copies(100, 100 * block_ms / 1e3)
    lost_ms = 0.0
    for num_tokens, computed_ms, num_blocks in CASES:
        copied_ms = 2 * num_blocks * block_ms
        swaps = costs.swap_is_cheaper(chunks([0], [num_tokens]), num_blocks)
        lost_ms += (copied_ms if swaps else computed_ms) - min(copied_ms, computed_ms)
    assert lost_ms <= 0.05 * sum(min(2 * num_blocks * block_ms, ms) for _, ms, num_blocks in CASES)
