"""Cancellation: one thread ends what another thread waits for."""

import contextlib
import threading
from collections.abc import Callable, Generator


class Cancelled(Exception):
    """The call was cancelled before it was complete."""


class Cancellation:
    """Ends one call, which may consist of several steps. Thread-safe; it cannot be undone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._stop: Callable[[], None] | None = None

    def cancel(self) -> None:
        """Stop the current step, if it can be stopped; `check` raises from now on. Idempotent."""
        with self._lock:
            self._is_cancelled = True
            if self._stop is not None:
                self._stop()

    def check(self) -> None:
        """Raise Cancelled if the call has been cancelled."""
        if self._is_cancelled:
            raise Cancelled

    @contextlib.contextmanager
    def stopped_by(self, stop: Callable[[], None]) -> Generator[None, None, None]:
        """Let `cancel` call `stop` during the block, and never after it. `stop` must not block."""
        with self._lock:
            self._stop = stop
        try:
            yield
        finally:
            with self._lock:
                self._stop = None
