"""Admission: limit the server's running work, in total and per API key. Further requests wait in line, then get 429."""

import asyncio
import math
import random
import time
from collections import Counter, OrderedDict, defaultdict
from contextlib import ExitStack, suppress

import msgspec

from pagoda.base.errors import PagodaError, RequestError, fresh
from pagoda.base.server_config import MAX_HELD_LOGPROBS, MAX_HELD_MEDIA_BYTES, ServerLimits

PRIOR_OUTPUT_TOKENS = 1024
"""What an output is expected to take before there were any."""
_PRIOR_WEIGHT = 8
_MEAN_OVER = 1000  # outputs
_OF_BATCHES = " batch"  # ends the keys of lines of batches; no API key has a space


def batch_key(key: str) -> str:
    """Return the key that the lines of a key's batches have: their limits are apart."""
    return f"{key}{_OF_BATCHES}"


class AdmissionCounts(msgspec.Struct, frozen=True):
    """What counts now.

    num_in_line: HTTP requests that wait to be admitted.
    idle_s: since when there is no request that is no line of a batch; 0.0 while there is one.
    """

    num_requests: int
    num_tokens: int
    num_in_line: int
    idle_s: float


def expected_output(mean: float, max_tokens: int | None) -> int:
    """Return how many tokens an output of at most `max_tokens` is expected to have, if they have `mean` on average."""
    most = math.ceil(mean)
    return most if max_tokens is None else min(max_tokens, most)


class Refusal(PagodaError):
    """The request exceeds a limit now.   reason: one of REJECTION_REASONS.

    retry_after_s: 1 if the server is full: a request that is sent again soon waits in the server's queue.
    """

    def __init__(self, reason: str, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s


class Place:
    """What one HTTP request counts for, from its admission until it is closed; for its key, from its creation.

    turn: done when it is admitted, if it was not at once; or with the error that ends its wait.
    arrived_s: when it came, by time.perf_counter.
    at_end: what is undone when the request ends, or if it never begins: first of all, the place is closed.
    """

    def __init__(self, admission: "Admission", key: str, num_requests: int, num_tokens: int) -> None:
        self._admission = admission
        self.key = key
        self.arrived_s = time.perf_counter()
        self._is_admitted = False
        self.num_requests = num_requests
        self.num_tokens = num_tokens
        self._num_waiting = self._num_media_bytes = self._num_logprobs = 0
        self.turn: asyncio.Future[Exception | None] | None = None
        self.at_end = ExitStack()
        self.at_end.callback(self.close)
        admission.count_key(key, num_requests)

    @property
    def is_in_line(self) -> bool:
        """Whether it was not admitted at once."""
        return self.turn is not None

    def admit(self) -> None:
        """Count it from now on. For Admission."""
        self._is_admitted = True
        self._num_waiting = self.num_requests
        self._admission.count(num_requests=self.num_requests, num_waiting=self.num_requests, num_tokens=self.num_tokens)
        if self.turn is not None:
            self.turn.set_result(None)

    def correct(self, num_tokens: int) -> None:
        """Replace the estimate of its tokens by what is known now."""
        self._admission.count(num_tokens=num_tokens - self.num_tokens)
        self.num_tokens = num_tokens

    def hold(self, num_media_bytes: int) -> None:
        """Count what encoders read for it, in all, until it is closed. Raises Refusal if others hold too much."""
        more = num_media_bytes - self._num_media_bytes
        others = self._admission.num_media_bytes - self._num_media_bytes
        if more > 0 and others and others + num_media_bytes > MAX_HELD_MEDIA_BYTES:
            full = f"it holds {others} bytes of processed images and audio, of {MAX_HELD_MEDIA_BYTES}"
            raise Refusal("media", f"the server is full: {full}")
        self._num_media_bytes = num_media_bytes
        self._admission.count(num_media_bytes=more)

    def hold_logprobs(self, count: int) -> None:
        """Count the log-probabilities that its answer may come to, once. Raises Refusal if others hold too many."""
        others = self._admission.num_logprobs
        if count and others and others + count > MAX_HELD_LOGPROBS:
            full = f"unfinished requests may come to {others} log-probabilities, this one to {count}"
            remedy = "send it again later, or lower max_tokens, n or logprobs; outputs that are streamed do not count"
            raise Refusal("logprobs", f"the server is full: {full}, of {MAX_HELD_LOGPROBS} in all; {remedy}")
        self._num_logprobs = count
        self._admission.count(num_logprobs=count)

    async def wait_for_turn(self) -> None:
        """Return once it is admitted. It must be closed if this raises.

        Raises Refusal if that takes too long, and the error of `end_line`.
        """
        assert self.turn is not None
        # After equal times, the same clients would always be served: they are in line again before those refused.
        timeout_s = self._admission.queue_timeout_s * random.uniform(0.5, 1.5)
        await asyncio.wait((self.turn,), timeout=timeout_s)
        if not self.turn.done():
            raise self._admission.why_full()
        if (error := self.turn.result()) is not None:
            raise fresh(error)

    async def wait_to_hold(self, num_media_bytes: int) -> None:
        """Hold what encoders read for it, once there is room.

        Raises Refusal if there is none when the queue's timeout has passed since it came.
        """
        until_s = self.arrived_s + self._admission.queue_timeout_s
        while True:
            try:
                return self.hold(num_media_bytes)
            except Refusal:
                left_s = until_s - time.perf_counter()
                if left_s <= 0:
                    raise
            self._admission.media_freed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._admission.media_freed.wait()

    async def keep(self, num_media_bytes: int, num_logprobs: int = 0) -> None:
        """Count both, see `hold` and `hold_logprobs`."""
        self.hold(num_media_bytes)
        if num_logprobs:
            self.hold_logprobs(num_logprobs)

    def start(self) -> None:
        """It has a first token, and so no longer waits. Idempotent."""
        self._admission.count(num_waiting=-self._num_waiting)
        self._num_waiting = 0

    def close(self) -> None:
        """It counts no longer. Idempotent."""
        self._admission.count_key(self.key, -self.num_requests)
        if not self._is_admitted:
            self._admission.leave(self)
        else:
            self._admission.count(
                num_requests=-self.num_requests,
                num_waiting=-self._num_waiting,
                num_tokens=-self.num_tokens,
                num_media_bytes=-self._num_media_bytes,
                num_logprobs=-self._num_logprobs,
            )
        self.num_requests = self._num_waiting = self.num_tokens = self._num_media_bytes = self._num_logprobs = 0


class Admission:
    """Counts unfinished requests. For one event loop, so it needs no lock.

    A request that exceeds the limits of all keys waits in line for its turn, about `queue_timeout_s`: no newcomer
    overtakes it. One that exceeds those of its own key is refused at once.
    A request whose tokens alone exceed max_queued_tokens is admitted only if no other is unfinished, and refused
    otherwise: if it waited for that in line, no other would be admitted meanwhile.
    """

    def __init__(self, limits: ServerLimits, queue_timeout_s: float) -> None:
        self._limits = limits
        self.queue_timeout_s = queue_timeout_s
        self._line: OrderedDict[Place, None] = OrderedDict()
        self.num_requests = 0
        self.num_waiting = 0
        self.num_tokens = 0
        self.num_media_bytes = 0
        self.num_logprobs = 0
        self.media_freed = asyncio.Event()
        self.mean_output = float(PRIOR_OUTPUT_TOKENS)
        self._num_outputs = _PRIOR_WEIGHT
        self._of_key: Counter[str] = Counter()
        self._num_called, self._last_call_s = 0, -math.inf  # what is no line of a batch
        self._bucket_of_key: dict[str, tuple[float, float]] = defaultdict(
            lambda: (float(limits.requests_per_minute_per_key), time.monotonic())
        )

    @property
    def num_in_line(self) -> int:
        """How many HTTP requests wait to be admitted."""
        return len(self._line)

    @property
    def counts(self) -> AdmissionCounts:
        idle_s = 0.0 if self._num_called else time.monotonic() - self._last_call_s
        return AdmissionCounts(self.num_requests, self.num_tokens, self.num_in_line, idle_s)

    async def read_counts(self) -> AdmissionCounts:
        """Return `counts`, as those ask that may be in another process."""
        return self.counts

    def expected_output(self, max_tokens: int | None) -> int:
        """Return how many tokens an output of at most `max_tokens` is expected to have: as many as those before."""
        return expected_output(self.mean_output, max_tokens)

    def note_output(self, num_tokens: float) -> None:
        """Learn from the length of an output that has ended."""
        self._num_outputs = min(self._num_outputs + 1, _MEAN_OVER)
        self.mean_output += (num_tokens - self.mean_output) / self._num_outputs

    async def admit(self, num_requests: int, num_tokens: int, key: str) -> Place:
        """Call `enter`, as those do that may be in another process."""
        return self.enter(num_requests, num_tokens, key)

    def enter(self, num_requests: int, num_tokens: int, key: str) -> Place:
        """Return the place of a request of so many outputs, and about so many tokens in all; if it has a `turn`, wait.

        Raises Refusal, or RequestError if it can never fit.
        """
        self._check_size(num_requests)
        self._check_key(num_requests, key)
        place = Place(self, key, num_requests, num_tokens)
        refusal, most = self._refusal(place), self._limits.max_queued_tokens
        if refusal is None and not self._line:
            place.admit()
        elif most and num_tokens > most:
            place.close()
            text = f"about {num_tokens} tokens are more than this server's {most}: it takes them when it has no other"
            raise Refusal("tokens", text)
        elif refusal is not None and not self.queue_timeout_s:
            place.close()
            raise refusal
        else:
            place.turn = asyncio.get_running_loop().create_future()
            self._line[place] = None
        return place

    def why_full(self) -> Refusal:
        """Return why the first in line is not admitted. For Place."""
        return self._refusal(next(iter(self._line))) or Refusal("requests", "the server is full")

    def end_line(self, error: Exception, key: str | None = None) -> None:
        """End the wait of all in line with an error.   key: only of those of this key."""
        for place in [one for one in self._line if key in (None, one.key)]:
            del self._line[place]
            assert place.turn is not None
            place.turn.set_result(error)
        self._call_next()

    def leave(self, place: Place) -> None:
        """Forget a place that was never admitted: its key may start another instead. For Place."""
        if self._limits.requests_per_minute_per_key:
            level, at_s = self._bucket_of_key[place.key]
            self._bucket_of_key[place.key] = (level + place.num_requests, at_s)
        if place in self._line:
            del self._line[place]
            self._call_next()

    def _call_next(self) -> None:
        """Admit those at the head of the line that fit now."""
        while self._line and self._refusal(place := next(iter(self._line))) is None:
            del self._line[place]
            place.admit()

    def count(
        self,
        *,
        num_requests: int = 0,
        num_waiting: int = 0,
        num_tokens: int = 0,
        num_media_bytes: int = 0,
        num_logprobs: int = 0,
    ) -> None:
        """Add to the counts. For Place."""
        self.num_requests += num_requests
        self.num_waiting += num_waiting
        self.num_tokens += num_tokens
        self.num_media_bytes += num_media_bytes
        self.num_logprobs += num_logprobs
        if num_media_bytes < 0:
            self.media_freed.set()
        if num_waiting < 0 or num_tokens < 0:
            self._call_next()

    def count_key(self, key: str, num_requests: int) -> None:
        """Add to what a key has in line and unfinished. For Place."""
        self._of_key[key] += num_requests
        if not self._of_key[key]:
            del self._of_key[key]
        if not key.endswith(_OF_BATCHES):
            self._num_called += num_requests
            self._last_call_s = time.monotonic()

    def _check_size(self, num_requests: int) -> None:
        limits = self._limits
        bounds = (limits.max_queued_requests, limits.max_requests_per_key, limits.requests_per_minute_per_key)
        most = min((bound for bound in bounds if bound), default=num_requests)
        if num_requests > most:
            raise RequestError(f"{num_requests} outputs are more than this server can admit at once ({most})", "prompt")

    def _refusal(self, place: Place) -> Refusal | None:
        """Return why a request cannot be admitted now, or None."""
        limits = self._limits
        if limits.max_queued_requests and self.num_waiting + place.num_requests > limits.max_queued_requests:
            full = f"the server is full: {self.num_waiting} requests wait, of {limits.max_queued_requests}"
            return Refusal("requests", f"{full} (--server-limits.max-queued-requests)")
        if (
            limits.max_queued_tokens
            and self.num_tokens
            and self.num_tokens + place.num_tokens > limits.max_queued_tokens
        ):
            full = f"the server is full: {self.num_tokens} tokens of {limits.max_queued_tokens}"
            return Refusal("tokens", f"{full} (--server-limits.max-queued-tokens)")
        return None

    def _check_key(self, num_requests: int, key: str) -> None:
        limits = self._limits
        if limits.max_requests_per_key and self._of_key[key] + num_requests > limits.max_requests_per_key:
            full = f"this key has {self._of_key[key]} requests of {limits.max_requests_per_key}"
            raise Refusal("key_concurrency", f"{full} (--server-limits.max-requests-per-key)")
        if limits.requests_per_minute_per_key:
            self._take_from_bucket(num_requests, key)

    def _take_from_bucket(self, num_requests: int, key: str) -> None:
        per_minute = self._limits.requests_per_minute_per_key
        level, at_s = self._bucket_of_key[key]
        now_s = time.monotonic()
        level = min(per_minute, level + (now_s - at_s) * per_minute / 60)
        if level < num_requests:
            self._bucket_of_key[key] = (level, now_s)
            wait_s = math.ceil((num_requests - level) * 60 / per_minute)
            rate = f"this key may start {per_minute} requests per minute"
            raise Refusal("key_rate", f"{rate} (--server-limits.requests-per-minute-per-key)", wait_s)
        self._bucket_of_key[key] = (level - num_requests, now_s)
