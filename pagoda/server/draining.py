"""Draining: a server that shuts down finishes the requests it has and refuses new ones."""

import asyncio
import contextlib
from collections.abc import Iterator

RETRY_AFTER_S = 5
"""What clients are told to wait before they try again: another server, or this one restarted."""

OPEN_WHILE_DRAINING = frozenset({"/health", "/ping", "/metrics", "/load", "/version", "/abort_requests"})
"""Routes that watch or shorten the drain."""


class Drain:
    """Counts the requests that are being answered, and ends the last of them when the deadline has passed.

    Used by one event loop; `begin` may be called from a signal handler.
    """

    def __init__(self) -> None:
        self.is_draining = False
        self.is_over = False
        self._tasks: set[asyncio.Task[object]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def begin(self) -> None:
        """From now on new requests are refused. Idempotent."""
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
        """Return True once no request is being answered, False after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        return self._idle.is_set()

    def cancel_rest(self) -> None:
        """Cancel what is still being answered; `is_over` tells the tasks why."""
        self.is_over = True
        for task in self._tasks:
            task.cancel()
