"""The controller on a virtual clock: it drafts where that is faster, and stops where it is not."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from pagoda.worker.speculation.controller import DraftController
from pagoda.worker.speculation.lengths import MIN_GAIN, best_lengths
from pagoda.worker.speculation.step_costs import StepCosts

StepTime = Callable[[int, int], float]


def memory_bound(rows: int, drafts: int) -> float:
    """A machine that waits for weights: tokens are cheap."""
    return 10e-3 + 0.2e-3 * (rows + drafts)


def compute_bound(rows: int, drafts: int) -> float:
    """A machine on which every token costs the same."""
    return 1e-3 * (rows + drafts) + 0.5e-3


@dataclass
class Outcome:
    """seconds: of the whole run.   plain_s: what the same tokens take without drafts."""

    seconds: float
    plain_s: float
    num_drafted: int
    num_accepted: int

    @property
    def speed(self) -> float:
        return self.plain_s / self.seconds


def play(
    step_s: StepTime,
    accepts: Callable[[int], float],
    rows: int = 1,
    steps: int = 400,
    most: int = 8,
    draft_s_per_token: float = 0.0,
    noise: float = 0.0,
    controller: DraftController | None = None,
    found: float = 1.0,
) -> Outcome:
    """accepts: step -> probability that a drafted token is right.   found: how often there is anything to propose."""
    rng = np.random.default_rng(0)
    controller = controller or DraftController(rows, most)
    ids, room = np.arange(rows, dtype=np.int32), np.full(rows, 1000, np.int32)
    lengths, draft_s = np.zeros(rows, np.int32), 0.0
    outcome = Outcome(0.0, 0.0, 0, 0)
    for number in range(steps):
        emitted = 0
        for row, length in enumerate(lengths.tolist()):
            wrong = np.flatnonzero(rng.random(length) >= accepts(number))
            accepted = int(wrong[0]) if wrong.size else length
            if length:
                controller.observe_draft(row, 2, length, accepted)
            emitted += 1 + accepted
            outcome.num_accepted += accepted
        drafted = int(lengths.sum())
        took_s = step_s(rows, drafted) * (1 + noise * rng.standard_normal()) + draft_s
        controller.observe_step(rows, drafted, emitted, took_s, draft_s)
        outcome.seconds += took_s
        outcome.plain_s += step_s(rows, 0) * emitted / rows
        outcome.num_drafted += drafted
        planned = controller.plan(ids, room)
        lengths = np.where(rng.random(rows) < found, planned, 0).astype(np.int32)
        draft_s = draft_s_per_token * int(lengths.sum())
        controller.observe_drafting(int(lengths.sum()), draft_s)
        lengths = controller.trim(ids, lengths, np.full(rows, 2))
    return outcome


def test_copying_is_fast_and_what_is_never_right_costs_next_to_nothing() -> None:
    copying = play(memory_bound, lambda _: 0.95)
    assert copying.speed > 3
    hopeless = play(memory_bound, lambda _: 0.0, steps=2000)
    assert hopeless.speed > 0.985
    assert hopeless.num_drafted < 400


@pytest.mark.parametrize("accepted", [0.0, 0.2, 0.4, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("step_s", [memory_bound, compute_bound])
@pytest.mark.parametrize("rows", [1, 4, 64])
def test_drafting_is_never_slower_than_decoding(accepted: float, step_s: StepTime, rows: int) -> None:
    outcome = play(step_s, lambda _: accepted, rows, steps=1500 if rows < 64 else 400, noise=0.03)
    assert outcome.speed > 0.98, outcome


def test_a_large_batch_on_a_slow_machine_drafts_next_to_nothing() -> None:
    outcome = play(compute_bound, lambda _: 0.6, rows=64, steps=300)
    assert outcome.num_drafted < 0.01 * 64 * 300


def test_expensive_drafts_are_made_only_if_they_pay() -> None:
    cheap = play(memory_bound, lambda _: 0.7, draft_s_per_token=0.1e-3)
    dear = play(memory_bound, lambda _: 0.7, draft_s_per_token=9e-3, steps=1000)
    assert cheap.speed > 1.5
    assert dear.speed > 0.98
    assert dear.num_drafted < cheap.num_drafted / 4


def test_deciding_against_drafts_costs_next_to_nothing() -> None:
    """It passes in every step. Counted as a loss it used up the credit, and next to nothing was drafted again."""
    controller = DraftController(1, 8)
    for _ in range(1000):
        controller.observe_step(1, 0, 1, 0.01, 0.0003)
    outcome = play(memory_bound, lambda _: 0.5, controller=controller, draft_s_per_token=0.0003)
    assert outcome.speed > 1.4


def test_probes_notice_that_the_text_has_changed() -> None:
    outcome = play(memory_bound, lambda step: 0.0 if step < 500 else 0.95, steps=1500)
    assert outcome.num_accepted > 1500


def test_it_stops_when_the_text_has_changed() -> None:
    controller = DraftController(1, 8)
    play(memory_bound, lambda _: 0.95, steps=300, controller=controller)
    after = play(memory_bound, lambda _: 0.0, steps=1000, controller=controller)
    assert after.speed > 0.96  # 0.25 s of credit may be spent once


def test_the_same_times_give_the_same_decisions() -> None:
    assert play(memory_bound, lambda _: 0.6, rows=3) == play(memory_bound, lambda _: 0.6, rows=3)


def test_lengths_are_the_best_of_all() -> None:
    """Compared with every combination."""
    rng = np.random.default_rng(3)
    for _ in range(200):
        num_rows = int(rng.integers(1, 4))
        survival, most = rng.uniform(0, 1, num_rows), rng.integers(0, 5, num_rows).astype(np.int32)
        costs = np.cumsum(rng.uniform(0, 0.4, 16)) + 1
        chosen = best_lengths(survival, most, costs)

        def speed(lengths: np.ndarray, survival: np.ndarray = survival, costs: np.ndarray = costs) -> float:
            gains = sum(s**j for s, k in zip(survival, lengths, strict=True) for j in range(1, k + 1))
            return float((len(survival) + gains) / costs[int(sum(lengths))])

        best = max(speed(np.array(each)) for each in np.ndindex(*(most + 1)))
        plain = num_rows / costs[0]
        if best >= MIN_GAIN * plain:
            assert speed(chosen) == pytest.approx(best)
        else:
            assert not chosen.any()


def test_costs_between_and_beyond_what_was_measured() -> None:
    costs = StepCosts()
    assert costs.curve(1, 4) is None
    for _ in range(3):
        costs.observe(1, 0, 10e-3)
    assert costs.curve(1, 1) == pytest.approx([10e-3, 11.5e-3])  # a first guess
    costs.observe(1, 0, 1.0)  # one slow step changes nothing
    costs.observe(1, 4, 14e-3)
    assert costs.curve(1, 4) == pytest.approx([10e-3, 11e-3, 12e-3, 13e-3, 14e-3])
    beyond = costs.curve(1, 8)
    assert beyond is not None
    assert beyond[8] == pytest.approx(24e-3)  # a quarter of what a row costs
    assert costs.curve(64, 1) is None  # other batch sizes are other shapes
