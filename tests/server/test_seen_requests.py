"""What a viewer is told of requests: their state and why, with a look at the engine and before the first one."""

from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from pagoda.base.outputs import CompletionOutput, RequestMetrics, RequestOutput
from pagoda.base.sampling_params import SamplingParams
from pagoda.core.events import Admitted, ClientEvent, Events, FirstToken, Held, Preempted, Queued
from pagoda.core.request import AdmitKind, Reason, Request
from pagoda.core.view import SchedulerView
from pagoda.engine.wire import EngineStats
from pagoda.metrics.observed_requests import ObservedRequests, RequestObserver, RequestRecord
from pagoda.metrics.prometheus import CACHE_LABELS, ServerMetrics
from pagoda.server.seen_requests import SeenRequest, SeenRequests, Viewer

QUEUED = Queued(1, 0.0, 0, 2, "1/b", 9, 1, 0)
HELD = Held(1, 0.0, 0, 2, Reason.NUM_SEQS, 0, 1, 5)
ADMITTED = Admitted(1, 0.0, 0, 2, AdmitKind.NEW, 9, 0, 0, 4, 1, 5)
FIRST = FirstToken(1, 0.0, 0, 2, 9)
PREEMPTED = Preempted(1, 0.0, 0, 2, 0, 1, "recompute", 9, 1)


def record(name: str, handle: int, num_prompt_tokens: int, *last: ClientEvent) -> RequestRecord:
    return RequestRecord(name, 0, handle, num_prompt_tokens, 0, None, 0.0, 1, Events(last))


def view(*computed: int, line: tuple[int, ...] = ()) -> SchedulerView:
    """Return a view of requests that run, with handles from 1 on.   line: handles of those that wait."""
    count, none = len(computed), np.zeros(0, np.int16)
    handles, blocks = np.arange(1, count + 1), np.ones(count, np.int32)
    num_computed, clients = np.array(computed, np.int32), np.zeros(count, np.int32)
    waiting = np.zeros(len(line), np.int32), np.array(line, np.int64)
    return SchedulerView(count, clients, handles, num_computed, blocks, 1, none, none, *waiting)


def see(
    records: list[RequestRecord],
    seen: SchedulerView | None,
    is_up: bool = True,
    key: str = "1/",
    stats: EngineStats | None = None,
) -> SeenRequest:
    """Return how the last of the records is shown."""
    return list(SeenRequests(Viewer(key), records, seen, stats or EngineStats(), is_up).live(1.0))[-1]


@pytest.mark.parametrize(
    ("last", "state", "reason"),
    [
        (None, "waiting", "waits for the engine to see it, between two steps"),
        (QUEUED, "waiting", "waits for its turn in the queue"),
        (HELD, "waiting", "waits: as many sequences run as max_num_seqs allows"),
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
    records[-1] = record("1/b", 4, 9, replace(HELD, reason=Reason.BUDGET))
    assert (
        see(records, view(256, 6, 512)).reason
        == "waits: token budget spent; prompts that are computed: long (256 of 900 tokens)"
    )


@pytest.mark.parametrize(
    ("last", "line", "reason"),
    [
        (QUEUED, (2,), "waits for its turn in the queue"),
        (QUEUED, (8, 9, 2), "waits for its turn in the queue: 3rd, first is another request"),
        (QUEUED, (4, 2), "waits for its turn in the queue: 2nd, first is mine"),
        (replace(HELD, reason=Reason.TURN), (4, 2), "waits for its turn in the queue: 2nd, first is mine"),
        (HELD, (2, 4), "waits: as many sequences run as max_num_seqs allows"),
        (HELD, (4, 2), "waits for its turn in the queue: 2nd, first is mine"),  # what it was held for when it was first
        (replace(HELD, reason=Reason.LORA), (4, 2), "waits: as many adapters are in the batch as max_loras allows"),
        (replace(HELD, reason=Reason.GRAMMAR), (4,), "waits: grammar not compiled yet"),
        (
            PREEMPTED,
            (4, *range(10, 20), 2),
            "preempted for a: 9 tokens must be computed again, 1 block became free; in the queue: 12th, first is mine",
        ),
    ],
)
def test_what_waits_says_its_place_and_who_is_first(last: ClientEvent, line: tuple[int, ...], reason: str) -> None:
    records = [record("1/a", 1, 5), record("1/mine", 4, 9, QUEUED), record("1/b", 2, 9, last)]
    assert see(records, view(5, line=line)).reason == reason


def test_what_waits_for_blocks_is_told_how_many_are_free_now() -> None:
    """When it was held, 5 blocks were free."""
    records = [record("1/a", 1, 5), record("1/b", 2, 9, replace(HELD, reason=Reason.BLOCKS, num_blocks=9))]
    seen = view(5, line=(2,))
    for free, words in (
        (7, "waits for 2 blocks: it takes 9, 7 are free; held by a (1)"),
        (9, "waits: not enough free blocks, when it was last considered: it takes 9, 9 are free now; held by a (1)"),
    ):
        assert see(records, seen, stats=EngineStats(num_free_blocks=free)).reason == words
    assert see(records, None).reason == "waits for 4 blocks: it takes 9, 5 are free, when it was last considered"


def test_who_sees_all_is_told_which_adapters_are_in_the_batch() -> None:
    records, stats = [record("1/b", 2, 9, replace(HELD, reason=Reason.LORA))], EngineStats(running_adapters=("x", "y"))
    words = "waits: as many adapters are in the batch as max_loras allows"
    assert see(records, view(5), key="", stats=stats).reason == f"{words}: x, y"
    assert see(records, view(5), stats=stats).reason == words


def test_what_waits_for_its_adapter_names_it() -> None:
    waits = structs.replace(record("1/b", 2, 9, replace(HELD, reason=Reason.ADAPTER)), adapter="clerk")
    assert see([waits], view(5)).reason == "waits: adapter not in memory (max_cpu_loras): clerk"


def test_a_timeline_says_what_ends_a_wait_for_blocks_and_what_came_of_drafts() -> None:
    """Its entries stay as they are written; only the reason of the moment counts the free blocks again."""
    observed = ObservedRequests(ServerMetrics("m", EngineStats, dict.fromkeys(CACHE_LABELS, "")))
    with RequestObserver(observed, Request("1/b", np.ones(9, np.int32), SamplingParams(n=3), handle=2)) as one:
        one.add_event(replace(HELD, reason=Reason.BLOCKS, num_blocks=9))
        parts = [CompletionOutput(0), CompletionOutput(2, finish_reason="stop")]
        metrics = RequestMetrics(num_draft_tokens=8, num_accepted_tokens=3)
        one.on_delta(RequestOutput("1/b", outputs=parts, metrics=metrics), 0.5)
        details = one.details()
    seen = SeenRequests(Viewer("1/"), [details.record], view(5), EngineStats(num_free_blocks=7), is_up=True)
    shown = seen.timeline("b", details, 1.0)
    assert (
        shown.timeline[-1].what
        == "waits for 4 blocks: it takes 9, 5 are free; it runs when others have given enough back"
    )
    assert shown.reason == "waits for 2 blocks: it takes 9, 7 are free; held by 1 other request"
    assert (shown.sequences, shown.draft_tokens, shown.accepted_draft_tokens) == (2, 8, 3)
    ended = seen.timeline("b", observed.ended[-1], 1.0)
    assert (ended.state, ended.sequences, ended.draft_tokens, ended.accepted_draft_tokens) == ("ended", 0, 8, 3)


@pytest.mark.parametrize(
    ("num_running", "num_waiting", "others"),
    [
        (2, 0, (1, 0)),
        (1, 1, (1, 0)),  # the stats are older than the view: two run by now
        (2, 3, (1, 2)),  # one of those that wait is its own
    ],
)
def test_of_others_only_those_wait_that_the_view_does_not_see_running(
    num_running: int, num_waiting: int, others: tuple[int, int]
) -> None:
    records = [record("1/a", 1, 5)] + ([record("1/b", 9, 5)] if num_waiting > 1 else [])
    stats = EngineStats(num_running=num_running, num_waiting=num_waiting)
    counted = SeenRequests(Viewer("1/"), records, view(1, 1), stats, is_up=True).others
    assert (counted.running, counted.waiting) == others
