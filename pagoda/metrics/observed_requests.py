"""ObservedRequests: what is known of the requests of one process: those that run, and those that ended last."""

import time
from array import array
from collections import deque
from collections.abc import Iterable
from types import TracebackType
from typing import Self

import msgspec

from pagoda.base.errors import RequestError
from pagoda.base.outputs import RequestOutput
from pagoda.core.events import Admitted, ClientEvent, DraftsVerified, Events, Routed
from pagoda.core.request import Request
from pagoda.metrics.known_tokens import KnownTokens
from pagoda.metrics.prometheus import ServerMetrics

_MOST_EVENTS = 128
_MOST_ENDED = 256


class RequestRecord(msgspec.Struct, frozen=True):
    """What is known of a request.

    client, handle: the engine's key of it.   num_cached_tokens: None until it was looked up.   last: its last event.
    num_draft_tokens, num_accepted_tokens: as in RequestMetrics.
    num_open: its outputs that have not ended.
    adapter: its name, "" without one.   model: the name of the one that it is a request to.
    ended_s: None until it has ended.   Times are those of time.perf_counter.
    """

    request_id: str
    client: int
    handle: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int | None
    arrived_s: float
    num_open: int = 1
    last: Events = Events()
    ended_s: float | None = None
    finish_reasons: tuple[str, ...] = ()
    adapter: str = ""
    model: str = ""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


class RequestDetails(msgspec.Struct, frozen=True):
    """What else is known of one.   tokens: see KnownTokens.of."""

    record: RequestRecord
    events: Events
    tokens: KnownTokens | None


Alike = tuple[float, str, KnownTokens]
"""A request's arrival, its id and its tokens."""


def oldest_of(records: Iterable[RequestRecord | None]) -> RequestRecord | None:
    """Return the request that arrived first."""
    return min((one for one in records if one is not None), key=lambda one: one.arrived_s, default=None)


def num_cached_of(events: Iterable[ClientEvent]) -> int | None:
    """Return how many tokens of its prompt a request found in the prefix cache; None if it was not looked up (yet)."""
    return next((event.num_cached for event in events if isinstance(event, Admitted)), None)


class RequestObserver:
    """Updates the metrics for one request, which runs during the block: call `on_delta` for each delta.

    A block that ends with a RequestError leaves no trace: the request was refused before it ran.
    """

    def __init__(self, observed: "ObservedRequests", request: Request) -> None:
        self._observed, self._metrics = observed, observed.metrics
        self.request = request
        self.last: RequestOutput | None = None
        self.events: list[ClientEvent] = []
        self._last_s = 0.0
        self._first_output = array("i")
        self._open = set(range(request.num_seqs))
        self.num_output_tokens = 0
        self.finish_reasons: list[str] = []

    def __enter__(self) -> Self:
        self._observed.running[self.request.handle] = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del self._observed.running[self.request.handle]
        if not isinstance(error, RequestError):
            now_s = time.perf_counter()
            self._on_end(now_s)
            self._observed.ended.append(self.details(now_s))

    def record(self, ended_s: float | None = None) -> RequestRecord:
        """Return what is known of the request.   ended_s: when it ended, if it has."""
        request, last, num_cached = self.request, self.last, num_cached_of(self.events)
        times = last.metrics if last is not None else None
        if ended_s is not None:
            num_cached = (last.num_cached_tokens if last is not None else None) or 0
        return RequestRecord(
            request.request_id,
            *request.key,
            request.num_prompt_tokens,
            self.num_output_tokens,
            num_cached,
            request.arrival_time_s,
            len(self._open),
            Events(self.events[-1:]),
            ended_s,
            tuple(dict.fromkeys(self.finish_reasons)),
            request.lora.name if request.lora is not None else "",
            self._metrics.model_name,
            *(() if times is None else (times.num_draft_tokens, times.num_accepted_tokens)),
        )

    def details(self, ended_s: float | None = None) -> RequestDetails:
        """Return all that is known of it."""
        return RequestDetails(self.record(ended_s), Events(self.events), self.tokens)

    @property
    def tokens(self) -> KnownTokens | None:
        """Return the tokens so far, with those of the first output."""
        return KnownTokens.of(self.request, self._first_output)

    def add_event(self, event: ClientEvent) -> None:
        """Keep an event: of many, the first ones and the last ones."""
        if len(self.events) >= _MOST_EVENTS:
            del self.events[_MOST_EVENTS // 4]
        self.events.append(event)

    def on_delta(self, delta: RequestOutput, now_s: float) -> int:
        """Observe a delta; return its number of tokens."""
        metrics, self.last = self._metrics, delta
        count = 0
        for part in delta.outputs:
            new = len(part.token_ids)
            count += new
            if part.index == 0:
                self._first_output.extend(part.token_ids)
            if new and self.num_output_tokens:
                metrics.on_gap((now_s - self._last_s) / new)
            if part.finish_reason is not None and part.index in self._open:
                self._open.discard(part.index)
                self._finish(part.finish_reason)
        is_read = delta.finished and delta.error is None and "abort" not in self.finish_reasons
        if is_read and not self.request.wants_output:
            metrics.on_prompt(self.request.num_prompt_tokens, delta.num_cached_tokens or 0)
        if count:
            if not self.num_output_tokens:
                num_cached = delta.num_cached_tokens or 0
                first_s = delta.metrics.first_token_time if delta.metrics is not None else None
                metrics.on_first_token((first_s or now_s) - self.request.arrival_time_s, num_cached > 0)
                metrics.on_prompt(self.request.num_prompt_tokens, num_cached)
            metrics.num_output_tokens += count
            self.num_output_tokens += count
            self._last_s = now_s
        return count

    def _on_end(self, now_s: float) -> None:
        """Observe the end of the request; count unfinished outputs as aborted."""
        for _ in self._open:
            self._finish("abort")
        self._open.clear()
        times = self.last.metrics if self.last is not None else None
        self._metrics.on_end(self.request, self.num_output_tokens, times, now_s)

    def _finish(self, reason: str) -> None:
        self._metrics.on_finish(reason)
        self.finish_reasons.append(reason)


class ObservedRequests:
    """The requests of one process, each of which a RequestObserver counts in the metrics.

    running: by handle, in the order of their start.
    """

    def __init__(self, metrics: ServerMetrics) -> None:
        self.metrics = metrics
        self.running: dict[int, RequestObserver] = {}
        self.ended = deque[RequestDetails](maxlen=_MOST_ENDED)

    def on_event(self, event: ClientEvent) -> None:
        """Add what happened to a request to what is known of it."""
        if isinstance(event, Routed):
            self.metrics.on_routed(event.because)
        if not isinstance(event, DraftsVerified) and (observer := self.running.get(event.handle)):
            observer.add_event(event)

    def oldest(self) -> RequestRecord | None:
        """Return the request that runs for longest."""
        observer = next(iter(self.running.values()), None)
        return None if observer is None else observer.record()

    def requests(self, prefix: str, with_ended: bool) -> list[RequestRecord]:
        """Return the requests whose ids begin with a prefix, in the order of their start.

        with_ended: those that have ended, too.
        """
        running = [one.record() for one in self.running.values() if one.request.request_id.startswith(prefix)]
        ended = [one.record for one in self.ended if with_ended and one.record.request_id.startswith(prefix)]
        return [*ended, *running]

    def details(self, request_id: str) -> RequestDetails | None:
        """Return what is known of the last request of an id."""
        running = (one.details() for one in self.running.values() if one.request.request_id == request_id)
        ended = (one for one in reversed(self.ended) if one.record.request_id == request_id)
        return next(running, None) or next(ended, None)

    def most_alike(self, prefix: str, arrived_s: float, tokens: KnownTokens) -> Alike | None:
        """Return the request that begins most like these tokens, of those of a prefix that arrived before.

        Of several, the last one.
        """
        running = ((one.request.arrival_time_s, one.request.request_id, one) for one in self.running.values())
        ended = ((one.record.arrived_s, one.record.request_id, one) for one in self.ended)
        best: Alike | None = None
        most = 0
        for at_s, request_id, one in sorted((*running, *ended), key=lambda each: -each[0]):
            if at_s < arrived_s and request_id.startswith(prefix) and (known := one.tokens) is not None:
                common = tokens.num_common(known)
                if common > most:
                    best, most = (at_s, request_id, known), common
        return best
