"""Drafts: tokens that a drafter offers for the next step, and what becomes of them when they are verified."""

from collections import abc

import numpy as np

from pagoda.core.events import DraftsVerified, EventStream
from pagoda.core.kv import BlockTables
from pagoda.core.request import RequestStatus
from pagoda.core.request_table import RequestTable, readonly
from pagoda.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from pagoda.core.step_plan import StepPlan


class Drafts:
    """Offered drafts by row. A step takes those of the rows it plans; none is offered twice.

    num_offered: int32 [rows], read-only.   offered: row -> int32 [k], k > 0.
    """

    def __init__(self, table: RequestTable, tables: BlockTables, events: EventStream) -> None:
        self.offered: dict[int, np.ndarray] = {}
        self._num_offered = np.zeros(table.max_rows, np.int32)
        self.num_offered = readonly(self._num_offered)
        self._table = table
        self._tables = tables
        self._events = events

    def offer(self, row: int, tokens: abc.Sequence[int] | np.ndarray) -> None:
        """Replace the drafts of `row`. Unless it lacks exactly one token they would not fit, and are dropped.

        With states, it may lack more, right drafts before a wrong one, and gets a block of drafts at most.
        A beam gets none: whether a token is right depends on its siblings'.
        """
        self.remove_row(row)
        num_lacking = int(self._table.num_tokens[row] - self._table.num_computed[row])
        if self._tables.has_states:
            num_lacking, tokens = min(num_lacking, 1), tokens[: self._tables.block_size]
        if len(tokens) and not self._table.is_beam[row] and num_lacking == 1:
            self.offered[row] = np.array(tokens, np.int32)
            self._num_offered[row] = len(tokens)

    def remove_row(self, row: int) -> None:
        """The row's sequence has left it, or a step has taken its drafts."""
        if self.offered.pop(row, None) is not None:
            self._num_offered[row] = 0

    def num_wanted(self, rows: np.ndarray, start: np.ndarray) -> np.ndarray:
        """Return how many tokens each row lacks from `start` on, drafts included; int32 [num_rows]."""
        table, known = self._table, self._table.num_known(rows)
        # The token at the model's last position is sampled, never computed.
        last = np.maximum(table.num_tokens[rows], table.max_model_len - 1)
        # The token in flight finishes this row; do not schedule it again.
        ends_in_flight = (table.num_pending[rows] > 0) & (known >= table.length_limit[rows])
        end = np.where(ends_in_flight, start, np.minimum(known + self._num_offered[rows], last))
        return np.maximum(end - start, 0)

    def place(self, plan: StepPlan, rows: np.ndarray, ends: np.ndarray) -> None:
        """`rows` compute up to `ends`: plan those of their drafts that fit before that, and drop the others."""
        if not self.offered:
            return
        for i in self._num_offered[rows].nonzero()[0].tolist():
            row = int(rows[i])
            num_fitting = int(ends[i] - self._table.num_known(row))
            if num_fitting > 0:
                plan.drafts[row] = self.offered[row][:num_fitting]
            self.remove_row(row)

    def verify(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """A step has verified its drafts: take back those that were rejected.

        With states, which are those before and after all drafts, take back all but if none was rejected.
        """
        if not output.drafts:
            return
        drafted = np.isin(output.sample_rows, list(output.drafts))
        sampled = dict(zip(output.sample_rows[drafted].tolist(), result.num_sampled[drafted].tolist(), strict=True))
        verified: dict[int, list[tuple[int, int, int, int]]] = {}  # by client
        for row, drafts in output.drafts.items():
            sequence = self._table.sequence_of[row]
            if sequence is None or sequence.is_finished:
                continue
            request, num_accepted = sequence.request, max(sampled[row] - 1, 0)
            # Not of a sequence that was preempted while in flight: it has nothing computed to lower.
            if sequence.row == row or request.status is RequestStatus.SWAPPED:
                num_rejected = len(drafts) - num_accepted
                if self._tables.has_states:
                    if not num_rejected and sequence.row == row:
                        self._tables.keep_drafted(row, len(drafts))
                    else:
                        num_rejected = len(drafts)
                self._table.roll_back(sequence, num_rejected)
            of_client = verified.setdefault(request.spec.client_index, [])
            of_client.append((request.spec.handle, sequence.index, len(drafts), num_accepted))
        for client, entries in verified.items():
            self._events.append(DraftsVerified(*self._events.now(), client, *zip(*entries, strict=True)))
