"""TemplatePool: template processes for an event loop; cancelling a call stops its rendering."""

import asyncio
import contextlib
from concurrent.futures import Future, ThreadPoolExecutor

from pagoda.engine.cancellation import Cancellation
from pagoda.engine.fair_turns import FairTurns
from pagoda.engine.templates.job import TemplateJob
from pagoda.engine.templates.process import TemplateLimits, TemplateProcess

_NUM_PROCESSES = 2
_CALLERS_NICENESS = 10


class _Lane:
    """A few processes; the most recently used idle one is taken first."""

    def __init__(self, limits: TemplateLimits, niceness: int) -> None:
        self.processes = [TemplateProcess(limits, niceness) for _ in range(_NUM_PROCESSES)]
        self._idle = list(self.processes)
        self._turns = FairTurns(_NUM_PROCESSES)

    async def take(self, key: str) -> TemplateProcess:
        await self._turns.take(key)
        return self._idle.pop()

    def release(self, process: TemplateProcess) -> None:
        self._idle.append(process)
        self._turns.release()

    def close(self) -> None:
        self._turns.close()
        for process in self.processes:
            process.close()


class TemplatePool:
    """Renders the model's own and callers' templates in separate processes, so that callers' templates can only delay
    each other. For one event loop.
    """

    def __init__(self, limits: TemplateLimits) -> None:
        self._own = _Lane(limits, 0)
        self._callers = _Lane(limits, _CALLERS_NICENESS)
        self._threads = ThreadPoolExecutor(2 * _NUM_PROCESSES, "pagoda-template")

    async def render(self, job: TemplateJob, key: str = "") -> str:
        """Return the prompt. Raises RequestError, or ConfigError for a template that is not valid Jinja.

        Cancelling the call stops the rendering.   key: callers' keys take turns.
        """
        lane = self._own if job.is_own else self._callers
        process = await lane.take(key)
        loop = asyncio.get_running_loop()
        cancellation = Cancellation()
        work = self._threads.submit(process.render, job, cancellation)

        def release(_: "Future[str]") -> None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(lane.release, process)

        work.add_done_callback(release)
        try:
            return await asyncio.wrap_future(work)
        except asyncio.CancelledError:
            cancellation.cancel()
            raise

    async def start(self) -> None:
        """Start a process for the model's own templates before the first request needs it."""
        await asyncio.get_running_loop().run_in_executor(self._threads, self._own.processes[-1].start)

    def close(self) -> None:
        """Kill all processes, even if they are rendering. Idempotent."""
        for lane in (self._own, self._callers):
            lane.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
