"""Admission: how much work the server takes on, in all and per API key. Beyond it callers hear 429, at once."""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pagoda.base.errors import RequestError


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """0 switches a limit off.

    max_requests, max_tokens: live requests, and their prompt + asked output tokens, in all.
    max_requests_per_key: live at once.   requests_per_minute_per_key: started, by a token bucket of one minute's size.
    """

    max_requests: int = 1024
    max_tokens: int = 2_000_000
    max_requests_per_key: int = 0
    requests_per_minute_per_key: int = 0


class Refusal(Exception):
    """No room for this request now. `reason`: requests, tokens, key_concurrency or key_rate."""

    def __init__(self, reason: str, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s


class Admission:
    """Counts live requests. One event loop uses it, so nothing is locked.

    A request whose tokens alone exceed max_tokens is let in when nothing else is live: it would wait for ever
    otherwise.
    """

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self.num_requests = 0
        self.num_tokens = 0
        self._live_of_key: Counter[str] = Counter()
        self._bucket_of_key: dict[str, tuple[float, float]] = defaultdict(
            lambda: (float(limits.requests_per_minute_per_key), time.monotonic())
        )

    def check_size(self, num_requests: int) -> None:
        """Before any work is spent on it: raises RequestError for what could not be admitted even alone."""
        limits = self._limits
        bounds = (limits.max_requests, limits.max_requests_per_key, limits.requests_per_minute_per_key)
        most = min((bound for bound in bounds if bound), default=num_requests)
        if num_requests > most:
            raise RequestError(f"{num_requests} outputs at once are more than this server takes ({most})", "prompt")

    @contextmanager
    def admit(self, num_requests: int, num_tokens: int, key: str) -> Iterator[None]:
        """Hold a place while the block runs. Raises Refusal."""
        self._check(num_requests, num_tokens, key)
        self.num_requests += num_requests
        self.num_tokens += num_tokens
        self._live_of_key[key] += num_requests
        try:
            yield
        finally:
            self.num_requests -= num_requests
            self.num_tokens -= num_tokens
            self._live_of_key[key] -= num_requests
            if not self._live_of_key[key]:
                del self._live_of_key[key]

    def _check(self, num_requests: int, num_tokens: int, key: str) -> None:
        limits = self._limits
        if limits.max_requests and self.num_requests + num_requests > limits.max_requests:
            raise Refusal("requests", f"the server is full: {self.num_requests} requests of {limits.max_requests}")
        if limits.max_tokens and self.num_requests and self.num_tokens + num_tokens > limits.max_tokens:
            raise Refusal("tokens", f"the server is full: {self.num_tokens} tokens of {limits.max_tokens}")
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
            raise Refusal("key_rate", f"this key may start {per_minute} requests a minute", wait_s)
        self._bucket_of_key[key] = (level - num_requests, now_s)
