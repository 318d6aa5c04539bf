"""The controller on a virtual clock: it drafts where that is faster, and stops where it is not."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from pagoda.worker.speculation.controller import MIN_GAIN, DraftController, best_lengths
from pagoda.worker.speculation.drafter import GRADE_OF_MODEL, grade_of_match

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
    first_drafts_s: Sequence[float] = (),
) -> Outcome:
    """accepts: step -> probability that a drafted token is right.   found: how often there is anything to propose.

    first_drafts_s: what the first drafts take.
    """
    late = list(first_drafts_s)
    rng = np.random.default_rng(0)
    controller = controller or DraftController(rows, most)
    ids, grades = np.arange(rows, dtype=np.int32), [GRADE_OF_MODEL] * rows
    lengths, draft_s = np.zeros(rows, np.int32), 0.0
    outcome = Outcome(0.0, 0.0, 0, 0)
    for number in range(steps):
        emitted = 0
        for row, length in enumerate(lengths.tolist()):
            wrong = np.flatnonzero(rng.random(length) >= accepts(number))
            accepted = int(wrong[0]) if wrong.size else length
            if length:
                controller.observe_draft(row, GRADE_OF_MODEL, length, accepted)
            emitted += 1 + accepted
            outcome.num_accepted += accepted
        drafted = int(lengths.sum())
        took_s = step_s(rows, drafted) * (1 + noise * rng.standard_normal()) + draft_s
        controller.observe_step(rows, drafted, emitted, took_s)
        outcome.seconds += took_s
        outcome.plain_s += step_s(rows, 0) * emitted / rows
        outcome.num_drafted += drafted
        lengths = np.where(rng.random(rows) < found, most, 0).astype(np.int32)
        if not controller.begin_choice(rows):
            lengths[:] = 0
        elif lengths.any():
            lengths = np.array(controller.choose(rows, ids, lengths.tolist(), grades), np.int32)
        draft_s = draft_s_per_token * int(lengths.sum())
        if late and lengths.any():
            draft_s = late.pop(0)
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


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("first", [(0.1, 0.1), (0.04, 0.3), (0.006, 0.3), (5.0, 0.3)], ids=str)
def test_drafts_that_were_slow_at_first_are_made_again(first: tuple[float, ...], rows: int) -> None:
    """Kernels were compiled and graphs captured: that is not what drafts cost."""
    drafted = []
    for first_drafts_s in ((), first):
        controller = DraftController(rows, 8)
        controller.set_profile({count: memory_bound(0, count) for count in (1, 4, 16)})
        outcome = play(
            memory_bound, lambda _: 0.9, rows, 2000, draft_s_per_token=1.5e-3 / rows, controller=controller,
            first_drafts_s=first_drafts_s,
        )  # fmt: skip
        drafted.append(outcome.num_drafted)
    assert drafted[1] > 0.5 * drafted[0] > 2000, drafted


def test_drafts_that_are_always_slow_are_hardly_made() -> None:
    """Doubt about what they cost lets some be made again."""
    outcome = play(memory_bound, lambda _: 0.9, steps=4000, draft_s_per_token=50e-3)
    assert outcome.speed > 0.97
    assert outcome.num_drafted < 40


def test_deciding_against_drafts_costs_next_to_nothing() -> None:
    """It passes in every step. Counted as a loss it used up the credit, and next to nothing was drafted again."""
    controller = DraftController(1, 8)
    for _ in range(1000):
        controller.observe_step(1, 0, 1, 0.0103)
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
        chosen = best_lengths(survival.tolist(), most.tolist(), costs.tolist())

        def speed(lengths: np.ndarray, survival: np.ndarray = survival, costs: np.ndarray = costs) -> float:
            gains = sum(s**j for s, k in zip(survival, lengths, strict=True) for j in range(1, k + 1))
            return float((len(survival) + gains) / costs[int(sum(lengths))])

        best = max(speed(np.array(each)) for each in np.ndindex(*(most + 1)))
        plain = num_rows / costs[0]
        if best >= MIN_GAIN * plain:
            assert speed(np.array(chosen)) == pytest.approx(best)
        else:
            assert not any(chosen)


def costs(controller: DraftController, rows: int, most: int) -> list[float]:
    """Of steps with 0 .. `most` drafts."""
    return controller._times_of(rows).costs(most)


def test_costs_without_a_profile_are_guessed_and_corrected() -> None:
    controller = DraftController(1, 8)
    controller.observe_step(1, 0, 1, 10e-3)
    assert costs(controller, 1, 4) == []  # one plain step says too little
    for _ in range(2):
        controller.observe_step(1, 0, 1, 10e-3)
    assert costs(controller, 1, 1) == pytest.approx([10e-3, 11.5e-3])  # a first guess
    controller.observe_step(1, 0, 1, 1.0)  # one slow step changes nothing
    controller.observe_step(1, 4, 1, 14e-3)
    found = costs(controller, 1, 8)
    assert [found[count] for count in (0, 2, 4, 8)] == pytest.approx([10e-3, 12e-3, 14e-3, 18e-3])
    assert costs(controller, 64, 1) == []  # another batch size


def test_costs_have_the_form_that_was_measured_at_start() -> None:
    controller = DraftController(8, 8)
    controller.set_profile({1: 10e-3, 4: 10e-3, 8: 20e-3})
    for _ in range(2):
        controller.observe_step(1, 0, 1, 12e-3)  # in a long context
    expected = [12e-3] * 4 + [15e-3, 18e-3, 21e-3, 24e-3, 27e-3, 30e-3]
    assert costs(controller, 1, 9) == pytest.approx(expected)
    for _ in range(2):
        controller.observe_step(1, 3, 1, 18e-3)
        assert costs(controller, 1, 9) == pytest.approx(expected)  # it may have been held up
    controller.observe_step(1, 3, 1, 18e-3)  # dearer than expected: so is each draft
    assert costs(controller, 1, 9) == pytest.approx([cost + 2e-3 * count for count, cost in enumerate(expected)])
    for _ in range(2):
        controller.observe_step(8, 0, 8, 20e-3)
    assert costs(controller, 8, 2) == pytest.approx([20e-3, 22.5e-3, 25e-3])  # every token costs a batch of 8 the same


# Milliseconds of a step over 1, 2, .. tokens of one row, measured with AVX2 before panels were prefetched. Three tokens
# cost nearly twice as much as one.
EXPENSIVE = [24.2, 26.3, 42.6, 45.7, 49.5, 52.0, 40.6, 41.6, 44.0]


def expensive(_: int, drafts: int) -> float:
    return EXPENSIVE[drafts] * 1e-3


@dataclass(frozen=True)
class Stream:
    """One request of `length` tokens.

    matches: position -> grade of what the drafter finds there, None if nothing.   right: position -> whether a draft of
        the token there is right.
    """

    length: int
    matches: Callable[[int], int | None]
    right: Callable[[int], bool]


def stream_seconds(stream: Stream, controller: DraftController, step_s: StepTime, most: int = 8) -> list[float]:
    """Return the time at which each token of the request was there."""
    row = np.zeros(1, np.int32)
    controller.forget(0)
    at, now_s, length, grade = 0, 0.0, 0, 0
    times: list[float] = []
    while at < stream.length:
        accepted = 0
        while accepted < length and stream.right(at + accepted):
            accepted += 1
        if length:
            controller.observe_draft(0, grade, length, accepted)
        now_s += step_s(1, length)
        controller.observe_step(1, length, 1 + accepted, step_s(1, length))
        times += [now_s] * (1 + accepted)
        at += 1 + accepted
        found, room = stream.matches(at), min(most, stream.length - at - 1)
        length = 0
        if controller.begin_choice(1) and room > 0 and found is not None:
            grade = found
            length = controller.choose(1, row, [room], [grade])[0]
    return times


@pytest.mark.parametrize("length", [20, 84, 500])
@pytest.mark.parametrize(("share", "grade"), [(0.1, 2), (0.5, 0), (1.0, 5)])
@pytest.mark.parametrize("profiled", [True, False])
@pytest.mark.parametrize("step_s", [expensive, memory_bound, compute_bound])
def test_no_request_that_copies_nothing_loses_more_than_two_percent(
    length: int, share: float, grade: int, profiled: bool, step_s: StepTime
) -> None:
    """Even if matches are long; alone, and the third of three. Without a profile, the first drafts teach the costs."""
    rng = np.random.default_rng(length)
    found = rng.random(length + 1) < share
    stream = Stream(length, lambda at: grade if found[at] else None, lambda _: False)
    controller = DraftController(1, 8)
    if profiled:
        controller.set_profile({count: step_s(1, count - 1) for count in (1, 2, 3, 4, 6, 8)})
    slack = 1.02 if profiled else 1.05
    plain_s = length * step_s(1, 0)
    for _ in range(3):
        assert stream_seconds(stream, controller, step_s)[-1] <= slack * plain_s


def test_a_request_that_copies_nothing_does_not_pay_for_one_that_did() -> None:
    controller = DraftController(1, 8)
    controller.set_profile({count: expensive(1, count - 1) for count in (1, 2, 3, 4, 6, 8)})
    copying = Stream(500, lambda _: 5, lambda _: True)
    stream_seconds(copying, controller, expensive)
    for length in (20, 84):
        nothing = Stream(length, lambda _: 5, lambda _: False)
        assert stream_seconds(nothing, controller, expensive)[-1] <= 1.02 * length * expensive(1, 0)


@pytest.mark.parametrize("step_s", [expensive, memory_bound])
@pytest.mark.parametrize(("every", "least"), [(0, 0.95), (30, 0.9)])
def test_a_request_that_copies_is_soon_as_fast_as_it_can_be(step_s: StepTime, every: int, least: float) -> None:
    """every: tokens between two that are changed, after which the match is short again; 0 for none.

    The oracle knows where the changes are, and drafts up to them.
    """
    length, first = 600, 100

    def right(at: int) -> bool:
        return not every or at % every != 0

    def copied(at: int) -> int:
        """Tokens since the last change."""
        return (at - 1) % every if every else 1000

    def matches(at: int) -> int | None:
        return grade_of_match(copied(at)) if copied(at) >= 2 else None

    # The oracle's time from each position to the end.
    best = [0.0] * (length + 10)
    for at in range(length - 1, -1, -1):
        best[at] = step_s(1, 0) + best[at + 1]
        for drafts in range(1, 9):
            if matches(at) is None or not right(at + drafts - 1):
                break
            best[at] = min(best[at], step_s(1, drafts) + best[at + drafts + 1])
    controller = DraftController(1, 8)
    controller.set_profile({count: step_s(1, count - 1) for count in (1, 2, 3, 4, 6, 8, 9)})
    times = stream_seconds(Stream(length, matches, right), controller, step_s)
    taken_s = times[-1] - times[first - 1]
    assert best[first] >= least * taken_s
