"""Executor: where steps run. The engine core knows nothing else of devices, processes or nodes."""

from concurrent.futures import Future
from typing import Protocol

from pagoda.core.request import LoraRef
from pagoda.core.scheduler_output import ModelRunnerOutput, SchedulerOutput


class Executor(Protocol):
    """Executes steps in the order they are submitted."""

    def start(self) -> None:
        """Load weights and reserve the KV cache; returns when the first step can be submitted."""
        ...

    def submit(self, output: SchedulerOutput) -> "Future[ModelRunnerOutput]":
        """Run one step. The future resolves in submission order; it fails with WorkerDied when the worker is gone."""
        ...

    def shutdown(self) -> None:
        """Release everything; idempotent. Futures still open fail with WorkerDied."""
        ...


class AdapterLoader(Protocol):
    """An executor whose workers hold LoRA adapters."""

    def load_adapter(self, lora: LoraRef) -> None:
        """Read an adapter after the steps submitted so far, so that the first request that uses it need not wait.

        Workers also read adapters that steps name and that they do not hold.
        Raises PagodaError that says why it cannot be used, WorkerDied when the worker is gone.
        """
        ...

    def unload_adapter(self, lora: LoraRef) -> None:
        """Free an adapter's memory once no row uses it. Ignore one that is not loaded."""
        ...
