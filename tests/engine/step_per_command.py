"""Hold an engine on a thread before each step until a command waits for it: no request ends while a test looks."""

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future

from pagoda.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from pagoda.engine.engine_thread import EngineThread


@contextlib.contextmanager
def step_per_command(thread: EngineThread, num_free_steps: int = 0) -> Iterator[None]:
    """In the block, let the engine compute `num_free_steps` and then one for each command that callers post.

    Commands run between steps. The end of the block releases the engine.
    """
    executor, released = thread.call(lambda engine: engine.core._executor), threading.Event()
    submit, commands = executor.submit, thread._runner.commands
    num_left = num_free_steps

    def held(output: SchedulerOutput) -> "Future[ModelRunnerOutput]":
        nonlocal num_left
        num_left -= not output.is_empty
        while num_left < 0 and commands.empty() and not released.wait(0.001):
            pass
        return submit(output)

    executor.submit = held  # type: ignore[method-assign]
    try:
        yield
    finally:
        released.set()
        executor.submit = submit  # type: ignore[method-assign]
