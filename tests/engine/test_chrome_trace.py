"""Traces in Chrome's format, of made-up events."""

import json

import pytest

from pagoda.core.events import (
    Admitted,
    ClientEvent,
    DraftsVerified,
    Ended,
    Failed,
    FirstToken,
    Held,
    Preempted,
    Queued,
)
from pagoda.core.request import AdmitKind, Reason, RequestStatus
from pagoda.engine import chrome_trace
from pagoda.engine.chrome_trace import ChromeTrace
from pagoda.engine.step_strip import StepNote
from tests.chrome_format import check_trace

HELD = (0, 4, 1)
FIRST = FirstToken(1, 9.0, 0, 7, 3)
ENTERED = (3, 2, 2, 1, 1, 8)
STORY = (
    Queued(1, 10.5, 0, 1, "a", 3, 1, 0),
    Admitted(1, 10.5, 0, 1, AdmitKind.NEW, *ENTERED),
    FirstToken(1, 11.0, 0, 1, 3),
    Queued(2, 11.5, 1, 1, "b", 3, 1, 0),
    Held(2, 11.5, 1, 1, Reason.BLOCKS, *HELD),
    Preempted(3, 12.0, 0, 1, 1, 1, "recompute", 3, 1),
    Admitted(3, 12.0, 1, 1, AdmitKind.NEW, *ENTERED),
    DraftsVerified(4, 12.5, 1, (1,), (0,), (4,), (2,)),
    Failed(4, 12.5, 1, 1, None),
    Ended(5, 13.0, 1, 1, "b", 0, RequestStatus.FINISHED_STOPPED),
    Admitted(6, 13.0, 0, 1, AdmitKind.RESUMED, *ENTERED),
    Preempted(7, 14.0, 0, 1, None, None, "recompute", 3, 1),  # a reset of the prefix cache
)


def traced() -> ChromeTrace:
    trace = ChromeTrace(10.0)
    trace.begin_with(0, 7, "early", FIRST)
    for event in STORY:
        trace.add(event)
    trace.add_step(StepNote(1, 1, 10.5, 10.75, 3, 1, 0))
    trace.add_step(StepNote(2, 2, 10.75, 11.25, 0, 2, 1, 6))
    return trace


def test_requests_are_tracks_and_an_arrow_shows_who_was_preempted_for_whom() -> None:
    trace = json.loads(json.dumps(traced().written(15.0)))
    check_trace(trace)
    entries = trace["traceEvents"]
    names = {one["tid"]: one["args"]["name"] for one in entries if one["name"] == "thread_name" and one["pid"] == 2}
    slices = [
        (names[one["tid"]], one["name"], one["ts"] / 1e6, one["dur"] / 1e6)
        for one in entries
        if one["ph"] == "X" and one["pid"] == 2
    ]
    assert sorted(slices, key=lambda one: (one[2], one[0])) == [
        ("early", "runs", 0.0, 5.0),
        ("a", "runs", 0.5, 1.5),
        ("b", "waits: not enough free blocks", 1.5, 0.5),
        ("a", "waits: preempted", 2.0, 1.0),
        ("b", "runs", 2.0, 1.0),
        ("a", "runs", 3.0, 1.0),
        ("a", "waits: preempted", 4.0, 1.0),
    ]
    arrows = [(one["ph"], names[one["tid"]], one["ts"]) for one in entries if one["ph"] in "sf"]
    assert arrows == [("s", "a", 2e6), ("f", "b", 2e6)]
    steps = [(one["name"], one["args"]) for one in entries if one["ph"] == "X" and one["pid"] == 1]
    assert steps[1] == ("step 2", {"prompt": 0, "sampled": 2, "drafted": 6, "preempted": 1})
    assert {one["name"] for one in entries if one["ph"] == "C"} == {"tokens of steps", "drafts"}


@pytest.mark.parametrize(
    ("last", "phase"),
    [
        (None, "waits: the engine to see it"),
        (Queued(1, 9.0, 0, 1, "a", 3, 1, 0), "waits: its turn"),
        (Held(1, 9.0, 0, 1, Reason.ADAPTER, *HELD), "waits: adapter not in memory (max_cpu_loras)"),
        (Preempted(1, 9.0, 0, 1, 1, 1, "swap", 0, 1), "waits: preempted"),
        (Admitted(1, 9.0, 0, 1, AdmitKind.NEW, *ENTERED), "runs"),
        (FIRST, "runs"),
    ],
)
def test_what_began_before_the_trace_has_its_reason(last: ClientEvent | None, phase: str) -> None:
    trace = ChromeTrace(10.0)
    trace.begin_with(0, 1, "a", last)
    (slice_,) = [one for one in trace.written(12.0)["traceEvents"] if one["ph"] == "X"]
    assert (slice_["name"], slice_["ts"], slice_["dur"]) == (phase, 0.0, 2e6)


def test_events_from_before_the_trace_that_arrive_late_have_no_arrows_and_marks() -> None:
    trace = ChromeTrace(13.5)
    for event in STORY:
        trace.add(event)
    written = trace.written(15.0)
    check_trace(written)
    slices = [(one["name"], one["ts"], one["dur"]) for one in written["traceEvents"] if one["ph"] == "X"]
    assert slices == [("runs", 0.0, 5e5), ("waits: preempted", 5e5, 1e6)]
    assert not {"s", "f"} & {one["ph"] for one in written["traceEvents"]}


def test_a_trace_is_bounded_and_says_what_it_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chrome_trace, "MAX_ENTRIES", 12)
    trace = traced().written(15.0)
    assert len(trace["traceEvents"]) == 12
    assert trace["otherData"]["left_out"] > 5


def test_a_trace_counts_the_steps_that_it_was_not_told() -> None:
    trace = ChromeTrace(10.0)
    for step, number, ended_s in ((3, 2, 9.9), (9, 6, 10.5), (11, 7, 11.0), (16, 11, 12.0)):
        trace.add_step(StepNote(step, number, ended_s - 0.2, ended_s, 0, 1, 0))
    written = trace.written(15.0)
    steps = [one["name"] for one in written["traceEvents"] if one["ph"] == "X"]
    assert (steps, written["otherData"]["left_out"]) == (["step 9", "step 11", "step 16"], 3)  # those of no token: none


def test_steps_of_replicas_have_tracks_and_numbers_of_their_own() -> None:
    trace = ChromeTrace(10.0)
    for number, replica in ((7, 1), (1, 2), (8, 1), (3, 2)):
        trace.add_step(StepNote(number, number, 10.5, 10.75, 3, 1, 0, replica=replica))
    written = trace.written(11.0)
    assert written["otherData"] == {"left_out": 1}
    named = {entry["tid"]: entry["args"]["name"] for entry in written["traceEvents"] if entry["name"] == "thread_name"}
    steps = [(named[one["tid"]], one["name"]) for one in written["traceEvents"] if one["ph"] == "X"]
    assert steps == [
        ("steps of replica 1", "step 7"),
        ("steps of replica 2", "step 1"),
        ("steps of replica 1", "step 8"),
        ("steps of replica 2", "step 3"),
    ]
