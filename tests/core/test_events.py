"""The stream of events: who gets what, what the events of the cache say, and what nobody is asked for."""

from collections.abc import Iterable

import numpy as np
import pytest

from pagoda.base.config import PreemptionMode
from pagoda.core.events import (
    Admitted,
    Ended,
    Event,
    EventStream,
    FirstToken,
    Held,
    Limited,
    Preempted,
    Queued,
    Removed,
    Stored,
    Swapped,
)
from pagoda.core.request import AdmitKind, Reason
from tests.core.rig import Rig
from tests.core.test_failures import fail


def listen(rig: Rig, *, cache: bool = False) -> list[Event]:
    heard: list[Event] = []
    rig.scheduler.subscribe(heard.append, cache=cache)
    return heard


def kinds(events: Iterable[Event]) -> list[str]:
    return [type(event).__name__ for event in events]


def test_a_request_says_when_it_comes_enters_emits_and_ends() -> None:
    rig = Rig()
    heard = listen(rig)
    rig.add("a", 6, max_tokens=3)
    rig.clock.advance(2.0)
    rig.run()
    assert heard == [
        Queued(0, 0.0, 0, 1, "a", 6, 1, 0),
        Admitted(1, 2.0, 0, 1, AdmitKind.NEW, 6, None, 0, 6, 2, 14),
        FirstToken(1, 2.0, 0, 1, 6),
        Ended(3, 2.0, 0, 1, "a", 0, heard[-1].status),  # type: ignore[union-attr]
    ]


def test_why_a_request_waits_is_written_when_it_changes() -> None:
    rig = Rig(num_blocks=4, max_num_seqs=1)
    heard = listen(rig)
    rig.add("a", 8, max_tokens=6)
    rig.add("b", 12, max_tokens=2)
    for _ in range(4):
        rig.step()
    held = [event for event in heard if isinstance(event, Held)]
    assert [(event.handle, event.reason, event.position, event.num_blocks) for event in held] == [
        (2, Reason.NUM_SEQS, 0, 3)
    ]
    rig.run()
    assert [event for event in heard if isinstance(event, Held)] == held


def test_the_head_of_the_queue_says_when_a_running_prompt_takes_the_whole_budget() -> None:
    rig = Rig(num_blocks=40, max_num_seqs=4, max_num_batched_tokens=8)
    heard = listen(rig)
    rig.add("a", 24, max_tokens=2)
    rig.step()
    rig.add("b", 4, max_tokens=2)
    rig.add("c", 4, max_tokens=2)
    rig.run()
    held = [event for event in heard if isinstance(event, Held)]
    assert [(one.step, one.handle, one.reason, one.position) for one in held] == [(2, 2, Reason.BUDGET, 0)]


def test_a_preemption_names_its_cause_and_a_swap_its_blocks() -> None:
    rig = Rig(num_blocks=4, num_host_blocks=8, preemption_mode=PreemptionMode.SWAP)
    heard = listen(rig)
    rig.add("a", 7, max_tokens=8)
    rig.add("b", 7, max_tokens=8)
    rig.run()
    preempted = next(event for event in heard if isinstance(event, Preempted))
    assert (preempted.handle, preempted.for_handle, preempted.mode, preempted.lost_tokens) == (2, 1, "swap", 0)
    swaps = [event for event in heard if isinstance(event, Swapped) and event.handle == 2]
    assert [event.to_host for event in swaps] == [True, False]
    assert swaps[0].num_blocks == swaps[1].num_blocks
    back = [event for event in heard if isinstance(event, Admitted) and event.handle == 2][-1]
    assert (back.kind, back.num_cached) == (AdmitKind.SWAPPED_IN, None)


def test_a_client_gets_what_happened_to_its_requests_once() -> None:
    rig = Rig()
    for number, client in enumerate((0, 3, 3)):
        rig.add(f"r{number}", 4, max_tokens=2, client_index=client)
    got: dict[int, list[Event]] = {}
    while rig.scheduler.has_unfinished_requests():
        step = rig.plan()
        for client, outputs in rig.deliver_outputs(step).items():
            got.setdefault(client, []).extend(outputs.events)
    assert got.keys() == {0, 3}
    assert kinds(got[0]) == ["Queued", "Admitted", "FirstToken", "Ended"]
    assert sorted(kinds(got[3])) == sorted(2 * kinds(got[0]))


def test_a_client_gets_the_end_that_it_asked_for_with_its_next_outputs() -> None:
    rig = Rig()
    rig.add("a", 4, n=2)
    rig.add("b", 4)
    rig.abort("a")
    events = rig.deliver_outputs(rig.plan())[0].events
    assert [(type(event), event.handle) for event in events] == [  # type: ignore[union-attr]
        (Queued, 1), (Queued, 2), (Ended, 1), (Ended, 1), (Admitted, 2), (FirstToken, 2),
    ]  # fmt: skip
    assert [event.is_last for event in events if isinstance(event, Ended)] == [False, True]


def test_events_of_the_cache_tell_what_it_has() -> None:
    """A reader who adds what is stored and takes away what is removed knows what the cache would find."""
    rig = Rig(num_blocks=6, enable_prefix_caching=True, prefix_hash_seed=1)
    found: set[tuple[int, bytes]] = set()
    parents: dict[bytes, bytes | None] = {}

    def fold(event: Event) -> None:
        if isinstance(event, Stored):
            new = {(event.group, one) for one in event.hashes}
            assert not new & found
            found.update(new)
            parents.update(zip(event.hashes, (event.parent, *event.hashes), strict=False))
        elif isinstance(event, Removed):
            gone = {(event.group, one) for one in event.hashes}
            assert gone <= found
            found.difference_update(gone)

    rig.scheduler.subscribe(fold, cache=True)
    rng = np.random.default_rng(0)
    prefix = list(range(8))
    for number in range(8):
        rig.add(f"r{number}", prefix * (number % 2) + rng.integers(0, 9, 9).tolist(), max_tokens=4)
        rig.run()
        known = rig.scheduler._state.kv.prefix_cache._blocks
        assert found == {(group, one) for group, table in enumerate(known) for one in table}
    assert found
    assert all(parent is None or parent in parents for parent in parents.values())
    assert rig.scheduler.reset_prefix_cache()
    assert not found


@pytest.mark.parametrize("cache", [False, True])
def test_events_of_the_cache_are_not_made_without_a_reader(cache: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Event] = []
    monkeypatch.setattr(EventStream, "write_cache", lambda self, event: written.append(event))
    rig = Rig(enable_prefix_caching=True)
    end = rig.scheduler.subscribe(lambda event: None, cache=cache)
    rig.add("a", 9, max_tokens=4)
    rig.run()
    assert bool(written) == cache
    end()
    written.clear()
    rig.add("b", 9, max_tokens=4)
    rig.run()
    assert not written


def test_rows_that_only_decode_write_nothing() -> None:
    rig = Rig(num_blocks=64, enable_prefix_caching=True)
    for number in range(8):
        rig.add(f"r{number}", 4, max_tokens=30)
    rig.step()
    heard = listen(rig)
    for _ in range(20):
        rig.step()
    assert heard == []


def test_a_row_that_gets_less_than_it_wants_says_why_once_per_reason() -> None:
    """Of several rules, the last that cut: `b` is capped at 5 tokens, and then finds 3 in the budget."""
    rig = Rig(max_num_batched_tokens=8, max_num_seqs=4, long_prefill_token_threshold=5, num_blocks=64)
    heard = listen(rig)
    rig.add("a", 40, max_tokens=2)
    rig.add("b", 40, max_tokens=2)
    rig.run()
    limited = [(event.handle, event.reason) for event in heard if isinstance(event, Limited)]
    assert limited == [(1, Reason.ROW_CAP), (2, Reason.BUDGET), (2, Reason.ROW_CAP), (2, Reason.BUDGET)]


def test_a_row_that_is_preempted_before_its_turn_was_not_limited() -> None:
    """In the step in which `b`, which wants 6 tokens, would get 1, `a` needs its block."""
    rig = Rig(num_blocks=2, max_num_batched_tokens=2, max_num_seqs=2, admit_whole_prompt=False)
    rig.add("a", 3, max_tokens=4)
    rig.step()
    rig.step()
    rig.add("b", 7, max_tokens=1)
    rig.step()
    assert rig.running == ["a", "b"]
    heard = listen(rig)
    rig.step()
    assert kinds(heard) == ["Preempted"]


def test_siblings_that_wait_again_because_the_first_one_ended_say_so() -> None:
    """Of two outputs, both preempted, the first computes the prompt again for both when it ends by a stop string."""
    rig = Rig(max_num_batched_tokens=4, max_num_seqs=2, preemption_mode=PreemptionMode.RECOMPUTE)
    rig.add("a", 8, n=2)
    for _ in range(3):
        rig.step()
    assert rig.scheduler.num_computed_tokens(rig.key("a")) == [9, 9]
    rig.scheduler.reset_prefix_cache(preempt_running=True)
    rig.step()
    heard = listen(rig)
    rig.finish("a", 0)
    preempted, ended = heard
    assert isinstance(preempted, Preempted)
    assert (preempted.for_handle, preempted.mode, preempted.lost_tokens, preempted.freed_blocks) == (
        None, "recompute", 4, 1,
    )  # fmt: skip
    assert isinstance(ended, Ended)
    assert (ended.sequence, ended.is_last) == (0, False)
    assert rig.plan().preempted == ("a",)
    assert rig.scheduler.make_stats().preemptions == 2


@pytest.mark.parametrize("when", ["at first", "after a reset"])
def test_the_first_token_of_a_request_is_told_when_its_first_sequence_fails_before_it(when: str) -> None:
    rig = Rig()
    heard = listen(rig)
    rig.add("a", 4, max_tokens=3, n=2)
    step = rig.plan()
    if when == "after a reset":
        rig.scheduler.reset_prefix_cache(preempt_running=True)
        rig.deliver(step)
        step = rig.plan()
    fail(rig, step, step.output.rows.tolist()[0])
    while rig.running or rig.waiting:
        rig.step()
    assert [event.handle for event in heard if isinstance(event, FirstToken)] == [1]
    assert [event.sequence for event in heard if isinstance(event, Ended)] == [0, 1]
