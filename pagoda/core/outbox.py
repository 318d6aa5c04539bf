"""Outbox: what the next SchedulerOutput and the next outputs of clients must still say."""

from dataclasses import replace

import numpy as np

from pagoda.core.request import RequestState
from pagoda.core.scheduler_output import BeamRows, EngineCoreOutputs, Finish, join_outputs, only_finishes
from pagoda.core.stats import SchedulerStats
from pagoda.core.step_plan import StepPlan


class Outbox:
    """Pending notifications. Each is sent once.

    awaiting_first_output: row -> request of which no token has been emitted yet.
    """

    def __init__(self, max_rows: int, stats: SchedulerStats) -> None:
        self.awaiting_first_output: dict[int, RequestState] = {}
        self._awaits = np.zeros(max_rows, np.bool_)  # by row, the same: one lookup for a whole batch
        self._released: list[int] = []
        self._beams: list[tuple[int, int, int, int]] = []  # row, source, position, token
        self._preempted_ids: list[str] = []
        self._finished_ids: list[str] = []
        self._deferred: dict[int, list[EngineCoreOutputs]] = {}
        self._stats = stats

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

    # For clients, with the next EngineCoreOutputs

    def post(self, request: RequestState, outputs: EngineCoreOutputs) -> None:
        """The request's client gets `outputs` with those of the step that is completed next."""
        self._deferred.setdefault(request.spec.client_index, []).append(outputs)

    def post_finishes(self, request: RequestState, finishes: list[Finish]) -> None:
        """`post` that sequences of the request have ended."""
        self.post(request, only_finishes(finishes))

    @property
    def has_deferred(self) -> bool:
        return bool(self._deferred)

    def take_deferred(self) -> dict[int, EngineCoreOutputs]:
        """Return what was posted, by client."""
        deferred, self._deferred = self._deferred, {}
        return {client: join_outputs(parts) for client, parts in deferred.items()}

    def await_first_output(self, row: int, request: RequestState) -> None:
        """Note `row`, unless the client has a token of the request already."""
        if not request.has_output:
            self.awaiting_first_output[row] = request
            self._awaits[row] = True

    def take_first_outputs(self, rows: np.ndarray) -> list[RequestState]:
        """Return the requests of which `rows` emit the first token. They are no longer awaited."""
        first: list[RequestState] = []
        for row in rows[self._awaits[rows]].tolist():
            self._awaits[row] = False
            first.append(self.note_first_output(self.awaiting_first_output.pop(row)))
        return first

    def note_first_output(self, request: RequestState) -> RequestState:
        """The request emits its first token. Return it."""
        request.has_output = True
        self._stats.prompt_tokens += request.spec.num_prompt_tokens
        return request


def with_first_output(outputs: EngineCoreOutputs, request: RequestState) -> EngineCoreOutputs:
    """Return the outputs with what is sent once, with the first token of the request."""
    handle = request.spec.handle
    return replace(
        outputs,
        num_cached_tokens=outputs.num_cached_tokens | {handle: request.num_cached_tokens},
        queue_s=outputs.queue_s | {handle: request.queue_s},
    )
