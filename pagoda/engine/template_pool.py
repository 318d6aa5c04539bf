"""TemplatePool: template processes for an event loop; whoever stops waiting ends the rendering."""

import asyncio
import contextlib
from concurrent.futures import Future, ThreadPoolExecutor

from pagoda.engine.template_job import TemplateJob
from pagoda.engine.template_process import TemplateLimits, TemplateProcess

_NUM_PROCESSES = 2
_CALLERS_NICENESS = 10


class _Lane:
    """A few processes, the one that was used last first, and a thread for each."""

    def __init__(self, limits: TemplateLimits, niceness: int) -> None:
        self.processes = [TemplateProcess(limits, niceness) for _ in range(_NUM_PROCESSES)]
        self.idle: asyncio.LifoQueue[TemplateProcess] = asyncio.LifoQueue()
        for process in self.processes:
            self.idle.put_nowait(process)


class TemplatePool:
    """Renders templates of the model and of callers in processes of their own, so that the latter can only delay
    each other. For one event loop.
    """

    def __init__(self, limits: TemplateLimits) -> None:
        self._own = _Lane(limits, 0)
        self._callers = _Lane(limits, _CALLERS_NICENESS)
        self._threads = ThreadPoolExecutor(2 * _NUM_PROCESSES, "pagoda-template")

    async def render(self, job: TemplateJob) -> str:
        """Raises RequestError, or ConfigError for a template that is not Jinja. Cancelling it ends the rendering."""
        lane = self._own if job.is_own else self._callers
        process = await lane.idle.get()
        loop = asyncio.get_running_loop()
        work = self._threads.submit(process.render, job)

        def release(_: "Future[str]") -> None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(lane.idle.put_nowait, process)

        work.add_done_callback(release)
        try:
            return await asyncio.wrap_future(work)
        except asyncio.CancelledError:
            process.cancel(job)
            raise

    async def start(self) -> None:
        """Start a process for the model's own templates before the first request needs it."""
        await asyncio.get_running_loop().run_in_executor(self._threads, self._own.processes[-1].start)

    def close(self) -> None:
        """End all processes, whatever they do. Idempotent."""
        for lane in (self._own, self._callers):
            for process in lane.processes:
                process.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
