"""RequestStarter: admit an HTTP request, then read its prompts, before anything of it runs."""

import asyncio
import contextlib
import hashlib
import hmac
import itertools
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request as HttpRequest

from pagoda.base.errors import RequestError
from pagoda.base.sampling_params import SamplingParams
from pagoda.core.request import MediaItem, Pin, Request
from pagoda.engine.async_engine import AsyncEngine
from pagoda.engine.inputs.adapters import Adapter
from pagoda.engine.inputs.params_preparer import Params, PreparedParams
from pagoda.engine.inputs.prompts import Prompt, size_of
from pagoda.engine.outputs.mailbox import PROMPTS_PER_TURN
from pagoda.engine.tokenizers.tokenizer import LONG_TEXT_CHARS
from pagoda.metrics.observed_requests import ObservedRequests
from pagoda.metrics.prometheus import ServerMetrics
from pagoda.server.admission import batch_key
from pagoda.server.errors import ApiError
from pagoda.server.generation import Generation, Serving
from pagoda.server.live_ids import LiveIds
from pagoda.server.remote_admission import AnyAdmission, AnyPlace
from pagoda.server.request_state import request_state
from pagoda.server.sending import cancel_on_disconnect

_BYTES_PER_TOKEN = 4
"""Of a body, for an estimate of the tokens of its prompts before they are read."""
BATCH = "batch"
"""In the scope of a request that is a line of a batch."""
_BATCH_PRIORITY = 2**30
"""Of such lines: later than what people wait for, where requests are scheduled by priority."""


@dataclass(frozen=True, slots=True)
class RawPrompts:
    """The prompts of one HTTP request before they are tokenised.

    params: of each prompt.   names: what errors call each prompt, () for "prompt".   lora: the adapter to use.
    add_special_tokens: add those that the tokenizer puts around a text prompt.   cache_salt: as the caller gave it.
    is_stream: the answer is sent as it comes.   cache_ttl_s: as of TurnRequest.
    """

    prompts: Sequence[Prompt]
    params: Sequence[Params]
    names: Sequence[str] = ()
    lora: Adapter | None = None
    add_special_tokens: bool = True
    priority: int = 0
    cache_salt: str | None = None
    is_stream: bool = False
    cache_ttl_s: int | None = None

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


Hold = Callable[[contextlib.ExitStack, str], Coroutine[Any, Any, None] | None]
"""Keeps a model loaded until the stack is closed; returns what waits until it is, None if it is. The text: the key."""


class RequestStarter(Serving):
    """Starts generations on one AsyncEngine."""

    def __init__(
        self,
        llm: AsyncEngine,
        admission: AnyAdmission,
        metrics: ServerMetrics,
        salt_secret: bytes,
        live_ids: LiveIds | None = None,
        hold: Hold | None = None,
    ) -> None:
        """salt_secret: of cache salts.   live_ids: of the server; None: this is its only starter.

        hold: has the model loaded; None: it always is.
        """
        super().__init__(llm, ObservedRequests(metrics), admission)
        self.metrics = metrics
        llm.on_event = self.observed.on_event
        self._salt_secret = salt_secret
        self._live = live_ids or LiveIds()
        self._hold = hold
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
        needs_engine: bool = True,
    ) -> AsyncGenerator[AnyPlace, None]:
        """Admit a request before any work on its prompts, on an estimate of its tokens; yield its place for `begin`.

        It counts until the generation that is begun with it is closed, or the block is left without one.
        num_outputs: of all prompts; 0 if they are pooled.   max_tokens: of each output; None: no limit.
        is_read: whether the body was read; otherwise, a client that leaves is only noticed after the wait in line.
        needs_engine: wait until the model is loaded, and keep it so as long as the request counts.
        Raises Refusal (429), RequestError, ApiError (503) or WorkerDied.
        """
        if self.llm.died is not None and self._hold is None:
            raise self.llm.died
        known, admission = request_state(http), self.admission
        longest = num_prompts * self.llm.input_processor.limits.longest_prompt
        num_tokens = min(known.body_bytes // _BYTES_PER_TOKEN, longest)
        num_tokens += num_outputs * admission.expected_output(max_tokens)
        key = batch_key(known.caller.key) if BATCH in http.scope else known.caller.key
        place = await admission.admit(num_outputs or num_prompts, num_tokens, key)
        with place.at_end:
            if place.is_in_line:
                turn = place.wait_for_turn()
                await (cancel_on_disconnect(http, turn) if is_read else turn)
            if needs_engine:
                await self.hold_engine(http, place)
            yield place

    async def hold_engine(self, http: HttpRequest, place: AnyPlace) -> None:
        """Wait until the model is loaded, and keep it so until the place is closed, unless the client leaves.

        Raises Refusal (429) or ApiError (503).
        """
        loading = None if self._hold is None else self._hold(place.at_end, request_state(http).caller.key)
        if loading is not None:
            await cancel_on_disconnect(http, loading)

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
        key = request_state(http).caller.key
        await place.keep(_media_bytes(asked.media))  # at once: prompts may queue for a thread behind others' images
        engine_ids = place.at_end.enter_context(self._live.reserve(key, request_id, len(asked.prompts)))
        pin = Pin(asked.cache_ttl_s, self.salt(key, None) or "") if asked.cache_ttl_s else None
        priority = _BATCH_PRIORITY if BATCH in http.scope else asked.priority
        salt = self.salt(key, asked.cache_salt)
        making = self._make_requests(asked, engine_ids, salt, pin, place.arrived_s, priority)
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
        pin: Pin | None,
        arrived_s: float,
        priority: int,
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
                    priority=priority,
                    cache_salt=cache_salt,
                    lora=asked.lora,
                    add_special_tokens=asked.add_special_tokens,
                )
            except RequestError as error:
                if error.param != "prompt" or not asked.names:
                    raise
                name = asked.names[index]
                raise RequestError(f"{name}: {str(error).removeprefix('prompt: ')}", name) from None
            requests.append(request if pin is None else replace(request, pin=pin))
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
        """Return the cache salt: prefixes are only shared between requests with the same API key and cache_salt.

        It begins with the key's own and a colon: see Request.cache_salt.
        """
        if not key:
            return asked
        return ":".join(map(self._digest, (key, f"{key}:{asked or ''}")))

    def _digest(self, text: str) -> str:
        return hmac.new(self._salt_secret, text.encode(), hashlib.sha256).hexdigest()[:32]


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
