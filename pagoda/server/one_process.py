"""OneProcess: what a process that serves HTTP tells of itself, and does as all processes of the server do."""

from collections.abc import Iterable

import msgspec

from pagoda.base.errors import CapacityError, RequestError, WorkerDied
from pagoda.core.events import Admitted, ClientEvent, Events
from pagoda.metrics.counts import Counts
from pagoda.metrics.known_tokens import KnownTokens
from pagoda.metrics.observed_requests import EndedRequest, RequestObserver
from pagoda.server.errors import ApiError, as_api_error
from pagoda.server.generation import RequestStarter
from pagoda.server.served_adapters import AdapterChange, ServedAdapters


class RequestRecord(msgspec.Struct, frozen=True):
    """What is known of a request.

    client, handle: the engine's key of it.   num_cached_tokens: None until it was looked up.
    last: its last event, if it has not ended.   ended_s: None until then.   Times are those of time.perf_counter.
    """

    request_id: str
    client: int
    handle: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int | None
    arrived_s: float
    has_run: bool
    last: Events = Events()
    ended_s: float | None = None
    finish_reasons: tuple[str, ...] = ()


class RequestDetails(msgspec.Struct, frozen=True):
    """What else is known of one.   tokens: see KnownTokens.of."""

    record: RequestRecord
    events: Events
    tokens: KnownTokens | None


Alike = tuple[float, str, KnownTokens]
"""A request's arrival, its id and its tokens."""


Failure = tuple[int, str, str | None]
"""The status, message and field of an ApiError."""


class OneProcess:
    """The part of a server that one process is."""

    def __init__(self, starter: RequestStarter, adapters: ServedAdapters) -> None:
        self._starter, self._metrics = starter, starter.metrics
        self._adapters = adapters

    def counts(self) -> Counts:
        return self._metrics.counts()

    def oldest(self) -> RequestRecord | None:
        """Return the request that runs for longest."""
        observer = next(iter(self._metrics.running), None)
        return None if observer is None else _record_of(observer)

    def requests(self, prefix: str, with_ended: bool) -> list[RequestRecord]:
        """Return the requests whose ids begin with a prefix, in the order of their start.

        with_ended: those that have ended, too.
        """
        running = [one for one in self._metrics.running if one.request.request_id.startswith(prefix)]
        ended = [one for one in self._metrics.ended if with_ended and one.request_id.startswith(prefix)]
        return [*map(_record_of_ended, ended), *map(_record_of, running)]

    def details(self, request_id: str) -> RequestDetails | None:
        """Return what is known of the last request of an id."""
        for observer in self._metrics.running:
            if observer.request.request_id == request_id:
                return RequestDetails(_record_of(observer), Events(observer.events), observer.tokens)
        for one in reversed(self._metrics.ended):
            if one.request_id == request_id:
                return RequestDetails(_record_of_ended(one), Events(one.events), one.tokens)
        return None

    def most_alike(self, prefix: str, arrived_s: float, tokens: KnownTokens) -> Alike | None:
        """Return the request that begins most like these tokens, of those of a prefix that arrived before.

        Of several, the last one.
        """
        running = ((one.request.arrival_time_s, one.request.request_id, one) for one in self._metrics.running)
        ended = ((one.times.arrival_time, one.request_id, one) for one in self._metrics.ended)
        best: Alike | None = None
        most = 0
        for at_s, request_id, one in sorted((*running, *ended), key=lambda each: -each[0]):
            if at_s < arrived_s and request_id.startswith(prefix) and (known := one.tokens) is not None:
                common = tokens.num_common(known)
                if common > most:
                    best, most = (at_s, request_id, known), common
        return best

    async def abort(self, request_ids: set[str] | None, key: str | None) -> list[str]:
        """See RequestStarter."""
        return await self._starter.abort(request_ids, key)

    async def change_adapter(self, change: AdapterChange) -> Failure | None:
        """Load or unload an adapter. Return the error, if there is one."""
        try:
            await self._adapters.apply(change)
        except (ApiError, RequestError, CapacityError, WorkerDied) as error:
            known = as_api_error(error)
            return known.status, known.message, known.param
        return None


def oldest_of(records: Iterable[RequestRecord | None]) -> RequestRecord | None:
    """Return the request that arrived first."""
    return min((one for one in records if one is not None), key=lambda one: one.arrived_s, default=None)


def num_cached_of(events: Iterable[ClientEvent]) -> int | None:
    """Return how many tokens of its prompt a request found in the prefix cache; None if it was not looked up (yet)."""
    return next((event.num_cached for event in events if isinstance(event, Admitted)), None)


def _record_of(observer: RequestObserver) -> RequestRecord:
    request, last = observer.request, observer.last
    times = last.metrics if last is not None else None
    return RequestRecord(
        request.request_id,
        request.client_index,
        request.handle,
        request.num_prompt_tokens,
        observer.num_output_tokens,
        num_cached_of(observer.events),
        request.arrival_time_s,
        times is not None and times.first_scheduled_time is not None,
        Events(observer.events[-1:]),
    )


def _record_of_ended(one: EndedRequest) -> RequestRecord:
    return RequestRecord(
        one.request_id,
        *one.key,
        one.num_prompt_tokens,
        one.num_output_tokens,
        one.num_cached_tokens,
        one.times.arrival_time,
        True,
        ended_s=one.ended_s,
        finish_reasons=one.finish_reasons,
    )
