"""FairTurns: share a few workers between callers' keys, so that one key's queue does not delay the others."""

import asyncio
from collections import OrderedDict, deque


class FairTurns:
    """Lets at most `num_turns` calls run at once. Waiting keys take turns; calls of one key keep their order.

    For one event loop. Each successful `take` needs one `release`.
    """

    def __init__(self, num_turns: int) -> None:
        self._num_free = num_turns
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def take(self, key: str) -> None:
        """Wait for a turn. If cancelled, leave the queue."""
        if self._num_free:
            self._num_free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the turn was granted just before the cancellation
                self.release()
            else:
                self._leave(key, turn)
            raise

    def release(self) -> None:
        """End a turn, and pass it to the waiting key whose last turn was longest ago, if there is one."""
        while self._waiting:
            key, queue = next(iter(self._waiting.items()))
            turn = queue.popleft()
            self._waiting.move_to_end(key)
            if not queue:
                del self._waiting[key]
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1

    def close(self) -> None:
        """Cancel all waiting calls."""
        for queue in self._waiting.values():
            for turn in queue:
                turn.cancel()

    def _leave(self, key: str, turn: "asyncio.Future[None]") -> None:
        queue = self._waiting.get(key)
        if queue is not None and turn in queue:
            queue.remove(turn)
            if not queue:
                del self._waiting[key]
