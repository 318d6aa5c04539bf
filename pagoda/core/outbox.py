"""Outbox: what the next SchedulerOutput must still say, and which requests await their first output."""

import numpy as np

from pagoda.core.events import EventStream, FirstToken
from pagoda.core.request import RequestState
from pagoda.core.scheduler_output import BeamRows
from pagoda.core.step_plan import StepPlan


class Outbox:
    """Pending notifications. Each is sent once.

    awaiting_first_output: row -> request of which no token has been emitted yet.
    """

    def __init__(self, max_rows: int, events: EventStream) -> None:
        self.awaiting_first_output: dict[int, RequestState] = {}
        self._awaits = np.zeros(max_rows, np.bool_)  # by row, the same: one lookup for a whole batch
        self._released: list[int] = []
        self._beams: list[tuple[int, int, int, int]] = []  # row, source, position, token
        self._preempted_ids: list[str] = []
        self._finished_ids: list[str] = []
        self._events = events

    # For workers, with the next SchedulerOutput

    def remove_row(self, row: int) -> None:
        """The row's sequence has left it: workers may forget it, and it emits no first output.

        Beams of one request leave together: no other row continues this one.
        """
        self._released.append(row)
        if self.awaiting_first_output.pop(row, None) is not None:
            self._awaits[row] = False
        if self._beams:
            self._beams = [one for one in self._beams if one[0] != row]

    def post_beam(self, row: int, source: int, position: int, token_id: int) -> None:
        """`row` continues the tokens and blocks of row `source`, with `token_id` at `position`."""
        self._beams.append((row, source, position, token_id))

    def post_preempted(self, request: RequestState) -> None:
        self._preempted_ids.append(request.request_id)

    def post_finished(self, request: RequestState) -> None:
        self._finished_ids.append(request.request_id)

    def drain_into(self, plan: StepPlan) -> None:
        """Let the step that is planned say what workers must know."""
        if self._released:
            plan.events["released"], self._released = np.array(self._released, np.int32), []
        if self._beams:
            columns = np.array(self._beams, np.int32).T
            plan.events["beams"], self._beams = BeamRows(*map(np.ascontiguousarray, columns)), []
        if self._preempted_ids:
            plan.events["preempted_ids"], self._preempted_ids = tuple(self._preempted_ids), []
        if self._finished_ids:
            plan.events["finished_ids"], self._finished_ids = tuple(self._finished_ids), []

    # First outputs

    def await_first_output(self, row: int, request: RequestState) -> None:
        """Note `row`, unless the client has a token of the request already."""
        if not request.has_output:
            self.awaiting_first_output[row] = request
            self._awaits[row] = True

    def take_first_outputs(self, rows: np.ndarray) -> None:
        """`rows` emit a token: write which requests emit their first one. They are no longer awaited."""
        for row in rows[self._awaits[rows]].tolist():
            self._awaits[row] = False
            self.note_first_output(self.awaiting_first_output.pop(row))

    def note_first_output(self, request: RequestState) -> None:
        """The request emits its first token."""
        request.has_output = True
        spec = request.spec
        self._events.write(FirstToken(*self._events.at(spec), spec.num_prompt_tokens))
