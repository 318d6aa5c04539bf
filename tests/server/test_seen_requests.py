"""What a viewer is told of requests: their state and why, with a look at the engine and before the first one."""

import numpy as np
import pytest

from pagoda.core.events import Admitted, ClientEvent, Events, FirstToken, Held, Preempted, Queued
from pagoda.core.request import AdmitKind, Reason
from pagoda.core.view import SchedulerView
from pagoda.engine.wire import EngineStats
from pagoda.metrics.observed_requests import RequestRecord
from pagoda.server.seen_requests import SeenRequest, SeenRequests, Viewer

QUEUED = Queued(1, 0.0, 0, 2, "1/b", 9, 1, 0)
HELD = Held(1, 0.0, 0, 2, Reason.NUM_SEQS, 0, True, 1, 5)
ADMITTED = Admitted(1, 0.0, 0, 2, AdmitKind.NEW, 9, 0, 0, 4, 1, 5)
FIRST = FirstToken(1, 0.0, 0, 2, 9)
PREEMPTED = Preempted(1, 0.0, 0, 2, 0, 1, "recompute", 9, 1)


def record(name: str, handle: int, num_prompt_tokens: int, *last: ClientEvent) -> RequestRecord:
    return RequestRecord(name, 0, handle, num_prompt_tokens, 0, None, 0.0, False, Events(last))


def view(*computed: int) -> SchedulerView:
    """Return a view of requests that run, with handles from 1 on."""
    count, none = len(computed), np.zeros(0, np.int16)
    handles, blocks = np.arange(1, count + 1), np.ones(count, np.int32)
    return SchedulerView(count, np.zeros(count, np.int32), handles, np.array(computed, np.int32), blocks, 1, none, none)


def see(records: list[RequestRecord], seen: SchedulerView | None, is_up: bool = True, key: str = "1/") -> SeenRequest:
    """Return how the last of the records is shown."""
    return list(SeenRequests(Viewer(key), records, seen, EngineStats(), is_up).live(1.0))[-1]


@pytest.mark.parametrize(
    ("last", "state", "reason"),
    [
        (None, "waiting", "waits for the engine to see it, between two steps"),
        (QUEUED, "waiting", "waits for its turn in the queue"),
        (HELD, "waiting", "waits: max_num_seqs sequences are running"),
        (ADMITTED, "running", ""),
        (FIRST, "running", ""),
        (PREEMPTED, "waiting", "preempted for 1/a: 9 tokens must be computed again, 1 block became free"),
    ],
)
def test_before_the_first_look_its_last_event_says_what_a_request_does(
    last: ClientEvent | None, state: str, reason: str
) -> None:
    records = [record("1/a", 1, 5), record("1/b", 2, 9, *(() if last is None else (last,)))]
    shown = see(records, None, key="")
    assert (shown.id, shown.state, shown.reason) == ("1/b", state, reason)
    assert see(records, None, is_up=False).reason == "waits for the engine, which starts"


def test_what_waits_names_the_prompts_of_the_same_key_that_fill_the_steps() -> None:
    records = [record("1/long", 1, 900, ADMITTED), record("1/decodes", 2, 5, FIRST), record("2/other", 3, 900, FIRST)]
    records.append(record("1/b", 4, 9, QUEUED))
    shown = see(records, view(256, 6, 512))
    assert shown.reason == "waits for its turn in the queue; prompts that are computed: long (256 of 900 tokens)"
    assert see(records, view(900, 6, 900)).reason == "waits for its turn in the queue"
