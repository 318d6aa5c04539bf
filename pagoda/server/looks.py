"""Looks: what the engine was seen to do last, for all who look together."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator

from pagoda.engine.step_strip import StepNote
from pagoda.engine.wire import LookReply
from pagoda.server.admission import Refusal

_LOOK_S = 0.25
_WAIT_S = 0.4
"""How long a frame waits for an engine that is in a long step, before it shows what is known."""
MAX_STREAMS = 16
_MAX_STEPS = 512


class Looks:
    """What the engine was seen to do last.   look: that of its client, or None without an engine process.

    reply: the last one, None if the engine was down.   num_streams: of pages that look.
    steps: the last ones while a reader asks for them (see `reads_steps`), with a number that counts up.
    """

    def __init__(self, look: Callable[[float | None], Awaitable[LookReply | None]] | None = None) -> None:
        self._look = look
        self._asked: asyncio.Task[None] | None = None
        self._asked_s = float("-inf")
        self.reply: LookReply | None = None
        self.num_streams = 0
        self._num_readers = 0
        self.num_steps = 0
        self.steps = deque[StepNote](maxlen=_MAX_STEPS)

    async def refresh(self) -> None:
        """Ask the engine again, unless its last reply is new; wait a short while for it."""
        if self._look is None:
            return
        if self._asked is None and time.monotonic() - self._asked_s >= _LOOK_S:
            self._asked_s = time.monotonic()
            self._asked = asyncio.create_task(self._ask())
        if self._asked is not None:
            await asyncio.wait((self._asked,), timeout=_WAIT_S)

    async def _ask(self) -> None:
        assert self._look is not None
        try:
            last_s = self.steps[-1].ended_s if self.steps else 0.0
            # One look serves all callers; it may take until a long step has ended.
            self.reply = await self._look(last_s if self._num_readers else None)
            if self.reply is not None:
                self.steps.extend(self.reply.steps)
                self.num_steps += len(self.reply.steps)
        finally:
            self._asked = None

    @property
    def age_s(self) -> float | None:
        """Return how long ago the last reply was so: in a long step, as long as that. None without one."""
        return time.monotonic() - self.reply.stats.at_s if self.reply is not None else None

    def steps_after(self, number: int) -> list[StepNote]:
        """Return the steps after the first `number`, as far as they are kept."""
        count = min(self.num_steps - number, len(self.steps))
        return list(self.steps)[len(self.steps) - count :]

    @contextlib.contextmanager
    def reads_steps(self) -> Iterator[None]:
        """Have the engine's steps noted during the block, in which `refresh` is called twice a second."""
        self._num_readers += 1
        try:
            yield
        finally:
            self._num_readers -= 1

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        """Count a stream during the block. Raises Refusal if there are too many."""
        if self.num_streams >= MAX_STREAMS:
            raise Refusal("requests", f"{MAX_STREAMS} pages look at this server already; close one")
        self.num_streams += 1
        try:
            with self.reads_steps():
                yield
        finally:
            self.num_streams -= 1
