"""Draining: on shutdown, finish running requests and refuse new ones."""

import asyncio
import contextlib
from collections.abc import Iterator

RETRY_AFTER_S = 5
"""Retry-After: by then, this server may have been restarted, or a load balancer has switched to another."""

OPEN_WHILE_DRAINING = frozenset({"/health", "/ping", "/metrics", "/load", "/version", "/abort_requests"})
"""Routes for observing or shortening the drain."""


class Drain:
    """Tracks the requests in progress, and cancels the remaining ones after the deadline.

    For one event loop; `begin` may be called from a signal handler.
    """

    def __init__(self) -> None:
        self.is_draining = False
        self.is_over = False
        self._tasks: set[asyncio.Task[object]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def begin(self) -> None:
        """Refuse new requests from now on. Idempotent."""
        self.is_draining = True

    def refuses(self, path: str) -> bool:
        return self.is_draining and path not in OPEN_WHILE_DRAINING

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Keep the server from shutting down while the block runs in the current task."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._idle.clear()
        try:
            yield
        finally:
            self._tasks.discard(task)
            if not self._tasks:
                self._idle.set()

    async def wait_until_idle(self, timeout_s: float) -> bool:
        """Return True once no request is in progress, or False after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        return self._idle.is_set()

    def cancel_rest(self) -> None:
        """Cancel the tasks of requests still in progress, which see from `is_over` why."""
        self.is_over = True
        for task in self._tasks:
            task.cancel()
