"""Admission: limit the server's running work, in total and per API key. Further requests get 429 immediately."""

import math
import time
from collections import Counter, defaultdict

from pagoda.base.errors import RequestError
from pagoda.base.server_config import MAX_HELD_MEDIA_BYTES, ServerLimits

PRIOR_OUTPUT_TOKENS = 1024
"""What an output is expected to take before there were any."""
REFUSED_AT_ONCE = 8
"""Requests per second that are refused without delay. Those beyond wait for HOLD_S seconds for their refusal."""
HOLD_S = 1.0
_PRIOR_WEIGHT = 8
_MEAN_OVER = 1000  # outputs


class Refusal(Exception):
    """The request exceeds a limit now.

    reason: requests, tokens, key_concurrency or key_rate.   hold_s: for how long the answer is held back.
    """

    hold_s = 0.0

    def __init__(self, reason: str, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s


class Place:
    """What one HTTP request counts for, from its admission until it is closed."""

    def __init__(self, admission: "Admission", key: str, num_requests: int, num_tokens: int) -> None:
        self._admission = admission
        self._key = key
        self._num_waiting = self._num_requests = num_requests
        self._num_tokens = num_tokens
        self._num_media_bytes = 0
        admission.count(key, num_requests, num_requests, num_tokens)

    def correct(self, num_tokens: int) -> None:
        """Replace the estimate of its tokens by what is known now."""
        self._admission.count(self._key, 0, 0, num_tokens - self._num_tokens)
        self._num_tokens = num_tokens

    def hold(self, num_media_bytes: int) -> None:
        """Count what encoders read for it, until it is closed. Raises Refusal if others hold too much."""
        held = self._admission.num_media_bytes
        if num_media_bytes and held and held + num_media_bytes > MAX_HELD_MEDIA_BYTES:
            full = f"the server is full: it holds {held} bytes of processed images and audio, of {MAX_HELD_MEDIA_BYTES}"
            raise self._admission.held_back(Refusal("media", full))
        self._admission.num_media_bytes += num_media_bytes
        self._num_media_bytes += num_media_bytes

    def start(self) -> None:
        """It has a first token, and so no longer waits. Idempotent."""
        self._admission.count(self._key, 0, -self._num_waiting, 0)
        self._num_waiting = 0

    def close(self) -> None:
        """It counts no longer. Idempotent."""
        self._admission.count(self._key, -self._num_requests, -self._num_waiting, -self._num_tokens)
        self._admission.num_media_bytes -= self._num_media_bytes
        self._num_requests = self._num_waiting = self._num_tokens = self._num_media_bytes = 0


class Admission:
    """Counts unfinished requests. For one event loop, so it needs no lock.

    A request whose tokens alone exceed max_queued_tokens is admitted if no other is running: it never would be else.
    """

    def __init__(self, limits: ServerLimits) -> None:
        self._limits = limits
        self.num_requests = 0
        self.num_waiting = 0
        self.num_tokens = 0
        self.num_media_bytes = 0
        self._mean_output = float(PRIOR_OUTPUT_TOKENS)
        self._num_outputs = _PRIOR_WEIGHT
        self._second = self._num_refused = 0
        self._live_of_key: Counter[str] = Counter()
        self._bucket_of_key: dict[str, tuple[float, float]] = defaultdict(
            lambda: (float(limits.requests_per_minute_per_key), time.monotonic())
        )

    def expected_output(self, max_tokens: int | None) -> int:
        """Return how many tokens an output of at most `max_tokens` is expected to have: as many as those before."""
        mean = math.ceil(self._mean_output)
        return mean if max_tokens is None else min(max_tokens, mean)

    def note_output(self, num_tokens: float) -> None:
        """Learn from the length of an output that has ended."""
        self._num_outputs = min(self._num_outputs + 1, _MEAN_OVER)
        self._mean_output += (num_tokens - self._mean_output) / self._num_outputs

    def admit(self, num_requests: int, num_tokens: int, key: str) -> Place:
        """Return the place of a request of so many outputs, and about so many tokens in all.

        Raises Refusal, or RequestError if it can never fit.
        """
        self._check_size(num_requests)
        try:
            self._check(num_requests, num_tokens, key)
        except Refusal as refusal:
            raise self.held_back(refusal) from None
        return Place(self, key, num_requests, num_tokens)

    def held_back(self, refusal: Refusal) -> Refusal:
        """Say in a refusal for how long to hold it back: not at all, unless there are many of them. Return it.

        Then clients that ask again at once come no more often than those that wait, and a free place is anybody's.
        """
        second = int(time.monotonic())
        self._num_refused = self._num_refused + 1 if second == self._second else 1
        self._second = second
        refusal.hold_s = HOLD_S if self._num_refused > REFUSED_AT_ONCE else 0.0
        refusal.retry_after_s -= math.ceil(refusal.hold_s)
        return refusal

    def count(self, key: str, num_requests: int, num_waiting: int, num_tokens: int) -> None:
        """Add to the counts. For Place."""
        self.num_requests += num_requests
        self.num_waiting += num_waiting
        self.num_tokens += num_tokens
        self._live_of_key[key] += num_requests
        if not self._live_of_key[key]:
            del self._live_of_key[key]

    def _check_size(self, num_requests: int) -> None:
        limits = self._limits
        bounds = (limits.max_queued_requests, limits.max_requests_per_key, limits.requests_per_minute_per_key)
        most = min((bound for bound in bounds if bound), default=num_requests)
        if num_requests > most:
            raise RequestError(f"{num_requests} outputs are more than this server can admit at once ({most})", "prompt")

    def _check(self, num_requests: int, num_tokens: int, key: str) -> None:
        limits = self._limits
        if limits.max_queued_requests and self.num_waiting + num_requests > limits.max_queued_requests:
            full = f"the server is full: {self.num_waiting} requests wait, of {limits.max_queued_requests}"
            raise Refusal("requests", full)
        if limits.max_queued_tokens and self.num_tokens and self.num_tokens + num_tokens > limits.max_queued_tokens:
            raise Refusal("tokens", f"the server is full: {self.num_tokens} tokens of {limits.max_queued_tokens}")
        if limits.max_requests_per_key and self._live_of_key[key] + num_requests > limits.max_requests_per_key:
            raise Refusal(
                "key_concurrency", f"this key has {self._live_of_key[key]} requests of {limits.max_requests_per_key}"
            )
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
            raise Refusal("key_rate", f"this key may start {per_minute} requests per minute", wait_s)
        self._bucket_of_key[key] = (level - num_requests, now_s)
