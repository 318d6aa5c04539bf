"""The journal: what it writes down is enough to go on, and clients never see that someone else goes on."""

import numpy as np

from pagoda.base.sampling_params import SamplingParams
from pagoda.core.request import Request, RequestStatus
from pagoda.core.scheduler_output import EngineCoreOutputs, Finish
from pagoda.engine.journal import Journal, error_outputs


def request(name: str, handle: int, n: int = 1, seed: int = 40) -> Request:
    return Request(name, np.arange(4, dtype=np.int32), SamplingParams(n=n, max_tokens=8), handle=handle, seed=seed)


def outputs(*rows: tuple[int, int, list[int]], finishes: tuple[Finish, ...] = ()) -> EngineCoreOutputs:
    return EngineCoreOutputs(
        handles=np.array([h for h, _, _ in rows], np.int64),
        branches=np.array([b for _, b, _ in rows], np.int32),
        counts=np.array([len(t) for _, _, t in rows], np.int32),
        token_ids=np.array([x for _, _, t in rows for x in t], np.int32),
        finishes=finishes,
    )


def test_tokens_are_written_down_and_replayed_in_order() -> None:
    journal = Journal()
    a, b = journal.open(request("a", 1)), journal.open(request("b", 2))
    journal.record(outputs((1, 0, [5]), (2, 0, [6, 7])))
    journal.record(outputs((1, 0, [8])))
    assert [r.prior_output for r in journal.replay(a)] == [((5, 8),)]
    assert [r.prior_output for r in journal.replay(b)] == [((6, 7),)]
    assert [e.request.request_id for e in journal] == ["a", "b"]


def test_tokens_clear_the_suspicion() -> None:
    journal = Journal()
    entry = journal.open(request("a", 1))
    entry.strikes = 1
    journal.record(outputs((1, 0, [5])))
    assert entry.is_on_probation
    journal.record(outputs((1, 0, [6])))
    assert not entry.is_on_probation


def test_branches_come_back_as_requests_of_their_own_and_look_like_branches() -> None:
    journal = Journal()
    entry = journal.open(request("a", 1, n=3))
    journal.record(outputs((1, 0, [5]), (1, 1, [6]), (1, 2, [7])))
    journal.record(
        outputs((1, 1, [9]), finishes=(Finish("a", 1, 1, RequestStatus.FINISHED_STOPPED, request_done=False),))
    )
    first, last = journal.replay(entry)
    assert (first.request_id, first.seed, first.prior_output) == ("a#0", 40, ((5,),))
    assert (last.request_id, last.seed, last.prior_output) == ("a#2", 42, ((7,),))
    assert first.num_branches == last.num_branches == 1
    assert journal.engine_branch("a", 2) == ("a#2", 0)
    assert set(journal.engine_ids("a")) >= {"a#0", "a#2"}

    stop = RequestStatus.FINISHED_LENGTH_CAPPED
    told = journal.record(
        outputs(
            (last.handle, 0, [11]),
            (first.handle, 0, [10]),
            finishes=(Finish("a#2", last.handle, 0, stop), Finish("a#0", first.handle, 0, stop)),
        )
    )
    assert told.handles.tolist() == [1, 1]
    assert told.branches.tolist() == [2, 0]
    assert [(f.request_id, f.handle, f.branch, f.request_done) for f in told.finishes] == [
        ("a", 1, 2, False),
        ("a", 1, 0, True),
    ]
    assert len(journal) == 0


def test_a_branched_request_without_tokens_is_replayed_whole() -> None:
    journal = Journal()
    entry = journal.open(request("a", 1, n=2))
    assert journal.replay(entry) == [entry.request]


def test_aborted_requests_are_forgotten_with_their_aliases() -> None:
    journal = Journal()
    entry = journal.open(request("a", 1, n=2))
    journal.record(outputs((1, 0, [5]), (1, 1, [6])))
    parts = journal.replay(entry)
    journal.close("a")
    journal.record(outputs((parts[0].handle, 0, [7])))  # crossed the abort
    assert "a" not in journal
    assert journal.engine_ids("a") == ["a"]


def test_an_error_ends_every_live_branch_once() -> None:
    journal = Journal()
    entry = journal.open(request("a", 1, n=2))
    finishes = error_outputs(entry, "no").finishes
    assert [(f.branch, f.request_done, f.message) for f in finishes] == [(0, False, "no"), (1, True, "no")]
