"""RecordedExecutor: wrap an executor with a flight recorder."""

from concurrent.futures import Future

import numpy as np

from pagoda.core.executor import Executor
from pagoda.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from pagoda.engine.flight_recorder import FlightRecorder, request_key


class RecordedExecutor:
    """Records which requests are in a step when it is submitted to `inner`, and when it has ended.

    max_rows: rows of the scheduler's table.
    """

    def __init__(self, inner: Executor, recorder: FlightRecorder, max_rows: int) -> None:
        self._inner = inner
        self._recorder = recorder
        self._key_of_row = np.zeros(max_rows, np.int64)
        self._step_tokens: list[int] = []

    def start(self) -> None:
        self._inner.start()

    def submit(self, output: SchedulerOutput) -> "Future[ModelRunnerOutput]":
        for init in output.admitted:
            self._key_of_row[init.row] = request_key(init.request_id)
        for fork in output.forks:
            self._key_of_row[fork.dst] = self._key_of_row[fork.src]
        if not output.is_empty:
            self._step_tokens.append(output.total_num_scheduled_tokens)
        self._recorder.begin_step(self._key_of_row[output.rows])
        future = self._inner.submit(output)
        future.add_done_callback(lambda _: self._recorder.end_step())
        return future

    def take_step_tokens(self) -> tuple[int, ...]:
        """Return the number of tokens computed in each step since the last call."""
        taken = tuple(self._step_tokens)
        self._step_tokens.clear()
        return taken

    def shutdown(self) -> None:
        self._inner.shutdown()
