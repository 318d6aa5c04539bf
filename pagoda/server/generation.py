"""Generation: run the prompts of one HTTP request, with all that serving needs around it.

Admission, cache salts, metrics, timings and the cleanup after a disconnect, an error or the last token are handled
here, so that routes only deal with their API's format.
"""

import asyncio
import contextlib
import hashlib
import hmac
import itertools
import math
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request as HttpRequest

from pagoda.base.errors import RequestError
from pagoda.base.outputs import RequestMetrics, RequestOutput
from pagoda.base.sampling_params import SamplingParams
from pagoda.core.request import MediaItem, Request
from pagoda.engine.async_engine import AsyncEngine
from pagoda.engine.inputs.adapters import Adapter
from pagoda.engine.inputs.params_preparer import Params, PreparedParams
from pagoda.engine.inputs.prompts import Prompt, size_of
from pagoda.engine.outputs.mailbox import PROMPTS_PER_TURN, merged
from pagoda.engine.tokenizers.tokenizer import LONG_TEXT_CHARS
from pagoda.metrics.observed_requests import ObservedRequests, RequestObserver
from pagoda.metrics.prometheus import ServerMetrics
from pagoda.server.errors import ApiError
from pagoda.server.remote_admission import AnyAdmission, AnyPlace
from pagoda.server.sending import cancel_on_disconnect


class LiveIds:
    """Ids of running generations, by API key. Different keys may use the same id, and cannot see each other's.

    The engine's ids are per prompt, made of the key's number, the request's id and the prompt's number.
    """

    def __init__(self) -> None:
        self._engine_ids: dict[tuple[str, str], tuple[str, ...]] = {}
        self._prompts: dict[tuple[str, str], str] = {}

    def find_in_use(self, key: str, request_id: str, num_prompts: int) -> str | None:
        """Return an id that is in use already, of those that a request of this id would have; None if it is free."""
        for name in (request_id, *_prompt_ids(request_id, num_prompts)):
            if (key, name) in self._engine_ids or (key, name) in self._prompts:
                return name
        return None

    @contextlib.contextmanager
    def reserve(self, key: str, request_id: str, num_prompts: int) -> Iterator[tuple[str, ...]]:
        """Reserve an id during the block; yield the engine's id of each prompt. Raises ApiError (400) if in use."""
        names = _prompt_ids(request_id, num_prompts)
        if (used := self.find_in_use(key, request_id, num_prompts)) is not None:
            raise ApiError(400, f"request id {used!r} is in use", "request_id")
        prefix = f"{key}/" if key else ""
        engine_ids = {name: f"{prefix}{name}" for name in names or [request_id]}
        self._engine_ids[key, request_id] = tuple(engine_ids.values())
        self._prompts.update({(key, name): engine_ids[name] for name in names})
        try:
            yield tuple(engine_ids.values())
        finally:
            del self._engine_ids[key, request_id]
            for name in names:
                del self._prompts[key, name]

    def add(self, key: str, request_id: str, engine_id: str) -> None:
        """Add an engine's id to those of a reserved id."""
        self._engine_ids[key, request_id] += (engine_id,)

    def find(self, request_ids: set[str] | None, key: str | None) -> list[tuple[str, tuple[str, ...]]]:
        """Return (id, engine ids) of the running requests or single prompts with these ids. None: all requests."""
        if request_ids is None:
            return [(name, ids) for (owner, name), ids in self._engine_ids.items() if key in (None, owner)]
        named = [*self._engine_ids.items(), *((name, (one,)) for name, one in self._prompts.items())]
        return [(name, ids) for (owner, name), ids in named if name in request_ids and key in (None, owner)]


def _prompt_ids(request_id: str, num_prompts: int) -> list[str]:
    """Return the ids of the single prompts of a request that has several."""
    return [f"{request_id}-{index}" for index in range(num_prompts)] if num_prompts > 1 else []


_BYTES_PER_TOKEN = 4
"""Of a body, for an estimate of the tokens of its prompts before they are read."""


@dataclass(frozen=True, slots=True)
class RawPrompts:
    """The prompts of one HTTP request before they are tokenised.

    params: of each prompt.   names: what errors call each prompt, () for "prompt".   lora: the adapter to use.
    add_special_tokens: add those that the tokenizer puts around a text prompt.   cache_salt: as the caller gave it.
    is_stream: the answer is sent as it comes.
    """

    prompts: Sequence[Prompt]
    params: Sequence[Params]
    names: Sequence[str]
    lora: Adapter | None
    add_special_tokens: bool = True
    priority: int = 0
    cache_salt: str | None = None
    is_stream: bool = False

    @property
    def num_chars(self) -> int:
        """Characters to tokenise, and bytes of embeddings to read."""
        first = self.params[0]
        words = first.bad_words if isinstance(first, SamplingParams) else ()
        return sum(map(len, words)) + sum(map(size_of, self.prompts))

    @property
    def media(self) -> list[MediaItem]:
        """What encoders read, as far as it is there before the prompts are read: images of rendered chats."""
        return [item for prompt in self.prompts if isinstance(prompt, Mapping) for item in prompt.get("media", ())]

    @property
    def has_grammar(self) -> bool:
        first = self.params[0]
        return isinstance(first, SamplingParams) and first.structured_outputs is not None


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


class Generation:
    """What the engine does for one HTTP request. Created by RequestStarter, iterated once.

    It counts against admission from its creation, so its owner must close it, iterated or not. At the end of the HTTP
    request, the access log, spans and Server-Timing tell what is known of it.
    """

    def __init__(
        self,
        starter: "RequestStarter",
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
        self.num_reasoning_tokens: int | None = None  # None: of a model without reasoning
        self.finish_reasons: list[str] = []  # of the outputs that have ended
        self.sampling = requests[0].sampling if requests else None
        self.key: str = http.scope["state"]["key"]
        self.arrived_s = place.arrived_s
        self._times: dict[int, RequestMetrics] = {}  # of each request, by its handle
        self._starter = starter
        self._place, self._at_end = place, place.at_end.pop_all()
        http.scope["state"]["generation"] = self

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
        observer = RequestObserver(self._starter.observed, request)
        try:
            with self._counting(observer):
                async with contextlib.aclosing(self._starter.llm.stream(request)) as deltas:
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
                self._starter.admission.note_output(observer.num_output_tokens / request.num_seqs)

    async def follow_job(
        self, request: Request, outputs: AsyncGenerator[RequestOutput, None]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of a request that a job has made, after counting them."""
        self.num_prompt_tokens += request.num_prompt_tokens
        self.sampling = self.sampling or request.sampling
        observer = RequestObserver(self._starter.observed, request)
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
        if times.time_in_queue is not None:
            noted.queue_ms = as_ms(times.time_in_queue)
        first = times.first_token_time
        if first is not None and times.first_scheduled_time is not None:
            noted.prefill_ms = as_ms(first - times.first_scheduled_time)
        if first is not None and (last := times.finished_time or times.last_token_time) is not None:
            noted.decode_ms = as_ms(last - first)
        noted.scheduler_ms = round(times.scheduler_time * 1e3, 3)
        return noted

    @property
    def told(self) -> dict[str, Any]:
        """What the access log tells of it."""
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


def _media_bytes(media: Iterable[MediaItem]) -> int:
    """Return the bytes that encoders read."""
    return sum(item.features.nbytes for item in media if item.features is not None)


def _most_logprobs(request: Request, is_stream: bool) -> int:
    """Return how many log-probabilities a request may come to; in a stream, those of outputs are sent at once."""
    params, count = request.sampling, 0
    if params is not None and params.prompt_logprobs is not None:
        count += request.num_prompt_tokens * (params.prompt_logprobs + 1)
    if params is not None and params.logprobs is not None and not is_stream:
        count += (params.max_tokens or 0) * (params.logprobs + 1)
    return count * request.num_seqs


class RequestStarter:
    """Starts generations on one AsyncEngine."""

    def __init__(
        self,
        llm: AsyncEngine,
        admission: AnyAdmission,
        metrics: ServerMetrics,
        salt_secret: bytes,
    ) -> None:
        """salt_secret: of cache salts."""
        self.llm = llm
        self.metrics = metrics
        self.admission = admission
        self.observed = ObservedRequests(metrics)
        llm.on_event = self.observed.on_event
        self._salt_secret = salt_secret
        self._live = LiveIds()
        self._is_job_aborted: dict[str, bool] = {}

    def is_free(self, key: str, request_id: str, num_prompts: int) -> bool:
        """Return whether a generation of this API key could have this id."""
        return self._live.find_in_use(key, request_id, num_prompts) is None

    def reserve_job(self, key: str, request_id: str, place: AnyPlace) -> Callable[[], str]:
        """Reserve an id for requests that follow from one another; return what returns the engine's id for each.

        An abort of the id aborts those that run, and what returns ids raises RequestError from then on.
        Raises ApiError (400) if it is in use.
        """
        (first,) = place.at_end.enter_context(self._live.reserve(key, request_id, 1))
        self._is_job_aborted[first] = False
        place.at_end.callback(self._is_job_aborted.pop, first)
        numbers = itertools.count(1)

        def new_id() -> str:
            if self._is_job_aborted[first]:
                raise RequestError("the transcription was aborted")
            engine_id = f"{first} {next(numbers)}"  # no id of a caller has a space
            self._live.add(key, request_id, engine_id)
            return engine_id

        return new_id

    @contextlib.asynccontextmanager
    async def admitted(
        self,
        http: HttpRequest,
        num_prompts: int,
        num_outputs: int = 0,
        max_tokens: int | None = 0,
        is_read: bool = True,
    ) -> AsyncGenerator[AnyPlace, None]:
        """Admit a request before any work on its prompts, on an estimate of its tokens; yield its place for `begin`.

        It counts until the generation that is begun with it is closed, or the block is left without one.
        num_outputs: of all prompts; 0 if they are pooled.   max_tokens: of each output; None: no limit.
        is_read: whether the body was read; otherwise, a client that leaves is only noticed after the wait in line.
        Raises Refusal (429), RequestError or WorkerDied.
        """
        if self.llm.died is not None:
            raise self.llm.died
        state, admission = http.scope["state"], self.admission
        longest = num_prompts * self.llm.input_processor.limits.longest_prompt
        num_tokens = min(state["body_bytes"] // _BYTES_PER_TOKEN, longest)
        num_tokens += num_outputs * admission.expected_output(max_tokens)
        place = await admission.admit(num_outputs or num_prompts, num_tokens, state["key"])
        with place.at_end:
            if place.is_in_line:
                turn = place.wait_for_turn()
                await (cancel_on_disconnect(http, turn) if is_read else turn)
            yield place

    async def abort(self, request_ids: set[str] | None, key: str | None) -> list[str]:
        """Abort running generations, or all if `request_ids` is None; return the ids of those that were running.

        key: only abort generations of this API key; None: of every key.
        """
        found = self._live.find(request_ids, key)
        engine_ids = [engine_id for _, each in found for engine_id in each]
        jobs = {one for one in engine_ids if one in self._is_job_aborted}
        for one in jobs:
            self._is_job_aborted[one] = True
        running = jobs | set(await self.llm.abort(engine_ids))
        return [request_id for request_id, engine_ids in found if not running.isdisjoint(engine_ids)]

    async def begin(self, http: HttpRequest, place: AnyPlace, asked: RawPrompts, request_id: str) -> Generation:
        """Tokenise and validate all prompts of a request. The caller must close the Generation.

        Raises RequestError, ApiError (400) or WorkerDied.
        """
        self._check_lengths(asked.params[0])
        most, truncate = self.llm.input_processor.limits.longest_prompt, asked.params[0].truncate_prompt_tokens
        if truncate is not None and truncate > most:
            text = f"truncate_prompt_tokens={truncate} is more than the model's context of {most} tokens"
            raise ApiError(400, text, "truncate_prompt_tokens")
        key = http.scope["state"]["key"]
        await place.keep(_media_bytes(asked.media))  # at once: prompts may queue for a thread behind others' images
        engine_ids = place.at_end.enter_context(self._live.reserve(key, request_id, len(asked.prompts)))
        making = self._make_requests(asked, engine_ids, self.salt(key, asked.cache_salt), place.arrived_s)
        # Short prompts are ready at once; longer ones may queue for a thread, and stop if the client disconnects.
        is_long = asked.num_chars >= LONG_TEXT_CHARS or asked.has_grammar
        requests = await (cancel_on_disconnect(http, making) if is_long else making)
        place.correct(sum(map(self._expected_tokens, requests)))
        num_logprobs = sum(_most_logprobs(request, asked.is_stream) for request in requests)
        await place.keep(_media_bytes(item for request in requests for item in request.media), num_logprobs)
        return Generation(self, http, request_id, requests, place, asked.is_stream)

    def _expected_tokens(self, request: Request) -> int:
        output = 0 if request.sampling is None else self.admission.expected_output(request.sampling.max_tokens)
        return request.num_prompt_tokens + request.encoder_len + output * request.num_seqs

    async def _make_requests(
        self,
        asked: RawPrompts,
        engine_ids: Sequence[str],
        cache_salt: str | None,
        arrived_s: float,
    ) -> list[Request]:
        limits = self.llm.input_processor.limits.of_request
        requests: list[Request] = []
        prepared: dict[int, PreparedParams] = {}  # by identity: most prompts share their parameters
        num_prompt_tokens = num_output_tokens = 0
        for index, (prompt, params, engine_id) in enumerate(zip(asked.prompts, asked.params, engine_ids, strict=True)):
            if id(params) not in prepared:
                prepared[id(params)] = await self.llm.text.prepare_params(params)
            try:
                request = await self.llm.text.make_request(
                    prompt,
                    prepared[id(params)],
                    engine_id,
                    arrival_time_s=arrived_s,
                    priority=asked.priority,
                    cache_salt=cache_salt,
                    lora=asked.lora,
                    add_special_tokens=asked.add_special_tokens,
                )
            except RequestError as error:
                if error.param != "prompt" or not asked.names:
                    raise
                name = asked.names[index]
                raise RequestError(f"{name}: {str(error).removeprefix('prompt: ')}", name) from None
            requests.append(request)
            if request.sampling is not None:
                num_output_tokens += request.num_seqs * (request.sampling.max_tokens or 0)
                limits.check_outputs(num_output_tokens, request.sampling.logprobs)
            if request.sampling is not None and request.sampling.prompt_logprobs is not None:
                num_prompt_tokens += request.num_prompt_tokens
                num_entries = request.num_seqs * num_prompt_tokens * (request.sampling.prompt_logprobs + 1)
                limits.check("answer_prompt_logprobs", num_entries, "prompt_logprobs")
            if len(requests) % PROMPTS_PER_TURN == 0:
                await asyncio.sleep(0)
        return requests

    def _check_lengths(self, params: Params) -> None:
        """Raise ApiError (400) if more tokens are requested than the model's context; the prompt is not considered."""
        if not isinstance(params, SamplingParams):
            return
        most = self.llm.input_processor.limits.max_model_len
        for name in ("max_tokens", "min_tokens"):
            asked: int | None = getattr(params, name)
            if asked is not None and asked > most:
                raise ApiError(400, f"{name}={asked} is more than the model's context of {most} tokens", name)

    def salt(self, key: str, asked: str | None) -> str | None:
        """Return the cache salt: prefixes are only shared between requests with the same API key and cache_salt."""
        if not key:
            return asked
        text = f"{key}:{asked or ''}".encode()
        return hmac.new(self._salt_secret, text, hashlib.sha256).hexdigest()[:32]
