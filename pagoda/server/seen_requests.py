"""What callers may see of the requests of this server, and of the blocks that these have.

A caller sees the requests of its own key. With the admin key, or on a server of this machine that has no keys, it sees
all. Others are counts.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec import UNSET

from pagoda.core.events import Admitted, ClientEvent, Held, Limited, Preempted
from pagoda.core.view import FIRST_OWNER, SchedulerView
from pagoda.engine.wire import EngineStats
from pagoda.metrics.known_tokens import KnownTokens
from pagoda.metrics.prometheus import EndedRequest, RequestObserver, ServerMetrics
from pagoda.server.answers import OtherRequests, RequestTimeline, SeenRequest, TimelineEntry
from pagoda.server.event_words import in_words, needs_blocks
from pagoda.server.prefix_misses import explain_miss

_MOST_NAMED = 3
"""Requests that a reason names, of those that have the blocks."""


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

    view: of the engine, None while it is down.   now_s: by time.perf_counter.
    """

    def __init__(self, viewer: Viewer, metrics: ServerMetrics, view: SchedulerView | None, stats: EngineStats) -> None:
        self._viewer = viewer
        self._metrics = metrics
        self._view = view
        self._stats = stats
        keys = () if view is None else zip(view.clients.tolist(), view.handles.tolist(), strict=True)
        self._places = {key: place for place, key in enumerate(keys)}
        self._names = [""] * len(self._places)
        self._num_running = 0 if view is None else view.num_running
        self._mine: list[tuple[str, RequestObserver, int | None]] = []
        for observer in metrics.running:
            request = observer.request
            if (name := viewer.name_of(request.request_id)) is not None:
                place = self._places.get((request.client_index, request.handle))
                self._mine.append((name, observer, place))
                if place is not None:
                    self._names[place] = name

    @property
    def others(self) -> OtherRequests:
        """Return the counts of all that the viewer does not see."""
        running = self._names[: self._num_running]
        num_running = sum(1 for name in running if not name)
        waiting = self._stats.num_waiting + self._stats.num_swapped
        return OtherRequests(num_running, max(0, waiting - len(self._mine) + sum(map(bool, running))))

    def live(self, now_s: float) -> Iterator[SeenRequest]:
        """Iterate over the viewer's requests that have not ended."""
        for name, observer, place in self._mine:
            yield self._seen(name, observer, place, now_s)

    def ended(self, now_s: float) -> Iterator[SeenRequest]:
        """Iterate over those that have ended, the last first."""
        for one in reversed(self._metrics.ended):
            if (name := self._viewer.name_of(one.request_id)) is not None:
                yield SeenRequest(**_of_ended(name, one, now_s))

    def find(
        self, request_id: str, now_s: float, block_size: int, text_of: Callable[[int], str]
    ) -> RequestTimeline | None:
        """Return the timeline of one of the viewer's requests.   text_of: returns the text of a token id."""

        def miss(arrived_s: float, events: Sequence[ClientEvent], num_prompt: int, tokens: KnownTokens | None) -> Any:
            num_cached = _num_cached(events)
            if tokens is None or num_cached is None:
                return UNSET
            earlier = self._tokens_before(arrived_s)
            return explain_miss(tokens, num_prompt, num_cached, block_size, earlier, text_of) or UNSET

        for name, observer, place in self._mine:
            if name == request_id:
                seen, request = self._seen(name, observer, place, now_s), observer.request
                fields = {field: getattr(seen, field) for field in seen.__struct_fields__}
                timeline = self._timeline(request.arrival_time_s, observer.events)
                found = miss(request.arrival_time_s, observer.events, request.num_prompt_tokens, observer.tokens)
                return RequestTimeline(**fields, timeline=timeline, prefix_miss=found)
        for one in reversed(self._metrics.ended):
            if self._viewer.name_of(one.request_id) == request_id:
                timeline = self._timeline(one.times.arrival_time, one.events)
                end_ms = round((one.ended_s - one.times.arrival_time) * 1e3, 1)
                timeline.append(TimelineEntry(end_ms, f"ended: {' and '.join(one.finish_reasons)}"))
                found = miss(one.times.arrival_time, one.events, one.num_prompt_tokens, one.tokens)
                return RequestTimeline(**_of_ended(request_id, one, now_s), timeline=timeline, prefix_miss=found)
        return None

    def _tokens_before(self, arrived_s: float) -> Iterator[tuple[str, KnownTokens | None]]:
        """Iterate over the viewer's requests that came earlier, the last first, with their tokens."""
        for name, observer, _ in reversed(self._mine):
            if observer.request.arrival_time_s < arrived_s:
                yield name, observer.tokens
        for one in reversed(self._metrics.ended):
            if one.times.arrival_time < arrived_s and (name := self._viewer.name_of(one.request_id)) is not None:
                yield name, one.tokens

    def _seen(self, name: str, observer: RequestObserver, place: int | None, now_s: float) -> SeenRequest:
        view, request = self._view, observer.request
        runs = place is not None and place < self._num_running
        seen = SeenRequest(
            id=name,
            state="running" if runs else "preempted" if place is not None or observer.num_output_tokens else "waiting",
            prompt_tokens=request.num_prompt_tokens,
            output_tokens=observer.num_output_tokens,
            cached_tokens=_num_cached(observer.events) or 0,
            age_s=round(now_s - request.arrival_time_s, 3),
        )
        if view is not None and place is not None:
            seen.computed_tokens = int(view.num_computed[place])
            seen.blocks = int(view.num_blocks[place])
        if not runs:
            seen.reason = self._why_waiting(observer.events)
        elif seen.computed_tokens < seen.prompt_tokens:
            seen.reason = self._why_slow(observer.events)
        return seen

    def _why_slow(self, events: Sequence[ClientEvent]) -> str:
        """Return why the prompt of a request that runs is computed in small parts; "" if nothing limits it."""
        last = events[-1] if events else None
        return in_words(last, self._name_of) or "" if isinstance(last, Limited) else ""

    def _why_waiting(self, events: Sequence[ClientEvent]) -> str:
        """Return what keeps a request from running, in words; where others have its blocks, who has most."""
        if self._view is None:
            return "waits for the engine, which starts"
        last = events[-1] if events else None
        if isinstance(last, Preempted):
            return in_words(last, self._name_of) or ""
        if not isinstance(last, Held):
            return "waits for its turn in the queue"
        why = in_words(last, self._name_of) or ""
        return f"{why}; held by {self._holders}" if needs_blocks(last) and self._num_running else why

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

    def _name_of(self, handle: int) -> str | None:
        observer = self._metrics.observers.get(handle)
        return None if observer is None else self._viewer.name_of(observer.request.request_id)

    def _timeline(self, arrived_s: float, events: Sequence[ClientEvent]) -> list[TimelineEntry]:
        found = [(event.time_s, in_words(event, self._name_of)) for event in events]
        entries = [TimelineEntry(round((at_s - arrived_s) * 1e3, 1), what) for at_s, what in found if what is not None]
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


def _runs(cells: np.ndarray) -> list[int]:
    starts = np.flatnonzero(np.diff(cells, prepend=-1))
    lengths = np.diff(starts, append=len(cells))
    return np.stack((cells[starts], lengths), axis=1).ravel().tolist()


def _num_cached(events: Sequence[ClientEvent]) -> int | None:
    """Return how many tokens of its prompt a request found in the prefix cache; None if it was not looked up (yet)."""
    return next((event.num_cached for event in events if isinstance(event, Admitted)), None)


def _of_ended(name: str, one: EndedRequest, now_s: float) -> dict[str, Any]:
    return {
        "id": name,
        "state": "ended",
        "reason": " and ".join(one.finish_reasons),
        "prompt_tokens": one.num_prompt_tokens,
        "output_tokens": one.num_output_tokens,
        "cached_tokens": one.num_cached_tokens,
        "age_s": round(now_s - one.times.arrival_time, 3),
    }
