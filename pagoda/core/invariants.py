"""check_invariants: what must always hold (docs/reference/scheduler-contract.md), checked over all owners.

Python loops run over requests, rows and cached blocks: meant for tests, and for `check_invariants`.
"""

import numpy as np

from pagoda.base.errors import InvariantBroken
from pagoda.core.in_flight import StepsInFlight
from pagoda.core.queues import RequestQueue
from pagoda.core.request import RequestStatus
from pagoda.core.request_state import RequestState
from pagoda.core.request_table import RequestTable
from pagoda.core.running_batch import RunningBatch
from pagoda.core.state import SchedulerState


def check_invariants(state: SchedulerState) -> None:
    """Raises InvariantBroken at the first rule that does not hold."""
    table, batch, requests, waiting, swapped = state.table, state.batch, state.requests, state.waiting, state.swapped
    rows = batch.running.rows
    table.check()
    state.kv.check(rows)
    _check_counts(table, rows, state.in_flight)
    state.stops.check(request.spec for request in requests.values())
    active = set(rows.tolist())
    for name, kept in (("prefilling", batch.prefilling), ("leaders", batch.leaders), ("drafts", state.drafts.offered)):
        if not kept.keys() <= active:
            raise InvariantBroken(f"{name} has rows {sorted(kept.keys() - active)}, which have no sequence")
    num_seqs = sum(_check_place(request, waiting, swapped, batch) for request in requests.values())
    if len(waiting) + len(swapped) + len(batch.requests) != len(requests):
        raise InvariantBroken("a queue holds a request that has ended")
    if num_seqs != batch.num_seqs or num_seqs > state.config.max_num_seqs:
        raise InvariantBroken(f"{batch.num_seqs} sequences are counted, {num_seqs} run of {state.config.max_num_seqs}")


def _check_counts(table: RequestTable, rows: np.ndarray, in_flight: StepsInFlight) -> None:
    """No row has computed more than is known or planned: its tokens, those in flight, and drafts in flight."""
    known = table.num_known(np.arange(table.max_rows))
    for row, num_drafts in in_flight.num_drafts().items():
        known[row] += num_drafts
    if (table.num_computed[rows] > known[rows]).any() or (table.num_pending[rows] < 0).any():
        raise InvariantBroken("more tokens are computed than are known")


_PLACES = {
    RequestStatus.WAITING: (True, False, False),
    RequestStatus.PREEMPTED: (True, False, False),
    RequestStatus.SWAPPED: (False, True, False),
    RequestStatus.RUNNING: (False, False, True),
}


def _check_place(request: RequestState, waiting: RequestQueue, swapped: RequestQueue, batch: RunningBatch) -> int:
    """A request is in the one queue that its status says; only running ones have rows. Return its running sequences."""
    request_id = request.request_id
    places = (request_id in waiting, request_id in swapped, request_id in batch.requests)
    if places != _PLACES.get(request.status):
        raise InvariantBroken(f"{request_id} is {request.status.name} but waits, is swapped, runs: {places}")
    if request.rows and not places[2]:
        raise InvariantBroken(f"{request_id} does not run but has rows {request.rows}")
    if any(sequence.is_finished and sequence.row >= 0 for sequence in request.sequences):
        raise InvariantBroken(f"{request_id}: a finished sequence has a row")
    return len(request.unfinished) if places[2] else 0
