"""TextThreads: tokenise and decode long texts on threads, so that they do not block an event loop."""

import asyncio
import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_VERY_LONG_CHARS = 64 * 1024  # about 50 ms of tokenising
_NUM_THREADS = 2


def _trim_memory() -> None:
    """Return freed memory to the system: tokenising takes a hundred times the text's size, which malloc would keep."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


class TextThreads:
    """Two small thread pools, so that short texts do not queue after very long ones.

    Tokenising releases the GIL; few threads bound how often its other parts compete with the event loop for it.
    """

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(_NUM_THREADS, "pagoda-text")
        self._long = ThreadPoolExecutor(_NUM_THREADS, "pagoda-long-text")

    async def run(self, num_chars: int, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Return function(*args, **options), called on a thread. Cancelling removes a call that is still queued."""
        if num_chars < _VERY_LONG_CHARS:
            return await asyncio.wrap_future(self._short.submit(function, *args, **options))

        def run_and_trim() -> T:
            try:
                return function(*args, **options)
            finally:
                _trim_memory()

        return await asyncio.wrap_future(self._long.submit(run_and_trim))

    def shutdown(self) -> None:
        """Drop queued calls, and end the threads after their current ones. Idempotent."""
        for pool in (self._short, self._long):
            pool.shutdown(wait=False, cancel_futures=True)
