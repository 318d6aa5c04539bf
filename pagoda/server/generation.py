"""Generation: from validated prompts to a stream of outputs, with everything a served request needs around it.

Admission, cache salts, metrics, timings and the end of it all (a client gone, an error, the last token) are dealt with
here, so that routes only speak their API's language.
"""

import asyncio
import contextlib
import hashlib
import hmac
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request as HttpRequest

from pagoda.async_llm import AsyncLLM
from pagoda.base.outputs import RequestOutput
from pagoda.base.sampling_params import SamplingParams
from pagoda.core.request import Request
from pagoda.metrics.prometheus import ServerMetrics
from pagoda.server.admission import Admission, Refusal
from pagoda.server.errors import ApiError
from pagoda.server.protocol import SamplingBody

Prompt = str | list[int]


class Generation:
    """One HTTP request's work: some prompts under the same parameters. Made by Generator.begin, iterated once.

    Yields (index of the prompt, delta) as they come; prompts interleave. Leaving the iteration early aborts what is
    live.
    """

    def __init__(self, generator: "Generator", http: HttpRequest, requests: Sequence[Request]) -> None:
        self.requests = requests
        self.num_prompt_tokens = sum(r.num_prompt_tokens for r in requests)
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.last: list[RequestOutput | None] = [None] * len(requests)
        self._generator = generator
        self._timings: dict[str, Any] = http.scope["state"]["timings"]
        self._place = contextlib.ExitStack()

    def hold(self, place: contextlib.AbstractContextManager[None]) -> None:
        """Enter `place` now; it is left when the generation ends, however it ends."""
        self._place.enter_context(place)

    async def outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """Deltas of all prompts. Raises ApiError when the engine ended a request with an error."""
        with self._place:
            try:
                if len(self.requests) == 1:
                    async for delta in self._follow(0):
                        yield 0, delta
                else:
                    async for item in self._merged():
                        yield item
            finally:
                self._note_timings()

    def discard(self) -> None:
        """Give the place back without having run (the answer could not be begun)."""
        self._place.close()

    async def _follow(self, index: int) -> AsyncIterator[RequestOutput]:
        request = self.requests[index]
        metrics = self._generator.metrics
        at_s: float | None = None
        own_tokens = 0
        async with contextlib.aclosing(self._generator.llm.stream(request)) as deltas:
            async for delta in deltas:
                count = sum(len(o.token_ids) for o in delta.outputs)
                now_s = time.perf_counter()
                if count:
                    if at_s is None:
                        metrics.on_first_token(now_s - request.arrival_time_s)
                    metrics.on_tokens(count, None if at_s is None else now_s - at_s)
                    at_s = now_s
                    own_tokens += count
                    self.num_output_tokens += count
                if delta.finished:
                    self.last[index] = delta
                    self.num_cached_tokens += delta.num_cached_tokens or 0
                    assert request.sampling is not None
                    metrics.on_end(delta, request.sampling.n, request.sampling.max_tokens, own_tokens)
                    if delta.error is not None:
                        raise ApiError(500, delta.error)
                yield delta

    async def _merged(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        # One slot a prompt: a reader that stops stops them all.
        queue: asyncio.Queue[tuple[int, RequestOutput] | Exception | None] = asyncio.Queue(len(self.requests))

        async def pump(index: int) -> None:
            try:
                async for delta in self._follow(index):
                    await queue.put((index, delta))
                await queue.put(None)
            except Exception as error:
                await queue.put(error)

        tasks = [asyncio.create_task(pump(i)) for i in range(len(self.requests))]
        try:
            open_count = len(tasks)
            while open_count:
                item = await queue.get()
                if item is None:
                    open_count -= 1
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _note_timings(self) -> None:
        """For the access log, and for callers who asked for them."""
        self._timings.update(
            prompt_tokens=self.num_prompt_tokens,
            output_tokens=self.num_output_tokens,
            cached_tokens=self.num_cached_tokens,
        )
        times = next((o.metrics for o in self.last if o is not None and o.metrics is not None), None)
        if times is None:
            return
        scheduled, first, end = times.first_scheduled_time, times.first_token_time, times.finished_time
        self._timings["preemptions"] = times.num_preemptions
        if scheduled is not None:
            self._timings["queue_ms"] = round((scheduled - times.arrival_time) * 1e3, 1)
            if first is not None:
                self._timings["prefill_ms"] = round((first - scheduled) * 1e3, 1)
        if first is not None and end is not None:
            self._timings["decode_ms"] = round((end - first) * 1e3, 1)

    @property
    def timings(self) -> dict[str, Any]:
        return dict(self._timings)


class Generator:
    """Begins generations on one AsyncLLM."""

    def __init__(self, llm: AsyncLLM, admission: Admission, metrics: ServerMetrics) -> None:
        self.llm = llm
        self.metrics = metrics
        self.admission = admission
        self._salt_secret = secrets.token_bytes(16)
        self.is_draining = False

    async def begin(
        self, http: HttpRequest, body: SamplingBody, prompts: Sequence[Prompt], params: SamplingParams, request_id: str
    ) -> Generation:
        """Tokenise, validate and find a place for all of `prompts`.

        Raises RequestError, ApiError (501, 503) or Refusal (429).
        """
        if self.is_draining:
            raise ApiError(503, "the server is shutting down", retry_after_s=5)
        if body.wants_structure:
            raise ApiError(
                501, "structured output (response_format, structured_outputs) is not available yet", "response_format"
            )
        key = http.scope["state"]["key"]
        salt = self._salt(key, body.cache_salt)
        requests: list[Request] = []
        for i, prompt in enumerate(prompts):
            own_id = request_id if len(prompts) == 1 else f"{request_id}-{i}"
            requests.append(
                await self.llm.prepare(prompt, params, request_id=own_id, priority=body.priority, cache_salt=salt)
            )
        generation = Generation(self, http, requests)
        num_branches = sum(r.num_branches for r in requests)
        asked = generation.num_prompt_tokens + sum(
            (r.sampling.max_tokens or 0) * r.num_branches for r in requests if r.sampling
        )
        try:
            generation.hold(self.admission.admit(num_branches, asked, key))
        except Refusal as refusal:
            self.metrics.on_refusal(refusal.reason)
            raise
        return generation

    def _salt(self, key: str, asked: str | None) -> str | None:
        """Prefixes are shared among requests of one API key only, and under it by the salt asked for."""
        if not key:
            return asked
        text = f"{key}:{asked or ''}".encode()
        return hmac.new(self._salt_secret, text, hashlib.sha256).hexdigest()[:32]
