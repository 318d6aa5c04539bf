"""Executor: where steps run. The engine core knows nothing else of devices, processes or nodes."""

from concurrent.futures import Future
from typing import Protocol

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
