"""What tests ask of a scheduler and tell it, besides what the engine does."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from pagoda.core.request import RequestKey, RequestState
from pagoda.core.scheduler import Scheduler


def running_ids(scheduler: Scheduler) -> list[str]:
    """Return ids in order of admission."""
    return _ids(scheduler._state.batch.requests.values())


def waiting_ids(scheduler: Scheduler) -> list[str]:
    """Return ids in queue order."""
    return _ids(scheduler._state.waiting)


def swapped_ids(scheduler: Scheduler) -> list[str]:
    """Return ids in queue order."""
    return _ids(scheduler._state.swapped)


def unfinished_ids(scheduler: Scheduler) -> list[str]:
    return running_ids(scheduler) + waiting_ids(scheduler) + swapped_ids(scheduler)


def _ids(requests: Iterable[RequestState]) -> list[str]:
    return [request.spec.request_id for request in requests]


def num_computed_tokens(scheduler: Scheduler, key: RequestKey) -> list[int]:
    """Return the count of each unfinished sequence that has been started (one entry before the fork)."""
    request, counts = scheduler._state.requests[key], scheduler._state.table.num_computed
    started = [one for one in request.unfinished if one.row >= 0 or not request.awaiting_fork]
    return [int(counts[one.row]) if one.row >= 0 else one.num_computed for one in started or request.unfinished[:1]]


def num_blocks_held(scheduler: Scheduler, key: RequestKey) -> list[int]:
    """Return distinct device blocks that the request references, per KV group, without the null block."""
    kv, rows = scheduler._state.kv, scheduler._state.requests[key].rows
    tables = [kv.tables.of(row) for row in rows]
    held = [{block for table in tables for block in table[at].tolist()} for at in range(len(kv.sizing.groups))]
    return [len(blocks - {0}) for blocks in held]


def offer_drafts(scheduler: Scheduler, drafts: Mapping[tuple[RequestKey, int], Sequence[int]]) -> None:
    """Offer drafts by request and sequence, as workers do by row."""
    requests, by_row = scheduler._state.requests, dict[int, np.ndarray]()
    for (key, index), tokens in drafts.items():
        if key in requests and (row := requests[key].sequences[index].row) >= 0:
            by_row[row] = np.array(tokens, np.int32)
    scheduler._offer_drafts(by_row)
