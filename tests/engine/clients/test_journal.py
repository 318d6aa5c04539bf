"""The journal: its records suffice to continue, and clients never notice that another engine continues."""

import dataclasses

import numpy as np

from pagoda.base.sampling_params import SamplingParams
from pagoda.core.request import Request, RequestStatus
from pagoda.core.scheduler_output import EngineCoreOutputs, Finish, LogprobColumns
from pagoda.engine.clients.journal import Journal, error_outputs


def request(name: str, handle: int, n: int = 1, seed: int = 40) -> Request:
    return Request(name, np.arange(4, dtype=np.int32), SamplingParams(n=n, max_tokens=8), handle=handle, seed=seed)


def outputs(*rows: tuple[int, int, list[int]], finishes: tuple[Finish, ...] = ()) -> EngineCoreOutputs:
    return EngineCoreOutputs(
        handles=np.array([h for h, _, _ in rows], np.int64),
        sequences=np.array([b for _, b, _ in rows], np.int32),
        counts=np.array([len(t) for _, _, t in rows], np.int32),
        token_ids=np.array([x for _, _, t in rows for x in t], np.int32),
        finishes=finishes,
    )


def test_tokens_are_recorded_and_replayed_in_order() -> None:
    journal = Journal()
    a, b = journal.open(request("a", 1)), journal.open(request("b", 2))
    journal.record(outputs((1, 0, [5]), (2, 0, [6, 7])))
    journal.record(outputs((1, 0, [8])))
    assert [r.prior_output for r in journal.replay(a)] == [((5, 8),)]
    assert [r.prior_output for r in journal.replay(b)] == [((6, 7),)]
    assert [e.request.request_id for e in journal] == ["a", "b"]


def test_two_tokens_of_each_sequence_clear_the_suspicion() -> None:
    journal = Journal()
    one, three = journal.open(request("a", 1)), journal.open(request("b", 2, n=3))
    one.is_suspect = three.is_suspect = True
    prefill = outputs((1, 0, [5]), (2, 0, [7]), (2, 1, [8]), (2, 2, [9]))
    journal.record(prefill)
    assert (one.is_suspect, three.is_suspect) == (True, True)
    journal.record(prefill)
    assert (one.is_suspect, three.is_suspect) == (False, False)


def test_sequences_are_replayed_as_separate_requests_and_mapped_back() -> None:
    journal = Journal()
    entry = journal.open(request("a", 1, n=3))
    journal.record(outputs((1, 0, [5]), (1, 1, [6]), (1, 2, [7])))
    journal.record(outputs((1, 1, [9]), finishes=(Finish("a", 1, 1, RequestStatus.FINISHED_STOPPED),)))
    first, last = journal.replay(entry)
    assert (first.request_id, first.seed, first.prior_output) == (Journal.part_id("a", 0), 40, ((5,),))
    assert (last.request_id, last.seed, last.prior_output) == (Journal.part_id("a", 2), 42, ((7,),))
    assert first.num_seqs == last.num_seqs == 1
    assert journal.engine_sequence("a", 2) == (Journal.part_id("a", 2), 0)
    assert set(journal.engine_ids("a")) >= {Journal.part_id("a", 0), Journal.part_id("a", 2)}

    stop = RequestStatus.FINISHED_LENGTH_CAPPED
    told = journal.record(
        outputs(
            (last.handle, 0, [11]),
            (first.handle, 0, [10]),
            finishes=(
                Finish(Journal.part_id("a", 2), last.handle, 0, stop),
                Finish(Journal.part_id("a", 0), first.handle, 0, stop),
            ),
        )
    )
    assert told.handles.tolist() == [1, 1]
    assert told.sequences.tolist() == [2, 0]
    assert [(f.request_id, f.handle, f.sequence) for f in told.finishes] == [("a", 1, 2), ("a", 1, 0)]
    assert len(journal) == 0


def test_a_request_with_n_without_tokens_is_replayed_whole() -> None:
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


def test_an_error_ends_every_live_sequence_once() -> None:
    journal = Journal()
    entry = journal.open(request("a", 1, n=2))
    finishes = error_outputs(entry, "no").finishes
    assert [(f.sequence, f.message) for f in finishes] == [(0, "no"), (1, "no")]


def columns(*tokens: int) -> LogprobColumns:
    ids = np.array([[token] for token in tokens], np.int32)
    return LogprobColumns(ids, np.zeros(ids.shape, np.float32), np.ones(len(tokens), np.int32))


def told(journal: Journal, handle: int, *tokens: int) -> list[int]:
    step = dataclasses.replace(outputs(), prompt_logprobs={handle: columns(*tokens)})
    found = journal.record(step).prompt_logprobs
    return found[handle].token_ids[:, 0].tolist() if handle in found else []


def test_prompt_logprobs_sent_before_a_death_are_not_sent_again() -> None:
    journal = Journal()
    entry = journal.open(request("a", 1))
    assert told(journal, 1, 10, 11) == [10, 11]
    journal.replay(entry)  # the new engine begins the prompt again, in chunks of its own
    assert told(journal, 1, 10) == []
    assert told(journal, 1, 11, 12, 13) == [12, 13]
    journal.replay(entry)
    assert told(journal, 1, 10, 11, 12, 13) == []


def test_parts_of_one_request_do_not_silence_the_prompt_of_another() -> None:
    journal = Journal()
    entry = journal.open(request("a", 1, n=2))
    journal.open(request("b", 2))
    journal.record(outputs((1, 0, [5]), (1, 1, [6])))
    parts = journal.replay(entry)
    assert told(journal, parts[0].handle, 1, 2) == []
    assert told(journal, 2, 7, 8) == [7, 8]
