"""TextThreads: where long texts are tokenised and decoded while an event loop goes on."""

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
    """Give freed memory back to the system: tokenising takes a hundred times the text's size, which malloc keeps."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


class TextThreads:
    """Two small pools, so that short texts never queue after very long ones, and the event loop after neither.

    Tokenising releases the interpreter lock; a pool of few threads bounds what the rest costs the event loop.
    """

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(_NUM_THREADS, "pagoda-text")
        self._long = ThreadPoolExecutor(_NUM_THREADS, "pagoda-long-text")

    async def run(self, num_chars: int, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Return function(*args, **options), called on a thread. A caller that is cancelled leaves the queue."""
        if num_chars < _VERY_LONG_CHARS:
            return await asyncio.wrap_future(self._short.submit(function, *args, **options))

        def run_and_trim() -> T:
            try:
                return function(*args, **options)
            finally:
                _trim_memory()

        return await asyncio.wrap_future(self._long.submit(run_and_trim))

    def shutdown(self) -> None:
        """End the threads when they are done with what they do; what waits is dropped. Idempotent."""
        for pool in (self._short, self._long):
            pool.shutdown(wait=False, cancel_futures=True)
