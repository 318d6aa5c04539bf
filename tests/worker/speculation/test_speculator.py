"""Whole engines that draft: on the fake executor, every token is what it is without drafts."""

import numpy as np
import pytest

from pagoda.base.sampling_params import SamplingParams
from pagoda.core.executor import Executor
from pagoda.executors.fake import FakeExecutor
from pagoda.worker.drafters.drafter import Drafter
from pagoda.worker.drafters.ngram import NgramDrafter
from pagoda.worker.drafters.suffix import SuffixDrafter, SuffixSettings
from pagoda.worker.speculation.controller import DraftController
from pagoda.worker.speculation.speculator import Speculator
from tests.engine.driver import Answers, drive, make_core, request

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
    "suffix": SuffixDrafter(SuffixSettings(max_spec_factor=4)),
}


def run(drafter: Drafter | None, adaptive: bool = False, **options: object) -> tuple[Answers, object]:
    def executor(max_rows: int) -> Executor:
        speculator = None
        if drafter is not None:
            controller = DraftController(max_rows, 4) if adaptive else None
            speculator = Speculator(drafter, controller, 4, 64, max_rows, Clock())
        return FakeExecutor(max_rows, 64 + 5, 4, vocab_size=VOCAB, speculator=speculator)

    core = make_core(executor, vocab_size=VOCAB, max_model_len=64, check_invariants=True, **options)
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
    ],
    ids=["roomy", "preempting", "swapping", "small steps", "two in flight", "async"],
)
def test_drafts_change_no_token(name: str, options: dict[str, object]) -> None:
    expected, _ = run(None)
    got, stats = run(DRAFTERS[name], **options)
    assert got.tokens == expected.tokens
    assert {key: end.status for key, end in got.finishes.items()} == {
        key: end.status for key, end in expected.finishes.items()
    }
    if "async_scheduling" not in options:  # a row's drafts wait for its token in flight, so they are dropped
        assert 0 < stats.accepted_tokens < stats.drafted_tokens  # type: ignore[attr-defined]
        assert sum(stats.accepted_tokens_per_pos) == stats.accepted_tokens  # type: ignore[attr-defined]
        of_requests = {name: end for (name, _), end in got.finishes.items() if end.request_done}
        assert sum(end.num_accepted_tokens for end in of_requests.values()) == stats.accepted_tokens  # type: ignore[attr-defined]
        assert sum(end.num_draft_tokens for end in of_requests.values()) == stats.drafted_tokens  # type: ignore[attr-defined]


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
