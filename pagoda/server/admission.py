"""Admission: limit the server's running work, in total and per API key. Further requests get 429 immediately."""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pagoda.base.errors import RequestError


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Limits of admission; 0 means no limit.

    max_requests, max_tokens: unfinished requests in total, and the sum of their prompt and expected output tokens.
    max_requests_per_key: unfinished requests.   requests_per_minute_per_key: a token bucket that holds one minute's.
    """

    max_requests: int = 1024
    max_tokens: int = 2_000_000
    max_requests_per_key: int = 0
    requests_per_minute_per_key: int = 0


class Refusal(Exception):
    """The request exceeds a limit now. `reason`: requests, tokens, key_concurrency or key_rate."""

    def __init__(self, reason: str, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s


class Admission:
    """Counts unfinished requests. For one event loop, so it needs no lock.

    A request whose tokens alone exceed max_tokens is admitted if no other is running: otherwise it never would be.
    """

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self.num_requests = 0
        self.num_tokens = 0
        self._live_of_key: Counter[str] = Counter()
        self._bucket_of_key: dict[str, tuple[float, float]] = defaultdict(
            lambda: (float(limits.requests_per_minute_per_key), time.monotonic())
        )

    def _check_size(self, num_requests: int) -> None:
        limits = self._limits
        bounds = (limits.max_requests, limits.max_requests_per_key, limits.requests_per_minute_per_key)
        most = min((bound for bound in bounds if bound), default=num_requests)
        if num_requests > most:
            raise RequestError(f"{num_requests} outputs are more than this server can admit at once ({most})", "prompt")

    @contextmanager
    def admit(self, num_requests: int, key: str) -> Iterator[None]:
        """Count the requests as running during the block. Raises Refusal, or RequestError if they can never fit."""
        self._check_size(num_requests)
        self._check(num_requests, key)
        self.num_requests += num_requests
        self._live_of_key[key] += num_requests
        try:
            yield
        finally:
            self.num_requests -= num_requests
            self._live_of_key[key] -= num_requests
            if not self._live_of_key[key]:
                del self._live_of_key[key]

    @contextmanager
    def admit_tokens(self, num_tokens: int) -> Iterator[None]:
        """Count the tokens of admitted requests during the block. Raises Refusal."""
        most = self._limits.max_tokens
        if most and self.num_tokens and self.num_tokens + num_tokens > most:
            raise Refusal("tokens", f"the server is full: {self.num_tokens} tokens of {most}")
        self.num_tokens += num_tokens
        try:
            yield
        finally:
            self.num_tokens -= num_tokens

    def _check(self, num_requests: int, key: str) -> None:
        limits = self._limits
        if limits.max_requests and self.num_requests + num_requests > limits.max_requests:
            raise Refusal("requests", f"the server is full: {self.num_requests} requests of {limits.max_requests}")
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
