"""EngineCoreClient: the interface through which AsyncEngine reaches an engine core, in any thread or process."""

from typing import Protocol

from pagoda.core.request import LoraRef, Request, RequestStatus
from pagoda.core.scheduler_output import EngineCoreOutputs
from pagoda.engine.wire import EngineFacts, EngineStats


class EngineCoreClient(Protocol):
    """A client of one engine core. All methods are called from one event loop and do not block it."""

    async def start(self) -> EngineFacts:
        """Start the engine; return when it can serve requests. Raises ConfigError or WorkerDied if it cannot start."""
        ...

    def add_request(self, request: Request) -> None:
        """Queue a request; its outputs, or its rejection, are returned by next_outputs."""
        ...

    def abort(self, request_ids: list[str]) -> None:
        """Abort requests; ignore unknown ids. An aborted request produces no further output, not even a Finish."""
        ...

    def finish_sequence(self, request_id: str, sequence: int, status: RequestStatus) -> None:
        """Finish one sequence (a stop string was found); the request's other sequences continue."""
        ...

    async def next_outputs(self) -> EngineCoreOutputs:
        """Return the next step's outputs, to a single consumer. Raises WorkerDied if the engine cannot be restarted."""
        ...

    async def reset_prefix_cache(self, preempt_running: bool = False) -> bool: ...

    async def load_adapter(self, lora: LoraRef) -> None:
        """Load a LoRA adapter. Raises RequestError if it cannot be used, WorkerDied if the engine dies meanwhile."""
        ...

    def unload_adapter(self, lora: LoraRef) -> None:
        """Free an adapter's memory once no running request uses it. Ignore one that is not loaded."""
        ...

    def stats(self) -> EngineStats:
        """Return the latest gauges and counters."""
        ...

    async def shutdown(self) -> None: ...
