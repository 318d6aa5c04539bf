"""The journal: its records suffice to continue, and clients never notice that another engine continues."""

import dataclasses
from typing import Any

import numpy as np

from pagoda.base.sampling_params import SamplingParams
from pagoda.core.events import Admitted, Ended, Events, Preempted
from pagoda.core.request import AdmitKind, Request, RequestStatus
from pagoda.core.scheduler_output import EngineCoreOutputs, LogprobColumns
from pagoda.engine.clients.journal import Journal, JournalEntry, error_outputs


def entry_of(name: str, handle: int, n: int = 1, seed: int = 40) -> JournalEntry:
    params = SamplingParams(n=n, max_tokens=8)
    return JournalEntry.of(Request(name, np.arange(4, dtype=np.int32), params, handle=handle, seed=seed))


def outputs(*rows: tuple[int, int, list[int]], ends: tuple[Any, ...] = ()) -> EngineCoreOutputs:
    return EngineCoreOutputs(
        handles=np.array([h for h, _, _ in rows], np.int64),
        sequences=np.array([b for _, b, _ in rows], np.int32),
        counts=np.array([len(t) for _, _, t in rows], np.int32),
        token_ids=np.array([x for _, _, t in rows for x in t], np.int32),
        events=Events(ends),
    )


def test_tokens_are_recorded_and_replayed_in_order() -> None:
    journal = Journal()
    a, b = journal.add(entry_of("a", 1)), journal.add(entry_of("b", 2))
    journal.record({0: outputs((1, 0, [5]), (2, 0, [6, 7]))})
    journal.record({0: outputs((1, 0, [8]))})
    assert journal.replay(a).prior_output == ((5, 8),)
    assert journal.replay(b).prior_output == ((6, 7),)
    assert [e.request.request_id for e in journal] == ["a", "b"]


def test_two_tokens_of_each_sequence_clear_the_suspicion() -> None:
    journal = Journal()
    one, three = journal.add(entry_of("a", 1)), journal.add(entry_of("b", 2, n=3))
    one.is_suspect = three.is_suspect = True
    prefill = outputs((1, 0, [5]), (2, 0, [7]), (2, 1, [8]), (2, 2, [9]))
    journal.record({0: prefill})
    assert (one.is_suspect, three.is_suspect) == (True, True)
    journal.record({0: prefill})
    assert (one.is_suspect, three.is_suspect) == (False, False)


def test_all_sequences_are_replayed_and_only_some_are_live() -> None:
    journal = Journal()
    entry = journal.add(entry_of("a", 1, n=3))
    journal.record({0: outputs((1, 0, [5]), (1, 1, [6]), (1, 2, [7]))})
    journal.record({0: outputs((1, 1, [9]), ends=(Ended(1, 0.0, 0, 1, "a", 1, RequestStatus.FINISHED_STOPPED),))})
    assert journal.replay(entry).prior_output == ((5,), (6, 9), (7,))
    assert entry.live == {0, 2}
    length = RequestStatus.FINISHED_LENGTH_CAPPED
    journal.record({0: outputs((1, 2, [11]), ends=(Ended(1, 0.0, 0, 1, "a", 2, length),))})
    assert entry.live == {0}
    journal.end_sequence((0, 1), 0)  # at a stop string
    assert len(journal) == 0


def test_a_request_with_n_without_tokens_is_replayed_whole() -> None:
    journal = Journal()
    entry = journal.add(entry_of("a", 1, n=2))
    assert journal.replay(entry) is entry.request


def test_outputs_that_cross_an_abort_are_forgotten() -> None:
    journal = Journal()
    entry = journal.add(entry_of("a", 1, n=2))
    journal.record({0: outputs((1, 0, [5]), (1, 1, [6]))})
    journal.close((0, 1))
    journal.record({0: outputs((1, 0, [7]))})
    assert (0, 1) not in journal
    assert entry.tokens == [[5], [6]]


def test_an_end_that_crosses_an_abort_does_not_end_a_later_request_with_the_same_id() -> None:
    journal = Journal()
    journal.add(entry_of("a", 1))
    journal.close((0, 1))  # its client has gone, and tries again
    later = journal.add(entry_of("a", 2))
    journal.record({0: outputs(ends=(Ended(1, 0.0, 0, 1, "a", 0, RequestStatus.FINISHED_STOPPED),))})
    assert list(journal) == [later]
    journal.record({0: outputs(ends=(Ended(1, 0.0, 0, 2, "a", 0, RequestStatus.FINISHED_STOPPED),))})
    assert len(journal) == 0


def test_an_error_ends_every_live_sequence_once() -> None:
    journal = Journal()
    entry = journal.add(entry_of("a", 1, n=2))
    finishes = error_outputs(entry.request, "no").ends
    assert [(f.sequence, f.message) for f in finishes] == [(0, "no"), (1, "no")]
    journal.end_sequence((0, 1), 0)
    assert [f.sequence for f in error_outputs(entry.request, "no", live=entry.live).ends] == [1]


def columns(*tokens: int) -> LogprobColumns:
    ids = np.array([[token] for token in tokens], np.int32)
    return LogprobColumns(ids, np.zeros(ids.shape, np.float32), np.ones(len(tokens), np.int32))


def told(journal: Journal, handle: int, *tokens: int) -> list[int]:
    step = dataclasses.replace(outputs(), prompt_logprobs={handle: columns(*tokens)})
    found = journal.record({0: step})[0].prompt_logprobs
    return found[handle].token_ids[:, 0].tolist() if handle in found else []


def test_prompt_logprobs_sent_before_a_death_are_not_sent_again() -> None:
    journal = Journal()
    entry = journal.add(entry_of("a", 1))
    assert told(journal, 1, 10, 11) == [10, 11]
    journal.replay(entry)  # the new engine begins the prompt again, in chunks of its own
    assert told(journal, 1, 10) == []
    assert told(journal, 1, 11, 12, 13) == [12, 13]
    journal.replay(entry)
    assert told(journal, 1, 10, 11, 12, 13) == []


def test_the_prompt_of_a_request_with_n_is_told_once_and_that_of_another_too() -> None:
    journal = Journal()
    entry = journal.add(entry_of("a", 1, n=2))
    journal.add(entry_of("b", 2))
    assert told(journal, 1, 1, 2) == [1, 2]
    journal.record({0: outputs((1, 0, [5]), (1, 1, [6]))})
    journal.replay(entry)
    assert told(journal, 1, 1, 2) == []
    assert told(journal, 2, 7, 8) == [7, 8]


def test_what_an_engine_owes_follows_its_chunks_and_what_it_found_cached() -> None:
    journal = Journal()
    prompt = np.arange(1000, dtype=np.int32)
    for handle in (1, 2, 3):
        journal.add(JournalEntry.of(Request("a", prompt, SamplingParams(), handle=handle)))
    assert journal.num_owed == 3000

    def admitted(handle: int, num_computed: int) -> Admitted:
        return Admitted(1, 0.0, 0, handle, AdmitKind.NEW, 1000, num_computed, num_computed, 100, 9, 9)

    journal.record({0: outputs(ends=(admitted(1, 600),))}, num_computed=100)
    assert journal.num_owed == 300 + 1000 + 1000
    journal.record({0: outputs((1, 0, [5]), ends=(admitted(2, 0),))}, num_computed=301 + 100)
    assert journal.num_owed == 899 + 1000  # of the first chunk, one token counts with the second
    journal.record({}, 500)
    assert journal.num_owed == 399 + 1000
    journal.record({}, 5000)  # whatever else is computed, the request has not emitted its token
    assert journal.num_owed == 1 + 1000
    journal.record({0: outputs(ends=(Preempted(2, 0.0, 0, 2, 0, 1, "recompute", 900, 5),))})
    assert journal.num_owed == 900 + 1000
    journal.close((0, 2))
    journal.close((0, 3))
    assert journal.num_owed == 0
    journal.record({}, 10)
    assert journal.num_owed == 0


def test_tokens_that_other_clients_got_in_the_same_step_were_not_owed() -> None:
    journal = Journal()
    for client_index in (0, 1):
        prompt = np.arange(1000, dtype=np.int32)
        journal.add(JournalEntry.of(Request("a", prompt, SamplingParams(), client_index=client_index, handle=1)))
    journal.record({1: outputs((1, 0, [5]))}, 1000)
    assert journal.num_owed == 1000
    admitted = Admitted(1, 0.0, 0, 1, AdmitKind.NEW, 1000, 0, 0, 100, 9, 9)
    journal.record({1: outputs((1, 0, [5])), 0: outputs(ends=(admitted,))}, 101)
    assert journal.num_owed == 900
