"""LazyEngine: an AsyncEngine that its first use loads, for one event loop of one process."""

import asyncio
import contextlib
import os
from collections.abc import Callable, Coroutine
from typing import Any

from pagoda.base.errors import UsageError
from pagoda.engine.async_engine import AsyncEngine


class LazyEngine:
    """Loads the engine of an AsyncLLM once, however many tasks ask for it, and shuts it down once."""

    def __init__(self, load: Callable[[], Coroutine[Any, Any, AsyncEngine]], engine: AsyncEngine | None = None) -> None:
        """engine: if it is loaded already."""
        self._load = load
        self._engine = engine
        self._loading: asyncio.Task[AsyncEngine] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = os.getpid()
        self.is_closed = False

    async def get(self) -> AsyncEngine:
        """Return the engine, after loading it if it is not loaded.

        Raises the errors of loading it, and UsageError after `close`, in a forked child, and in another event loop.
        """
        if os.getpid() != self._pid:
            raise UsageError(
                f"this AsyncLLM belongs to process {self._pid}, and this is a fork of it; make a new one in the child"
            )
        if self.is_closed:
            raise UsageError("this AsyncLLM is closed")
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        if self._loop is not loop:
            raise UsageError("this AsyncLLM belongs to another event loop; make one for each loop, or share an LLM")
        if self._engine is not None:
            return self._engine
        if self._loading is None:
            self._loading = asyncio.create_task(self._load())
        try:
            engine = await asyncio.shield(self._loading)  # cancelling one caller does not cancel the load
        except Exception:
            self._loading = None
            raise
        self._engine = engine
        if self.is_closed:
            raise UsageError("this AsyncLLM was closed while it was loading")
        return engine

    async def close(self) -> None:
        """Shut the engine down after the step in progress; requests in flight end. Idempotent."""
        if os.getpid() != self._pid or self.is_closed:
            self.is_closed = True
            return
        self.is_closed = True
        if self._loading is not None:  # loading cannot be interrupted
            with contextlib.suppress(Exception):
                self._engine = await asyncio.shield(self._loading)
        if self._engine is not None:
            await self._engine.shutdown()
