"""FairThreads: a few threads for calls that an event loop must not make itself; callers' keys take turns."""

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from pagoda.engine.cancellation import Cancellation
from pagoda.engine.fair_turns import FairTurns

T = TypeVar("T")


class FairThreads:
    """A few threads, and the queue for them. For one event loop."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, name)
        self._turns = FairTurns(num_threads)

    async def run(self, key: str, function: Callable[[Cancellation], T]) -> T:
        """Return function(cancellation), called on a thread.

        Cancelling removes a call that is still queued. A running one is cancelled through its argument; its thread is
        free only when it returns.
        """
        await self._turns.take(key)
        loop = asyncio.get_running_loop()

        def release(_: "Future[Any]") -> None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(self._turns.release)

        cancellation = Cancellation()
        work = self._threads.submit(function, cancellation)
        work.add_done_callback(release)
        try:
            return await asyncio.wrap_future(work)
        except asyncio.CancelledError:
            cancellation.cancel()
            raise

    def shutdown(self) -> None:
        """Drop queued calls, and end the threads after their current ones. Idempotent."""
        self._turns.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
