"""EngineCoreClient: how AsyncEngine reaches an engine core, wherever it runs."""

from typing import Protocol

from pagoda.core.request import Request, RequestStatus
from pagoda.core.scheduler_output import EngineCoreOutputs
from pagoda.engine.wire import EngineFacts, EngineStats


class EngineCoreClient(Protocol):
    """All methods are called from one event loop; none blocks it."""

    async def start(self) -> EngineFacts:
        """Returns when requests can be served; ConfigError or WorkerDied when that cannot be."""
        ...

    def add_request(self, request: Request) -> None:
        """Hand over a request; what becomes of it (a refusal too) comes through next_outputs."""
        ...

    def abort(self, request_ids: list[str]) -> None:
        """End these; unknown ids are ignored. An aborted request yields nothing more, not even a Finish."""
        ...

    def finish_branch(self, request_id: str, branch: int, status: RequestStatus) -> None:
        """End one branch (a stop string was found); its siblings go on."""
        ...

    async def next_outputs(self) -> EngineCoreOutputs:
        """What the next step gave. One consumer. Raises WorkerDied when the engine is gone for good."""
        ...

    async def reset_prefix_cache(self, preempt_running: bool = False) -> bool: ...

    def stats(self) -> EngineStats:
        """The last known gauges and totals."""
        ...

    async def shutdown(self) -> None: ...
