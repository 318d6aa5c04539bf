"""check_invariants: what must always hold (section 10 of the contract), asserted over the whole state.

Cheap enough for production: numpy over pools and tables, Python over requests only.
"""

import numpy as np

from pagoda.base.errors import InvariantBroken
from pagoda.core.request import RequestStatus
from pagoda.core.scheduler_state import SchedulerState


def check_invariants(state: SchedulerState) -> None:
    """Raises InvariantBroken at the first rule that does not hold."""
    state.kv.pool.check()
    state.swap.pool.check()
    state.table.check()
    state.kv.content.prefix.check()
    _check_device_references(state)
    _check_host_references(state)
    _check_counts(state)
    _check_queues(state)
    _check_writers(state)


def _check_device_references(state: SchedulerState) -> None:
    """Every block's count equals the number of table entries naming it; nothing names a block beyond its tables."""
    table, pool = state.table, state.kv.pool
    counted = np.zeros(len(pool.ref_count), np.int64)
    rows = state.lineup.rows
    for group, entries in zip(state.kv.groups, table.block_table, strict=True):
        used = table.num_blocks[rows] if group.grows else table.num_cross_blocks[rows]
        held = entries[rows][np.arange(entries.shape[1]) < used[:, None]]
        counted += np.bincount(held, minlength=len(counted))
    counted[0] = 0
    if (counted != pool.ref_count).any():
        block = int(np.flatnonzero(counted != pool.ref_count)[0])
        raise InvariantBroken(f"block {block} has {pool.ref_count[block]} references, {counted[block]} tables name it")


def _check_host_references(state: SchedulerState) -> None:
    pool = state.swap.pool
    counted = np.zeros(len(pool.ref_count), np.int64)
    for live in state.live.values():
        for branch in live.branches:
            for _, blocks in branch.host_blocks:
                np.add.at(counted, blocks, 1)
            if branch.host_blocks and branch.is_finished:
                raise InvariantBroken(f"{live.request_id}: a finished branch holds host blocks")
    if (counted != pool.ref_count).any():
        raise InvariantBroken("a host block's references are not those of the swapped branches")


def _check_counts(state: SchedulerState) -> None:
    """No row has computed more than is known or planned: its tokens, those in flight, and drafts in flight."""
    table, rows = state.table, state.lineup.rows
    known = table.num_tokens + table.num_pending
    for output in state.in_flight:
        for row, drafts in output.drafts.items():
            known[row] += len(drafts)
    if (table.num_computed[rows] > known[rows]).any() or (table.num_pending[rows] < 0).any():
        raise InvariantBroken("more tokens are computed than are known")


def _check_queues(state: SchedulerState) -> None:
    """A request is in exactly one queue, the one its status says, and only running ones have rows and seats."""
    seats = 0
    for request_id, live in state.live.items():
        places = (request_id in state.waiting, request_id in state.swapped, request_id in state.running)
        wanted = {
            RequestStatus.WAITING: (True, False, False),
            RequestStatus.PREEMPTED: (True, False, False),
            RequestStatus.SWAPPED: (False, True, False),
            RequestStatus.RUNNING: (False, False, True),
        }.get(live.status)
        if places != wanted:
            raise InvariantBroken(f"{request_id} is {live.status.name} but waits/is swapped/runs: {places}")
        rows = [branch.row for branch in live.branches if branch.row >= 0]
        if rows and not places[2]:
            raise InvariantBroken(f"{request_id} does not run but has rows {rows}")
        if any(branch.is_finished and branch.row >= 0 for branch in live.branches):
            raise InvariantBroken(f"{request_id}: a finished branch has a row")
        seats += len(live.unfinished) if places[2] else 0
    if len(state.waiting) + len(state.swapped) + len(state.running) != len(state.live):
        raise InvariantBroken("a queue holds a request that is gone")
    if seats != state.num_seats_taken or seats > state.config.max_num_seqs:
        raise InvariantBroken(
            f"{state.num_seats_taken} seats are counted, {seats} taken of {state.config.max_num_seqs}"
        )


def _check_writers(state: SchedulerState) -> None:
    """No row can go on writing into a block that others reference without the KV manager being asked first."""
    table, ref_count = state.table, state.kv.pool.ref_count
    rows = state.lineup.rows
    tail = table.num_computed[rows] // state.kv.block_size
    inside = (tail < table.num_blocks[rows]) & (table.num_computed[rows] % state.kv.block_size != 0)
    rows, tail = rows[inside], tail[inside]
    for group in state.kv.growing:
        shared = ref_count[table.block_table[group.index][rows, tail]] > 1
        if (table.attention_at[rows[shared]] >= table.num_computed[rows[shared]]).any():
            raise InvariantBroken("a row would write into a block that another row references")
