"""An engine core on the event loop of a test: AsyncEngine without a second process."""

import asyncio
import dataclasses
import logging
from collections.abc import Callable

from pagoda.base.errors import InvariantBroken, PagodaError, WorkerDied
from pagoda.core.request import LoraRef, Request, RequestStatus
from pagoda.core.scheduler_output import EngineCoreOutputs
from pagoda.engine import wire
from pagoda.engine.clients.journal import JournalEntry, error_outputs
from pagoda.engine.engine_core import EngineCore


class InlineClient:
    """An EngineCoreClient whose core is stepped by a task of the same event loop.   build: makes the core."""

    def __init__(self, build: Callable[[], EngineCore]) -> None:
        self._build = build
        self._outputs: asyncio.Queue[EngineCoreOutputs | WorkerDied] = asyncio.Queue()
        self._has_work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> wire.EngineFacts:
        self._core = self._build()
        self._task = asyncio.create_task(self._run())
        return self._core.facts

    def add_request(self, request: Request) -> None:
        self._has_work.set()
        status = RequestStatus.FINISHED_IGNORED
        try:
            self._core.add_request(request)
            return
        except PagodaError as error:
            reason = str(error)
        except Exception as error:
            logging.getLogger("pagoda.engine").exception("request %s could not be queued", request.request_id)
            reason = f"the engine could not queue this request: {type(error).__name__}: {error}"
            status = RequestStatus.FINISHED_ERROR
        entry = JournalEntry(request, [[] for _ in range(request.num_seqs)], set(range(request.num_seqs)))
        self._outputs.put_nowait(error_outputs(entry, reason, status))

    def abort(self, request_ids: list[str]) -> None:
        self._core.abort(request_ids)

    def finish_sequence(self, request_id: str, sequence: int, status: RequestStatus) -> None:
        self._core.finish_sequence(request_id, sequence, status)

    async def next_outputs(self) -> EngineCoreOutputs:
        item = await self._outputs.get()
        if isinstance(item, WorkerDied):
            raise item
        return item

    async def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        return self._core.reset_prefix_cache(preempt_running)

    async def load_adapter(self, lora: LoraRef) -> None:
        self._core.load_adapter(lora)

    def unload_adapter(self, lora: LoraRef) -> None:
        self._core.unload_adapter(lora)

    def stats(self) -> wire.EngineStats:
        return wire.EngineStats(**dataclasses.asdict(self._core.make_stats()))

    async def shutdown(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._core.shutdown()

    async def _run(self) -> None:
        try:
            while True:
                await self._has_work.wait()
                while self._core.has_unfinished_requests():
                    for outputs in self._core.step().values():
                        self._outputs.put_nowait(outputs)
                    await asyncio.sleep(0)
                self._has_work.clear()
        except (WorkerDied, InvariantBroken) as error:
            self._outputs.put_nowait(error if isinstance(error, WorkerDied) else WorkerDied(str(error)))
