"""RunningBatch: which requests run, their rows as arrays, and the fast path for steps in which every row decodes."""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from pagoda.core.drafts import Drafts
from pagoda.core.in_flight import StepsInFlight
from pagoda.core.kv import BlockTables
from pagoda.core.request import LoraRef, RequestKey, RequestState
from pagoda.core.request_table import RequestTable
from pagoda.core.scheduler_options import SchedulerOptions
from pagoda.core.scheduler_output import NO_INTS
from pagoda.core.step_plan import StepPlan


@dataclass(frozen=True, slots=True, eq=False)
class RunningRows:
    """The running rows, in running order. Built anew when the batch changes, never written to.

    rows, numbers (0..n-1), ones: int32 [n].   at: int64 [n], `rows` in the type in which numpy indexes without a
        conversion: the columns of the table are read and written with it in every step.
    handles: int64 [n].   indices (of sequences), length_limits: int32 [n].
    client: the one client of all rows, None if there are several.
    """

    rows: np.ndarray
    at: np.ndarray
    numbers: np.ndarray
    ones: np.ndarray
    handles: np.ndarray
    indices: np.ndarray
    length_limits: np.ndarray
    client: int | None

    @classmethod
    def of(cls, table: RequestTable) -> "RunningRows":
        at = table.active_rows()
        count = len(at)
        clients = table.client[at]
        one_client = count > 0 and bool((clients == clients[0]).all())
        return cls(
            at.astype(np.int32),
            at,
            np.arange(count, dtype=np.int32),
            np.ones(count, np.int32),
            table.handle[at],
            table.index[at],
            table.length_limit[at],
            int(clients[0]) if one_client else None,
        )


class RunningBatch:
    """The running requests, by key in order of admission.

    num_seqs: their unfinished sequences, those that wait for a fork included.
    prefilling: rows whose last chunk did not reach the end of their known tokens; of rows that join or come
        back from host memory also before the first.
    awaiting_first_output: rows of requests of which no token has been emitted yet.
    leaders: row -> request whose other sequences wait for this row: to fork from it when the prompt is computed
        (awaiting_fork), or to share its prompt blocks when the request was resumed.
    """

    def __init__(
        self,
        table: RequestTable,
        tables: BlockTables,
        in_flight: StepsInFlight,
        drafts: Drafts,
        config: SchedulerOptions,
    ) -> None:
        self.requests: dict[RequestKey, RequestState] = {}
        self.num_seqs = 0
        self._num_using: Counter[tuple[str, ...]] = Counter()  # requests by LoraRef.identity; never 0
        self.prefilling: dict[int, None] = {}
        self.awaiting_first_output: set[int] = set()
        self.leaders: dict[int, RequestState] = {}
        self._table = table
        self._tables = tables
        self._in_flight = in_flight
        self._drafts = drafts
        self._async = config.async_scheduling
        self._max_loras = config.max_loras
        self._running: RunningRows | None = None
        self._is_steady = False
        self._num_computed = NO_INTS
        self._steps_until_reserve = 0
        self._limits = np.zeros(table.max_rows, np.int8)  # what last shortened a chunk of the row; 0: nothing

    # Requests and rows

    def add(self, request: RequestState) -> None:
        self.requests[request.key] = request
        self.num_seqs += len(request.unfinished)
        if request.spec.lora is not None:
            self._num_using[request.spec.lora.identity] += 1

    def remove(self, request: RequestState) -> None:
        del self.requests[request.key]
        self.num_seqs -= len(request.unfinished)
        lora = request.spec.lora
        if lora is not None:
            self._num_using[lora.identity] -= 1
            if not self._num_using[lora.identity]:
                del self._num_using[lora.identity]

    def has_room_for_adapter(self, lora: LoraRef) -> bool:
        """Whether a request with this adapter may run now: at most `max_loras` distinct ones do."""
        most = self._max_loras
        return not most or lora.identity in self._num_using or len(self._num_using) < most

    def sequence_ended(self, request: RequestState) -> None:
        """An unfinished sequence of the request ends."""
        if request.key in self.requests:
            self.num_seqs -= 1

    def let_siblings_wait(self, row: int, request: RequestState) -> None:
        """The request's other sequences, if it has any, wait for this row."""
        if len(request.unfinished) > 1:
            self.leaders[row] = request

    def release_siblings(self, row: int) -> None:
        """The request's other sequences no longer wait for this row."""
        del self.leaders[row]

    def start_prefill(self, row: int) -> None:
        """The row, which is new, is to compute tokens of its prompt."""
        self.prefilling[row] = None

    def add_row(self, row: int, request: RequestState) -> None:
        """A sequence of the request has got the row."""
        if not request.has_output:
            self.awaiting_first_output.add(row)
        self.changed()

    def take_awaiting(self, rows: np.ndarray) -> list[int]:
        """Return which of `rows` await their first output. They no longer do."""
        first = rows[np.isin(rows, list(self.awaiting_first_output))].tolist()
        self.awaiting_first_output.difference_update(first)
        return first

    def remove_row(self, row: int) -> None:
        """The row's sequence has left it."""
        self.prefilling.pop(row, None)
        self.leaders.pop(row, None)
        self.awaiting_first_output.discard(row)
        self._limits[row] = 0
        self.changed()

    def newly_limited(self, rows: np.ndarray, limits: np.ndarray) -> np.ndarray:
        """Return where `limits` is neither 0 nor what it last was for this row since that was given."""
        new = ((limits != 0) & (limits != self._limits[rows])).nonzero()[0]
        self._limits[rows[new]] = limits[new]
        return new

    def changed(self, *, rows: bool = True) -> None:
        """Something about the batch is not as the last step left it: its rows, or (rows=False) only what they lack."""
        self._is_steady = False
        if rows:
            self._running = None

    @property
    def running(self) -> RunningRows:
        if self._running is None:
            self._running = RunningRows.of(self._table)
        return self._running

    def note_progress(self, plan: StepPlan) -> bool:
        """Keep `prefilling` up to date with a step in which rows compute up to `plan.ends`.

        Return whether any of them is in it, or has left it with this step.
        """
        table = self._table
        done = [row for row in self.prefilling if table.num_computed[row] >= table.num_tokens[row]]
        for row in done:
            del self.prefilling[row]
        ahead = plan.rows[plan.ends < table.num_tokens[plan.at]].tolist()
        for row in ahead:
            self.prefilling[row] = None
        return bool(done or ahead)

    # The steady step

    def plan_steady_step(self, plan: StepPlan) -> bool:
        """Plan one more token for every row. Return False, and plan nothing, if the step is not as simple as that.

        `_derive` finds out whether it is, once after each `changed()`. From then on three attributes are kept:
        `_is_steady`; `_num_computed`, the counts of the running rows; and `_steps_until_reserve`, the number of further
        steps in which no row can need a block or, with tokens in flight, reach its length limit.
        """
        if self._in_flight.outputs and not self._async:
            return False  # the tokens that rows in flight sample are not known
        if not self._is_steady and not self._derive():
            return False
        running, start = self.running, self._num_computed
        ends = start + 1
        if self._steps_until_reserve > 0:
            self._steps_until_reserve -= 1
        elif not self._reserve(running, ends):
            self.changed(rows=False)
            return False
        self._num_computed = ends
        plan.place(running.rows, start, running.ones, len(ends))
        plan.is_steady, plan.at, plan.ends, plan.sample_index = True, running.at, ends, running.numbers
        return True

    def _derive(self) -> bool:
        """Whether every row lacks exactly one token, and gets nothing else in the next step."""
        table = self._table
        if self.prefilling or self.leaders or self._drafts.offered:
            return False
        rows = self.running.at
        self._num_computed = table.num_computed[rows]
        lacks = table.num_known(rows) - self._num_computed
        self._is_steady = bool((lacks == 1).all()) and not table.is_pooled[rows].any()
        if self._async and table.may_have_beams and table.is_beam[rows].any():
            self._is_steady = False  # a beam in flight lacks nothing until its next token is chosen
        self._steps_until_reserve = 0
        return self._is_steady

    def _reserve(self, running: RunningRows, ends: np.ndarray) -> bool:
        """Allocate what the rows need to compute up to `ends`, and count for how many more steps that is enough."""
        rows, limits = running.at, running.length_limits
        if self._async and (ends >= limits).any():
            return False  # the token in flight finishes a row: do not schedule it again
        spare = self._tables.reserved_until[rows] - ends
        short = (spare < 0).nonzero()[0]
        if len(short):
            if self._tables.allocate_slots(rows[short], ends[short]) < len(short):
                return False  # those that come first have their blocks
            spare = self._tables.reserved_until[rows] - ends
        self._steps_until_reserve = int(spare.min())
        if self._async:
            self._steps_until_reserve = min(self._steps_until_reserve, int((limits - ends).min()) - 1)
        return True
