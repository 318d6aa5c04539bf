"""Whole engines that draft: on the fake executor, every token is what it is without drafts."""

from typing import Any

import numpy as np
import pytest

from pagoda.base.sampling_params import SamplingParams
from pagoda.core.scheduler_output import SchedulerOutput
from pagoda.engine.executor import Executor
from pagoda.executors.fake import FakeExecutor
from pagoda.worker.speculation.drafter import GRADE_OF_MODEL, Draft, Drafter
from pagoda.worker.speculation.lookup import NgramDrafter, SuffixDrafter
from pagoda.worker.speculation.speculator import Speculator
from pagoda.worker.table_mirror import TableMirror
from tests.engine.driver import Answers, drive, make_core, request
from tests.worker.hand_made import draft_setup

VOCAB = 2  # of the fake model: half of all guesses are right


class Clock:
    """A clock that moves on with every look: the same decisions in every run."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1e-3
        return self.now_s


DRAFTERS: dict[str, Drafter] = {
    "ngram": NgramDrafter(1, 4),
    "suffix": SuffixDrafter(max_spec_factor=4),
}


def run(drafter: Drafter | None, adaptive: bool = False, **options: Any) -> tuple[Answers, object]:
    def executor(max_rows: int) -> Executor:
        speculator = None
        if drafter is not None:
            ahead = options.get("pipeline_depth", 1) - 1
            speculator = Speculator(draft_setup(4, ahead, adaptive), drafter, 64, max_rows, now=Clock())
        return FakeExecutor(max_rows, 64 + 5, 4, vocab_size=VOCAB, speculator=speculator)

    waits = drafter is not None and bool(options.get("async_scheduling"))
    core = make_core(
        executor, vocab_size=VOCAB, max_model_len=64, check_invariants=True, waits_for_drafts=waits, **options
    )
    rng = np.random.default_rng(0)
    kinds = [SamplingParams(max_tokens=30), SamplingParams(max_tokens=7, n=3), SamplingParams(max_tokens=100)]
    requests = [request(i, rng.integers(0, 2, 5 + i).tolist(), kinds[i % 3], seed=i) for i in range(7)]
    answers = drive(core, requests)
    return answers, core.make_stats()


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_blocks": 20},
        {"num_blocks": 20, "num_host_blocks": 30},
        {"max_num_batched_tokens": 9, "max_num_seqs": 9},
        {"pipeline_depth": 2},
        {"pipeline_depth": 2, "async_scheduling": True},
        {"pipeline_depth": 3, "async_scheduling": True, "num_blocks": 20, "num_host_blocks": 30},
    ],
    ids=["roomy", "preempting", "swapping", "small steps", "two in flight", "async", "async, three in flight"],
)
def test_drafts_change_no_token(name: str, options: dict[str, Any]) -> None:
    expected, _ = run(None)
    got, stats = run(DRAFTERS[name], **options)
    assert got.tokens == expected.tokens
    assert {key: end.status for key, end in got.finishes.items()} == {
        key: end.status for key, end in expected.finishes.items()
    }
    assert 0 < stats.accepted_tokens < stats.drafted_tokens  # type: ignore[attr-defined]
    assert sum(stats.accepted_tokens_per_pos) == stats.accepted_tokens  # type: ignore[attr-defined]
    assert got.num_accepted == stats.accepted_tokens  # type: ignore[attr-defined]
    assert got.num_drafted == stats.drafted_tokens  # type: ignore[attr-defined]


class Scripted:
    """Drafts a wrong token for every row in some steps, and nothing in the others."""

    def __init__(self, runs_model: bool = False) -> None:
        self.runs_model = runs_model
        self.is_on = False
        self.num_asked = 0

    def apply(self, output: SchedulerOutput, table: TableMirror) -> None:
        pass

    def propose(self, table: TableMirror, rows: np.ndarray, most: np.ndarray) -> list[Draft]:
        self.num_asked += 1
        tokens = np.full(int(self.is_on or self.runs_model), 7, np.int32)
        return [Draft(tokens) for _ in rows]


@pytest.mark.parametrize("depth", [2, 3])
def test_steps_are_scheduled_ahead_while_nothing_is_drafted(depth: int) -> None:
    drafter = Scripted()

    def executor(max_rows: int) -> Executor:
        speculator = Speculator(draft_setup(4, depth - 1), drafter, 256, max_rows, now=Clock())
        return FakeExecutor(max_rows, 256 + 5, 4, vocab_size=1000, speculator=speculator)

    core = make_core(executor, pipeline_depth=depth, async_scheduling=True, waits_for_drafts=True)
    core.add_request(request(0, [5, 6, 7], SamplingParams(max_tokens=200)))

    def num_in_flight(num_steps: int) -> list[int]:
        after: list[int] = []
        for _ in range(num_steps):
            core.step()
            after.append(len(core._in_flight))
        return after

    assert num_in_flight(4) == [0] * 4, "each result may have drafts"
    assert num_in_flight(12)[4:] == [depth - 1] * 8, "no longer: the next steps do not wait for them"
    drafter.is_on = True
    num_in_flight(2 * depth)
    drafted_before = core.make_stats().drafted_tokens
    assert num_in_flight(6) == [0] * 6
    assert core.make_stats().drafted_tokens - drafted_before >= 5, "used as soon as they were proposed"
    drafter.is_on = False
    assert num_in_flight(16)[-4:] == [depth - 1] * 4


def test_a_model_is_not_run_for_drafts_that_could_not_be_used() -> None:
    drafter = Scripted(runs_model=True)
    speculator = Speculator(draft_setup(4, 1), drafter, 64, 4, now=Clock())
    table = TableMirror(4, 64, 4, 1)
    rows, one = np.zeros(1, np.int32), np.ones(1, np.int32)
    speculator._length_limit[0] = 0  # like a prompt that is computed in chunks
    for step in range(1, 5):
        assert not speculator.finish_step(SchedulerOutput(step, rows, rows, one, rows, rows, 1), table, one, {})
    assert speculator.no_drafts_until == 5
    speculator._length_limit[0] = 50
    assert not speculator.finish_step(SchedulerOutput(5, rows, rows, one, rows, rows, 1), table, one, {})
    assert (drafter.num_asked, speculator.no_drafts_until) == (0, 5)
    assert speculator.finish_step(SchedulerOutput(6, rows, rows, one, rows, rows, 1), table, one, {})
    assert drafter.num_asked == 1


@pytest.mark.parametrize(
    ("start", "state_groups", "counts"),
    [(3, (0,), True), (2, (0,), False), (3, (), False)],
    ids=["decodes", "the end of a prompt", "resumed, without states"],
)
def test_what_states_compute_again_is_part_of_what_drafts_cost(
    start: int, state_groups: tuple[int, ...], counts: bool
) -> None:
    speculator = Speculator(draft_setup(4, adaptive=True), Scripted(), 64, 4, now=Clock())
    table = TableMirror(4, 64, 4, 1, state_groups=state_groups)
    table.num_prompt[0] = 3
    rows, one, drafts = np.zeros(1, np.int32), np.ones(1, np.int32), {0: np.full(2, 7, np.int32)}
    output = SchedulerOutput(1, rows, start * one, 5 * one, rows, rows, 5, drafts=drafts)
    speculator.finish_step(output, table, one, {})
    assert speculator._controller is not None
    assert speculator._controller._since_plain == counts


def test_what_a_model_drafts_is_verified() -> None:
    """To choose fewer of its drafts afterwards would be too late: making them is what they cost."""
    now_s = 0.0

    class Slow:
        """Makes drafts of two wrong tokens in a tenth of a step."""

        runs_model = True
        num_drafted = 0

        def apply(self, output: SchedulerOutput, table: TableMirror) -> None:
            nonlocal now_s
            now_s += 10e-3

        def propose(self, table: TableMirror, rows: np.ndarray, most: np.ndarray) -> list[Draft]:
            nonlocal now_s
            now_s += 1e-3
            self.num_drafted += int(most.sum())
            return [Draft(np.full(count, 7, np.int32), GRADE_OF_MODEL) for count in most.tolist()]

    drafter = Slow()

    def executor(max_rows: int) -> Executor:
        speculator = Speculator(draft_setup(2, adaptive=True), drafter, 1024, max_rows, now=lambda: now_s)
        return FakeExecutor(max_rows, 1024 + 5, 4, vocab_size=1000, speculator=speculator)

    core = make_core(executor, max_num_seqs=1, num_blocks=300, max_model_len=1024)
    drive(core, [request(0, [5, 6, 7], SamplingParams(max_tokens=900))])
    assert 0 < drafter.num_drafted == core.make_stats().drafted_tokens < 80


@pytest.mark.parametrize(
    ("step_s", "longest", "measured"),
    [(0.01, 100, {1, 2, 3, 4, 6, 8}), (0.01, 9, {1, 2, 3, 4}), (2.0, 100, {1, 4})],
    ids=["all", "short rows", "slow model"],
)
def test_steps_are_measured_before_the_first_request(step_s: float, longest: int, measured: set[int]) -> None:
    """Within a time limit, and the fastest of each size counts."""
    now_s, ran = 0.0, dict[int, int]()

    def run_step(count: int, most: int, start: int) -> None:
        nonlocal now_s
        assert most == 9
        assert start + count <= longest
        ran[count] = ran.get(count, 0) + 1
        now_s += step_s * (1 + count / 10) + (0.02 if ran[count] == 1 and len(ran) > 2 else 0.0)

    speculator = Speculator(draft_setup(8, adaptive=True), Scripted(), 64, 1, now=lambda: now_s)
    speculator.measure_steps(run_step, 1, longest)
    assert set(ran) == measured
    controller = speculator._controller
    assert controller is not None
    for _ in range(2):
        controller.observe_step(1, 0, 1, step_s * 1.1)
    costs = controller._times_of(1).costs(3)
    assert costs[3] / costs[0] == pytest.approx(1.4 / 1.1)
    fixed = Speculator(draft_setup(8), Scripted(), 64, 1)
    fixed.measure_steps(lambda *_: pytest.fail("not needed"), 1, 64)


def test_drafts_save_steps() -> None:
    plain, _ = run(None)
    drafted, _ = run(NgramDrafter(1, 4))
    assert drafted.num_steps < plain.num_steps


def test_the_controller_repeats_its_decisions() -> None:
    first, first_stats = run(NgramDrafter(1, 4), adaptive=True)
    second, second_stats = run(NgramDrafter(1, 4), adaptive=True)
    assert first.num_steps == second.num_steps
    assert first_stats == second_stats
    assert first.tokens == run(None)[0].tokens


def test_no_draft_goes_beyond_the_last_token() -> None:
    """The drafter is asked for what can still be emitted, not for more."""
    asked: list[int] = []

    class Asked(NgramDrafter):
        def propose(self, table, rows, most):  # type: ignore[no-untyped-def]
            asked.extend((table.num_tokens[rows] + most).tolist())
            return super().propose(table, rows, most)

    run(Asked(1, 4), max_num_seqs=1)
    assert max(asked) <= 63
