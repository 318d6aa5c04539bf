"""TextThreads: tokenise and decode long texts on threads, so that they do not block an event loop."""

import asyncio
import contextlib
import ctypes
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from pagoda.engine.fair_turns import FairTurns

P = ParamSpec("P")
T = TypeVar("T")

_VERY_LONG_CHARS = 64 * 1024  # about 50 ms of tokenising
_NUM_THREADS = 2


def _trim_memory() -> None:
    """Return freed memory to the system: tokenising takes a hundred times the text's size, which malloc would keep."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


class _Lane:
    """A few threads, and the queue for them."""

    def __init__(self, name: str) -> None:
        self._threads = ThreadPoolExecutor(_NUM_THREADS, name)
        self._turns = FairTurns(_NUM_THREADS)

    async def run(self, key: str, function: Callable[[], T]) -> T:
        await self._turns.take(key)
        loop = asyncio.get_running_loop()

        def release(_: "Future[Any]") -> None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(self._turns.release)

        # A running call cannot be stopped: if it is cancelled, its thread is free only when it returns.
        work = self._threads.submit(function)
        work.add_done_callback(release)
        return await asyncio.wrap_future(work)

    def shutdown(self) -> None:
        self._turns.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


class TextThreads:
    """Two small thread pools, so that short texts do not queue after very long ones. For one event loop.

    Tokenising releases the GIL; few threads bound how often its other parts compete with the event loop for it.
    """

    def __init__(self) -> None:
        self._short = _Lane("pagoda-text")
        self._long = _Lane("pagoda-long-text")

    async def run(self, key: str, num_chars: int, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Return function(*args, **options), called on a thread. Cancelling removes a call that is still queued.

        key: callers' keys take turns.
        """
        if num_chars < _VERY_LONG_CHARS:
            return await self._short.run(key, lambda: function(*args, **options))

        def run_and_trim() -> T:
            try:
                return function(*args, **options)
            finally:
                _trim_memory()

        return await self._long.run(key, run_and_trim)

    def shutdown(self) -> None:
        """Drop queued calls, and end the threads after their current ones. Idempotent."""
        self._short.shutdown()
        self._long.shutdown()
