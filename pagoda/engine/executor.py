"""Executor: where steps run. The engine core knows nothing else of devices, processes or nodes.

Whatever crosses it is a value that a codec can carry. The life of an executor: `start`, `set_pools`, then steps and
calls in the order in which they were submitted, then `shutdown`.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from pagoda.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from pagoda.worker.calls import Capacity, StepSize


class Executor(Protocol):
    """Executes steps and calls in the order in which they are submitted, on every rank.

    Futures complete by themselves, in any thread; all of them fail with WorkerDied when a rank is gone.
    """

    def start(self, sizes: Sequence[StepSize] = ()) -> Sequence[Capacity]:
        """Load the weights; return what each rank has for KV pools; nothing if that does not limit them.

        sizes: of steps, the largest first: each rank tries steps of these sizes until one fits in its memory.
        Raises StepTooLarge if none does, ConfigError if a device does not support the settings.
        """
        ...

    def set_pools(self, num_blocks: int, num_host_blocks: int, num_states: int = 0, num_host_states: int = 0) -> None:
        """Allocate the KV pools and prepare for steps, which can be submitted from now on. Called once.

        Raises CapacityError if a rank does not have the memory.
        """
        ...

    def submit(self, output: SchedulerOutput) -> "Future[ModelRunnerOutput]":
        """Run one step. The future resolves in submission order."""
        ...

    def call(self, name: str, *args: object) -> "Future[Any]":
        """Run one of worker.calls.CALLS after the steps submitted so far and before those submitted later.

        The result is that of the rank that samples; the future fails if the call fails on any rank. Steps do not wait
        for what a call does on other threads.
        """
        ...

    def shutdown(self) -> None:
        """Release everything; idempotent. Futures still open fail with WorkerDied."""
        ...
