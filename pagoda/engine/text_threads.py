"""TextThreads: tokenise and decode long texts on threads, so that they do not block an event loop."""

from collections.abc import Callable
from typing import TypeVar

from pagoda.base.allocator import return_freed_memory
from pagoda.engine.cancellation import Cancellation
from pagoda.engine.fair_threads import FairThreads

T = TypeVar("T")

_VERY_LONG_CHARS = 64 * 1024  # about 50 ms of tokenising
_NUM_THREADS = 2


class TextThreads:
    """Two small thread pools, so that short texts do not queue after very long ones. For one event loop.

    Tokenising releases the GIL; few threads bound how often its other parts compete with the event loop for it.
    """

    def __init__(self) -> None:
        self._short = FairThreads(_NUM_THREADS, "pagoda-text")
        self._long = FairThreads(_NUM_THREADS, "pagoda-long-text")

    async def run(self, key: str, num_chars: int, function: Callable[[Cancellation], T]) -> T:
        """Return function(cancellation), called on a thread. See FairThreads.run.

        key: callers' keys take turns.
        """
        if num_chars < _VERY_LONG_CHARS:
            return await self._short.run(key, function)

        def run_and_trim(cancellation: Cancellation) -> T:
            try:
                return function(cancellation)
            finally:
                return_freed_memory()  # tokenising takes a hundred times the text's size, which malloc would keep

        return await self._long.run(key, run_and_trim)

    def shutdown(self) -> None:
        """Drop queued calls, and end the threads after their current ones. Idempotent."""
        self._short.shutdown()
        self._long.shutdown()
