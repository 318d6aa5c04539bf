"""SchedulerView: what runs at this moment and who has which blocks. Made on request, never kept."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pagoda.core.state import SchedulerState

MAX_CELLS = 4096
"""Blocks of larger pools are shown as at most this many cells."""
FREE, CACHED, SHARED, FIRST_OWNER = 0, 1, 2, 3
"""Values of cells: a block without content, a free one that can be found by its hash, one that several requests have;
from FIRST_OWNER on, one that only the request at this place of the columns has."""


@dataclass(frozen=True, slots=True, eq=False)
class SchedulerView:
    """Requests with KV as columns: those that run, in their order, then those whose KV is in host memory; and blocks.

    num_running: how many of them run.
    clients: int32 [n].   handles: int64 [n].   num_computed: int32 [n], tokens of its first sequence that have KV.
    num_blocks: int32 [n], distinct blocks, of the host for those in host memory.
    blocks_per_cell: of a cell, which shows the highest of their values.   cells: int16.
    host_cells: the same of the host's blocks.
    next_clients, next_handles: of the requests that wait and are not set aside, in the order in which they are
        considered, int32 and int64.
    """

    num_running: int
    clients: np.ndarray
    handles: np.ndarray
    num_computed: np.ndarray
    num_blocks: np.ndarray
    blocks_per_cell: int
    cells: np.ndarray
    host_cells: np.ndarray
    next_clients: np.ndarray
    next_handles: np.ndarray


def view_of(state: SchedulerState) -> SchedulerView:
    """Return what runs now. No Python loop runs over rows' blocks."""
    requests = [request for request in state.batch.requests.values() if request.rows]
    rows = [request.rows for request in requests]
    lengths = np.array([len(some) for some in rows], np.intp)
    flat = np.array([row for some in rows for row in some], np.intp)
    first = flat[lengths.cumsum() - lengths] if len(flat) else flat
    owners = np.repeat(np.arange(len(requests)), lengths)
    values, num_blocks = state.kv.owners_of_blocks(flat, owners, len(requests))
    swapped = list(state.swapped)
    host_values, num_host_blocks = state.kv.owners_of_host_blocks([request.unfinished for request in swapped])
    host_values = np.where(host_values < FIRST_OWNER, host_values, host_values + len(requests))
    per_cell = max(1, -(-max(len(values), len(host_values)) // MAX_CELLS))
    specs = [request.spec for request in (*requests, *swapped)]
    next_specs = [request.spec for queue in (state.swapped, state.waiting) for request in queue.in_turn()]
    num_swapped_computed = np.array([request.unfinished[0].num_computed for request in swapped], np.int32)
    return SchedulerView(
        num_running=len(requests),
        clients=np.array([spec.client_index for spec in specs], np.int32),
        handles=np.array([spec.handle for spec in specs], np.int64),
        num_computed=np.concatenate((state.table.num_computed[first], num_swapped_computed)),
        num_blocks=np.concatenate((num_blocks, num_host_blocks)),
        blocks_per_cell=per_cell,
        cells=_cells(values, per_cell),
        host_cells=_cells(host_values, per_cell),
        next_clients=np.array([spec.client_index for spec in next_specs], np.int32),
        next_handles=np.array([spec.handle for spec in next_specs], np.int64),
    )


def joined_views(views: Sequence[SchedulerView]) -> SchedulerView:
    """Return what runs in several engines as one view: the blocks of one after those of the other.

    Requests that wait are in the order of their places in the queues.
    """
    num_running = sum(view.num_running for view in views)
    columns: list[np.ndarray] = []  # of each view, its requests' places in the joined columns
    running, swapped = 0, num_running
    for view in views:
        num_swapped = len(view.handles) - view.num_running
        columns.append(np.r_[running : running + view.num_running, swapped : swapped + num_swapped].astype(np.intp))
        running, swapped = running + view.num_running, swapped + num_swapped
    order = np.argsort(np.concatenate(columns))
    turn = np.argsort(np.concatenate([np.arange(len(view.next_handles)) for view in views]), kind="stable")
    each = list(zip(views, columns, strict=True))
    values = np.concatenate([_blocks_of(view.cells, places, view) for view, places in each])
    host_values = np.concatenate([_blocks_of(view.host_cells, places, view) for view, places in each])
    per_cell = max(1, -(-max(len(values), len(host_values)) // MAX_CELLS))
    return SchedulerView(
        num_running=num_running,
        clients=np.concatenate([view.clients for view in views])[order],
        handles=np.concatenate([view.handles for view in views])[order],
        num_computed=np.concatenate([view.num_computed for view in views])[order],
        num_blocks=np.concatenate([view.num_blocks for view in views])[order],
        blocks_per_cell=per_cell,
        cells=_cells(values, per_cell),
        host_cells=_cells(host_values, per_cell),
        next_clients=np.concatenate([view.next_clients for view in views])[turn],
        next_handles=np.concatenate([view.next_handles for view in views])[turn],
    )


def _blocks_of(cells: np.ndarray, places: np.ndarray, view: SchedulerView) -> np.ndarray:
    """Return the value of each block, of owners that are at other places of the columns now."""
    values = cells.astype(np.intp)
    is_owned = values >= FIRST_OWNER
    values[is_owned] = places[values[is_owned] - FIRST_OWNER] + FIRST_OWNER
    return np.repeat(values, view.blocks_per_cell)


def _cells(values: np.ndarray, per_cell: int) -> np.ndarray:
    cells = np.maximum.reduceat(values, np.arange(0, len(values), per_cell)) if len(values) else values
    return cells.astype(np.int16)
