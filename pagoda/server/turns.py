"""Turns: let the event loop run other requests after a bounded amount of one request's work."""

import asyncio

_WORK_PER_TURN = 64
"""About 1 ms: so many positions with 20 log-probabilities each, for example."""


class Turns:
    """Counts work that does not wait for anything by itself, such as making a thousand choices of one answer.

    A unit of work takes about 20 us.
    """

    def __init__(self) -> None:
        self._work = 0

    async def did(self, work: int) -> None:
        """Count `work` units; when a turn is used up, let others run."""
        self._work += work
        if self._work >= _WORK_PER_TURN:
            self._work = 0
            await asyncio.sleep(0)
