"""What callers may see of the requests of this server, and of the blocks that these have.

A caller sees the requests of its own key. With the admin key, or on a server of this machine that has no keys, it sees
all. Others are counts.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from msgspec import UNSET, Struct, UnsetType

from pagoda.core.events import ClientEvent, Events, Held, Limited, Preempted, Queued
from pagoda.core.request import Reason
from pagoda.core.view import FIRST_OWNER, SchedulerView
from pagoda.engine.wire import EngineStats
from pagoda.metrics.observed_requests import RequestDetails, RequestRecord
from pagoda.server.event_words import in_timeline, in_words, needs_blocks
from pagoda.server.prefix_misses import PrefixMiss

_MOST_NAMED = 3
"""Requests that a reason names, of those that have the blocks."""


class SeenRequest(Struct, kw_only=True):
    """A request that has not ended, or that ended a short while ago.

    state: waiting, running, preempted or ended.   reason: why it waits, in words.
    computed_tokens: tokens of its first output, and of its prompt, that have their KV.   blocks: of the KV cache; of a
        preempted request, in host memory.
    sequences: its outputs that have not ended: so many of `max_num_seqs` it takes when it runs.
    model: the model that runs it.   adapter: the LoRA adapter that it names as its model; "" for the model itself.
    """

    id: str
    state: str
    reason: str = ""
    prompt_tokens: int
    computed_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    blocks: int = 0
    sequences: int = 0
    model: str = ""
    adapter: str = ""
    age_s: float


class OtherRequests(Struct, frozen=True):
    """How many requests there are that the caller may not see."""

    running: int
    waiting: int


class RequestList(Struct, kw_only=True):
    """Requests of the caller, in the order of their arrival, then those that have ended, the last first.

    in_line: HTTP requests of all that wait to be admitted.
    as_of_s: how long ago the engine said what runs, which it does between steps.
    """

    data: list[SeenRequest]
    others: OtherRequests
    in_line: int
    as_of_s: float


class TimelineEntry(Struct, frozen=True):
    """at_ms: after the request's arrival.   step: of the engine, as traces have it: the one in which it happened or, of
    what happens between two steps, the one before.
    """

    at_ms: float
    what: str
    step: int | UnsetType = UNSET


class RequestTimeline(SeenRequest, kw_only=True):
    """draft_tokens, accepted_draft_tokens: verified for it (speculative decoding), and those that were right.
    prefix_miss: missing if all whole blocks before the last token were cached, or no earlier request that is known
        begins as it does.
    """

    timeline: list[TimelineEntry]
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    prefix_miss: PrefixMiss | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class Viewer:
    """Who looks.   prefix: with which the engine's ids of its requests begin; None: it sees no request.

    All begin with "".
    """

    prefix: str | None

    def name_of(self, engine_id: str) -> str | None:
        """Return what the viewer calls a request; None if it may not see it."""
        if self.prefix is None or not engine_id.startswith(self.prefix):
            return None
        return engine_id.removeprefix(self.prefix)


class SeenRequests:
    """The requests at one moment, as one viewer sees them.

    records: of the requests that it may see, of all processes.   view: of the engine, None while it is down, and until
    it has answered for the first time.   is_up: the engine runs.
    now_s: by time.perf_counter.
    """

    def __init__(
        self,
        viewer: Viewer,
        records: Sequence[RequestRecord],
        view: SchedulerView | None,
        stats: EngineStats,
        is_up: bool,
    ) -> None:
        self._view, self._is_up = view, is_up
        self._stats = stats
        keys = () if view is None else zip(view.clients.tolist(), view.handles.tolist(), strict=True)
        self._places = {key: place for place, key in enumerate(keys)}
        line = () if view is None else zip(view.next_clients.tolist(), view.next_handles.tolist(), strict=True)
        self._in_line = {key: place for place, key in enumerate(line)}
        self._sees_all = viewer.prefix == ""
        self._names = [""] * len(self._places)
        self._num_running = 0 if view is None else view.num_running
        self._name_of_key: dict[tuple[int, int], str] = {}
        self._live: list[tuple[str, RequestRecord, int | None]] = []
        self._ended: list[tuple[str, RequestRecord]] = []
        for record in records:
            if (name := viewer.name_of(record.request_id)) is None:
                continue
            key = record.client, record.handle
            self._name_of_key[key] = name
            if record.ended_s is not None:
                self._ended.append((name, record))
                continue
            place = self._places.get(key)
            self._live.append((name, record, place))
            if place is not None:
                self._names[place] = name

    @property
    def others(self) -> OtherRequests:
        """Return the counts of all that the viewer does not see."""
        running = self._names[: self._num_running]
        num_running = sum(1 for name in running if not name)
        # Of all, whom the view does not see running: the stats may be older than it, and count one as waiting.
        stats = self._stats
        num_waiting = stats.num_running + stats.num_waiting + stats.num_swapped - self._num_running
        return OtherRequests(num_running, max(0, num_waiting - len(self._live) + sum(map(bool, running))))

    def live(self, now_s: float) -> Iterator[SeenRequest]:
        """Iterate over the viewer's requests that have not ended."""
        for name, record, place in self._live:
            yield self._seen(name, record, place, now_s)

    def ended(self, now_s: float) -> Iterator[tuple[float, SeenRequest]]:
        """Iterate over those that have ended, the last first, and when each did."""
        for name, record in reversed(self._ended):
            yield record.ended_s or 0.0, SeenRequest(**_of_ended(name, record, now_s))

    def timeline(self, name: str, details: RequestDetails, now_s: float) -> RequestTimeline:
        """Return the timeline of one of the viewer's requests, which calls it `name`."""
        record = details.record
        timeline = self._entries(record.arrived_s, details.events)
        if record.ended_s is not None:
            end_ms = round((record.ended_s - record.arrived_s) * 1e3, 1)
            timeline.append(TimelineEntry(end_ms, f"ended: {' and '.join(record.finish_reasons)}"))
            fields = _of_ended(name, record, now_s)
        else:
            seen = self._seen(name, record, self._places.get((record.client, record.handle)), now_s)
            fields = {field: getattr(seen, field) for field in seen.__struct_fields__}
        return RequestTimeline(
            **fields,
            timeline=timeline,
            draft_tokens=record.num_draft_tokens,
            accepted_draft_tokens=record.num_accepted_tokens,
        )

    def _seen(self, name: str, record: RequestRecord, place: int | None, now_s: float) -> SeenRequest:
        view, last = self._view, next(iter(record.last), None)
        if view is not None:
            runs = place is not None and place < self._num_running
        else:  # what its last event says
            runs = self._is_up and last is not None and not isinstance(last, Queued | Held | Preempted)
        seen = SeenRequest(
            id=name,
            state="running" if runs else "preempted" if place is not None or record.num_output_tokens else "waiting",
            prompt_tokens=record.num_prompt_tokens,
            output_tokens=record.num_output_tokens,
            cached_tokens=record.num_cached_tokens or 0,
            sequences=record.num_open,
            model=record.model,
            adapter=record.adapter,
            age_s=round(now_s - record.arrived_s, 3),
        )
        if view is not None and place is not None:
            seen.computed_tokens = int(view.num_computed[place])
            seen.blocks = int(view.num_blocks[place])
        if not runs:
            seen.reason = self._why_waiting(last, self._in_line.get((record.client, record.handle)), record.adapter)
        elif seen.computed_tokens < seen.prompt_tokens and isinstance(last, Limited):
            seen.reason = self._in_words(last) or ""  # why its prompt is computed in small parts
        return seen

    def _why_waiting(self, last: ClientEvent | None, place: int | None, adapter: str) -> str:
        """Return what keeps a request from running, in words; where others have its blocks, who has most.

        place: in the queue; None if it is not considered now, or the view does not say.   adapter: its own, or "".
        """
        if not self._is_up:
            return "waits for the engine, which starts"
        if last is None:
            return "waits for the engine to see it, between two steps"
        if isinstance(last, Preempted):
            why = self._in_words(last) or ""
            return f"{why}; in the queue: {self._who_is_first(place)}" if place else why
        if not isinstance(last, Held) or last.reason is Reason.TURN or (place and last.reason is not Reason.LORA):
            at = f": {self._who_is_first(place)}" if place else ""
            return f"waits for its turn in the queue{at}{self._unfinished_prompts}"
        if needs_blocks(last):
            return self._why_blocks(last)
        why, adapters = self._in_words(last) or "", self._stats.running_adapters
        if last.reason is Reason.BUDGET:
            return f"{why}{self._unfinished_prompts}"
        if last.reason is Reason.ADAPTER and adapter:
            return f"{why}: {adapter}"
        return f"{why}: {', '.join(adapters)}" if last.reason is Reason.LORA and self._sees_all and adapters else why

    def _why_blocks(self, last: Held) -> str:
        """What it says of blocks, with those that are free now; the event tells how many were when it was written."""
        if self._view is None:
            return f"{self._in_words(last)}, when it was last considered"
        free = self._stats.num_free_blocks + self._stats.num_free_states
        why = self._in_words(replace(last, num_free_blocks=free)) or ""
        if last.num_blocks <= free:
            why = f"{why}, when it was last considered: it takes {last.num_blocks}, {free} are free now"
        return f"{why}; held by {self._holders}" if self._num_running else why

    def _who_is_first(self, place: int) -> str:
        """Return the place (from 0) of a request in the queue, and which one must enter before."""
        first = self._name_of_key.get(next(iter(self._in_line)), "another request")
        return f"{_ordinal(place + 1)}, first is {first}"

    @functools.cached_property
    def _unfinished_prompts(self) -> str:
        """Which of the viewer's prompts fill the steps, with how much of them is computed."""
        parts: list[str] = []
        for name, record, place in self._live:
            if self._view is None or place is None or place >= self._num_running:
                continue
            num_computed = int(self._view.num_computed[place])
            if num_computed < record.num_prompt_tokens:
                parts.append(f"{name} ({num_computed} of {record.num_prompt_tokens} tokens)")
        return f"; prompts that are computed: {', '.join(parts[:_MOST_NAMED])}" if parts else ""

    @functools.cached_property
    def _holders(self) -> str:
        """Who has the blocks: those with most by name, as far as the viewer sees them, and a count of the others."""
        assert self._view is not None
        held = self._view.num_blocks[: self._num_running]
        most = np.argsort(-held, kind="stable")
        named = [int(place) for place in most if self._names[place]][:_MOST_NAMED]
        parts = [f"{self._names[place]} ({held[place]})" for place in named]
        if num_others := len(held) - len(named):
            parts.append(f"{num_others} other request{'s' if num_others > 1 else ''}")
        return ", ".join(parts)

    def _in_words(self, event: ClientEvent) -> str | None:
        return in_words(event, self._name_of)

    def _name_of(self, client: int, handle: int) -> str | None:
        return self._name_of_key.get((client, handle))

    def _entries(self, arrived_s: float, events: Events) -> list[TimelineEntry]:
        entries = [
            TimelineEntry(round((event.time_s - arrived_s) * 1e3, 1), what, event.step)
            for event in events
            if (what := in_timeline(event, self._name_of)) is not None
        ]
        return [TimelineEntry(0.0, "arrived"), *entries]

    def cells(self) -> tuple[list[int], list[int], list[str]]:
        """Return the pool and the host's pool as runs (kind, cells, kind, cells, ...), and the names of those who have
        a block alone.

        Kinds: those of SchedulerView, with 3 for what others have and 4 + the place among the names.
        """
        if self._view is None:
            return [], [], []
        names = [name for name in self._names if name]
        numbers = iter(range(FIRST_OWNER + 1, FIRST_OWNER + 1 + len(names)))
        known = [*range(FIRST_OWNER), *(next(numbers) if name else FIRST_OWNER for name in self._names)]
        kinds = np.array(known, np.int32)
        return _runs(kinds[self._view.cells]), _runs(kinds[self._view.host_cells]), names


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def _runs(cells: np.ndarray) -> list[int]:
    starts = np.flatnonzero(np.diff(cells, prepend=-1))
    lengths = np.diff(starts, append=len(cells))
    return np.stack((cells[starts], lengths), axis=1).ravel().tolist()


def _of_ended(name: str, one: RequestRecord, now_s: float) -> dict[str, Any]:
    return {
        "id": name,
        "state": "ended",
        "reason": " and ".join(one.finish_reasons),
        "prompt_tokens": one.num_prompt_tokens,
        "output_tokens": one.num_output_tokens,
        "cached_tokens": one.num_cached_tokens or 0,
        "model": one.model,
        "adapter": one.adapter,
        "age_s": round(now_s - one.arrived_s, 3),
    }
