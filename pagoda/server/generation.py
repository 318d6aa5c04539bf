"""Generation: what the engine does for one HTTP request, and what is known of it."""

import contextlib
import math
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request as HttpRequest

from pagoda.base.outputs import RequestMetrics, RequestOutput
from pagoda.core.events import Routed
from pagoda.core.request import Request
from pagoda.engine.async_engine import AsyncEngine
from pagoda.engine.outputs.mailbox import merged
from pagoda.metrics.observed_requests import ObservedRequests, RequestObserver
from pagoda.server.errors import ApiError
from pagoda.server.remote_admission import AnyAdmission, AnyPlace
from pagoda.server.request_state import request_state


class RequestFigures(Struct):
    """Token counts and durations of a request; durations are missing until they are known.

    missed_tokens: of the prompt, not found in the prefix cache.
    lost_tokens, preempted_ms: what preemptions cost: tokens to compute again, and the wait to run again.
    scheduler_ms: that the scheduler took for the steps of all requests while this one waited or ran.
    """

    id: str
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    missed_tokens: int | UnsetType = UNSET
    preemptions: int | UnsetType = UNSET
    lost_tokens: int | UnsetType = UNSET
    preempted_ms: float | UnsetType = UNSET
    draft_tokens: int | UnsetType = UNSET
    accepted_draft_tokens: int | UnsetType = UNSET
    queue_ms: float | UnsetType = UNSET
    prefill_ms: float | UnsetType = UNSET
    decode_ms: float | UnsetType = UNSET
    scheduler_ms: float | UnsetType = UNSET


@dataclass(slots=True)
class Serving:
    """What generations run with.   admission: learns from the lengths of their outputs."""

    llm: AsyncEngine
    observed: ObservedRequests
    admission: AnyAdmission


class Generation:
    """What the engine does for one HTTP request. Created by RequestStarter, iterated once.

    It counts against admission from its creation, so its owner must close it, iterated or not. At the end of the HTTP
    request, the access log, spans and Server-Timing show what is known of it.
    """

    def __init__(
        self,
        serving: Serving,
        http: HttpRequest,
        request_id: str,
        requests: Sequence[Request],
        place: AnyPlace,
        is_stream: bool = False,
    ) -> None:
        """requests: of its prompts; none for a job, which makes them one after another.

        place: closed when the generation ends, however it ends.
        """
        self.requests = requests
        self.request_id = request_id
        self.is_stream = is_stream
        self.num_prompt_tokens = sum(r.num_prompt_tokens for r in requests)
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.routed: dict[int, Routed] = {}  # by handle: to which of several replicas
        self.num_reasoning_tokens: int | None = None  # None: of a model without reasoning
        self.finish_reasons: list[str] = []  # of the outputs that have ended
        self.sampling = requests[0].sampling if requests else None
        self.key = request_state(http).caller.key
        self.arrived_s = place.arrived_s
        self._times: dict[int, RequestMetrics] = {}  # of each request, by its handle
        self._serving = serving
        self.metrics = serving.observed.metrics
        self._place, self._at_end = place, place.at_end.pop_all()
        request_state(http).generation = self

    def close(self) -> None:
        """Release its admission. Idempotent; its outputs must not be running."""
        self._at_end.close()

    def outputs(self) -> "contextlib.aclosing[AsyncGenerator[tuple[int, RequestOutput], None]]":
        """Iterate over (index of the prompt, delta); prompts interleave. Leaving the block aborts unfinished requests.

        Iterating raises ApiError if the engine ends a request with an error.
        """
        each = [self._follow(index) for index in range(len(self.requests))]
        return contextlib.aclosing(each[0] if len(each) == 1 else merged(each))

    async def _follow(self, index: int) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        request = self.requests[index]
        observer = RequestObserver(self._serving.observed, request)
        try:
            with self._counting(observer):
                async with contextlib.aclosing(self._serving.llm.stream(request)) as deltas:
                    async for delta in deltas:
                        self._count(observer, delta)
                        if delta.finished and delta.error is not None:
                            # "error" is a failure of the engine; otherwise, the request can never be served.
                            is_ours = any(part.finish_reason == "error" for part in delta.outputs)
                            raise ApiError(500 if is_ours else 400, delta.error)
                        yield index, delta
        finally:
            reasons = observer.finish_reasons
            if request.sampling is not None and reasons and set(reasons) <= {"stop", "length"}:
                self._serving.admission.note_output(observer.num_output_tokens / request.num_seqs)

    async def follow_job(
        self, request: Request, outputs: AsyncGenerator[RequestOutput, None]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of a request that a job has made, after counting them."""
        self.num_prompt_tokens += request.num_prompt_tokens
        self.sampling = self.sampling or request.sampling
        observer = RequestObserver(self._serving.observed, request)
        with self._counting(observer):
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    self._count(observer, output)
                    yield output

    @contextlib.contextmanager
    def _counting(self, observer: RequestObserver) -> Iterator[None]:
        """Observe a request during the block."""
        try:
            with observer:
                yield
        finally:
            self.finish_reasons += observer.finish_reasons

    def _count(self, observer: RequestObserver, delta: RequestOutput) -> None:
        is_first = not observer.num_output_tokens
        self.num_output_tokens += observer.on_delta(delta, time.perf_counter())
        has_no_tokens = delta.finished and not observer.request.wants_output  # it is pooled, or only scored
        if (is_first and observer.num_output_tokens) or has_no_tokens:
            self.num_cached_tokens += delta.num_cached_tokens or 0
        if delta.metrics is not None:
            self._times[observer.request.handle] = delta.metrics
        if is_first:
            routed = [event for event in observer.events if isinstance(event, Routed)]
            self.routed |= {event.handle: event for event in routed}
            self._place.start()

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompts, and of the outputs so far."""
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def figures(self) -> RequestFigures:
        """What is known of it so far."""
        noted = RequestFigures(self.request_id, self.num_prompt_tokens, self.num_output_tokens, self.num_cached_tokens)
        times = self.times
        if times is None:
            return noted
        noted.missed_tokens = self.num_prompt_tokens - self.num_cached_tokens
        noted.preemptions = times.num_preemptions
        if times.num_preemptions:
            noted.lost_tokens = times.num_lost_tokens
            noted.preempted_ms = as_ms(times.preempted_time)
        if times.num_draft_tokens:
            noted.draft_tokens = times.num_draft_tokens
            noted.accepted_draft_tokens = times.num_accepted_tokens
        phases = (times.time_in_queue, times.time_in_prefill, times.time_in_decode)
        noted.queue_ms, noted.prefill_ms, noted.decode_ms = (UNSET if one is None else as_ms(one) for one in phases)
        noted.scheduler_ms = round(times.scheduler_time * 1e3, 3)
        return noted

    @property
    def log_fields(self) -> dict[str, Any]:
        """What the access log shows of it."""
        return msgspec.to_builtins(self.figures) | {"finish_reason": "+".join(dict.fromkeys(self.finish_reasons))}

    @property
    def times(self) -> RequestMetrics | None:
        """When things happened, to all prompts together: the first step and token of any, the last end."""
        each = list(self._times.values())
        return each[0] if len(each) == 1 else _together(each) if each else None


def _together(each: Sequence[RequestMetrics]) -> RequestMetrics:
    """Return the times of several prompts as those of one request: its phases add up to its duration."""
    first = min(each, key=lambda one: one.first_scheduled_time or math.inf)
    first_tokens = [one.first_token_time for one in each if one.first_token_time is not None]
    last_tokens = [one.last_token_time for one in each if one.last_token_time is not None]
    ends = [one.finished_time for one in each if one.finished_time is not None]
    return RequestMetrics(
        first.arrival_time,
        first.first_scheduled_time,
        min(first_tokens, default=None),
        max(last_tokens, default=None),
        max(ends) if len(ends) == len(each) else None,
        max(one.scheduler_time for one in each),
        first.queue_reasons,
        sum(one.num_preemptions for one in each),
        sum(one.num_lost_tokens for one in each),
        sum(one.preempted_time for one in each),
        sum(one.num_draft_tokens for one in each),
        sum(one.num_accepted_tokens for one in each),
    )


def as_ms(seconds: float) -> float:
    return round(seconds * 1e3, 1)
