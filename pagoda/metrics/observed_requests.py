"""RequestObserver and EndedRequest: what is known of a request while it runs, and afterwards."""

import time
from array import array
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Self

from pagoda.base.errors import RequestError
from pagoda.base.outputs import RequestMetrics, RequestOutput
from pagoda.core.events import ClientEvent
from pagoda.core.request import Request, RequestKey
from pagoda.metrics.known_tokens import KnownTokens

if TYPE_CHECKING:
    from pagoda.metrics.prometheus import ServerMetrics

_MOST_EVENTS = 128


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """What is known of a request that has ended.   ended_s: by time.perf_counter.   tokens: see KnownTokens.of."""

    request_id: str
    key: RequestKey
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    finish_reasons: tuple[str, ...]
    times: RequestMetrics
    events: tuple[ClientEvent, ...]
    ended_s: float
    tokens: KnownTokens | None

    @staticmethod
    def of(observer: "RequestObserver") -> "EndedRequest":
        request, last = observer.request, observer.last
        times = last.metrics if last is not None else None
        return EndedRequest(
            request.request_id,
            request.key,
            request.num_prompt_tokens,
            (last.num_cached_tokens if last is not None else None) or 0,
            observer.num_output_tokens,
            tuple(dict.fromkeys(observer.finish_reasons)),
            replace(times) if times is not None else RequestMetrics(request.arrival_time_s),
            tuple(observer.events),
            time.perf_counter(),
            observer.tokens,
        )


class RequestObserver:
    """Updates the metrics for one request, which runs during the block: call `on_delta` for each delta.

    A block that ends with a RequestError leaves no trace: the request was refused before it ran.
    """

    def __init__(self, metrics: "ServerMetrics", request: Request) -> None:
        self._metrics = metrics
        self.request = request
        self.last: RequestOutput | None = None
        self.events: list[ClientEvent] = []
        self._last_s = 0.0
        self._first_output = array("i")
        self._open = set(range(request.num_seqs))
        self.num_output_tokens = 0
        self.finish_reasons: list[str] = []

    def __enter__(self) -> Self:
        self._metrics.running[self] = None
        self._metrics.observers[self.request.handle] = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del self._metrics.running[self]
        del self._metrics.observers[self.request.handle]
        if not isinstance(error, RequestError):
            self._on_end(time.perf_counter())
            self._metrics.ended.append(EndedRequest.of(self))

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
