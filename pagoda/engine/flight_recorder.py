"""FlightRecorder: record what an engine process is doing, so that its supervisor can read it after a crash.

A small file mapped by both processes. When a step is submitted, the engine writes which requests are in it; when it has
completed, that it has. The supervisor reads it to tell a hung step from a busy engine, and to find the suspects of a
crash.
"""

import mmap
import struct
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pagoda.core.executor import Executor
from pagoda.core.request import RequestKey
from pagoda.core.scheduler_output import ModelRunnerOutput, SchedulerOutput

_HEADER = struct.Struct("<qq")  # steps begun, steps ended
_SLOTS_AT = _HEADER.size  # of each slot: the number of its keys; then the keys of each


def packed_key(key: RequestKey) -> int:
    """Return the number of a request in the recorder."""
    client_index, handle = key
    return client_index << 40 | handle


@dataclass(frozen=True, slots=True)
class FlightRecord:
    """A snapshot of the recorder.

    steps_begun - steps_ended: steps in flight.
    keys: int64, `packed_key` of every request in the steps that may be running: with one stage the oldest in flight.
        If there is none, of every request in the last step.
    """

    steps_begun: int
    steps_ended: int
    keys: np.ndarray


class FlightRecorder:
    """The mapped file, for one writer (the engine) and one reader (the supervisor). Both give the same sizes.

    max_rows: most rows per step.   num_slots: most steps in flight; of more, the requests of the oldest are lost.
    num_stages: most steps that run at once, each in another pipeline stage: the oldest in flight.
    Steps may be submitted while others are in flight; they end in order. `end_step` may be called by another thread.
    """

    def __init__(self, path: Path, max_rows: int, num_slots: int, num_stages: int = 1, create: bool = False) -> None:
        size = _SLOTS_AT + 8 * num_slots * (1 + max_rows)
        if create:
            path.write_bytes(bytes(size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), size)
        self._counts = np.frombuffer(self._map, np.int64, num_slots, _SLOTS_AT)
        keys = np.frombuffer(self._map, np.int64, max_rows * num_slots, _SLOTS_AT + self._counts.nbytes)
        self._keys = keys.reshape(num_slots, max_rows)
        self._num_slots, self._num_stages = num_slots, num_stages
        self._begun = 0
        self._ended = 0

    def begin_step(self, keys: np.ndarray) -> None:
        """Record that a step begins. keys: int64 [num_rows], may contain duplicates."""
        slot = self._begun % self._num_slots
        count = min(len(keys), self._keys.shape[1])
        self._keys[slot, :count] = keys[:count]
        self._counts[slot] = count
        self._begun += 1
        struct.pack_into("<q", self._map, 0, self._begun)

    def end_step(self) -> None:
        self._ended += 1
        struct.pack_into("<q", self._map, 8, self._ended)

    def read(self) -> FlightRecord:
        """Return a snapshot: exact once the writer is dead, possibly torn while it runs (fine for a watchdog)."""
        begun, ended = _HEADER.unpack_from(self._map, 0)
        first = max(min(max(ended, begun - self._num_slots), begun - 1), 0)
        slots = [step % self._num_slots for step in range(first, max(min(first + self._num_stages, begun), 1))]
        return FlightRecord(begun, ended, np.unique(np.concatenate([self._keys[i, : self._counts[i]] for i in slots])))

    def close(self) -> None:
        del self._keys, self._counts
        self._map.close()


class RecordedExecutor:
    """Records which requests are in a step when it is submitted to `inner`, and when it has ended.

    max_rows: rows of the scheduler's table.
    """

    def __init__(self, inner: Executor, recorder: FlightRecorder, max_rows: int) -> None:
        self._inner = inner
        self.start, self.set_pools, self.call, self.shutdown = inner.start, inner.set_pools, inner.call, inner.shutdown
        self._recorder = recorder
        self._key_of_row = np.zeros(max_rows, np.int64)
        self._prompt_end_of_row = np.zeros(max_rows, np.int64)
        self._step_tokens: list[int] = []

    def submit(self, output: SchedulerOutput) -> "Future[ModelRunnerOutput]":
        for init in output.admitted:
            self._key_of_row[init.row] = packed_key(init.key)
            self._prompt_end_of_row[init.row] = len(init.token_ids)
        for fork in output.forks:
            self._key_of_row[fork.dst] = self._key_of_row[fork.src]
        if not output.is_empty:
            # A row that ends its prompt also gets a token, of which nothing is computed before the next step.
            ends = output.start + output.num_new == self._prompt_end_of_row[output.rows]
            num_first = int(np.count_nonzero(ends[output.sample_index]))
            self._step_tokens.append(output.total_num_scheduled_tokens + num_first)
        self._recorder.begin_step(self._key_of_row[output.rows])
        future = self._inner.submit(output)
        future.add_done_callback(lambda _: self._recorder.end_step())
        return future

    def take_step_tokens(self) -> tuple[int, ...]:
        """Return the number of tokens of each step since the last call: those of prompts, and those sampled."""
        taken = tuple(self._step_tokens)
        self._step_tokens.clear()
        return taken
