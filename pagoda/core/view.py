"""SchedulerView: what runs at this moment and who has which blocks. Made on request, never kept."""

from dataclasses import dataclass

import numpy as np

from pagoda.core.state import SchedulerState

MAX_CELLS = 4096
"""Blocks of larger pools are shown as so many cells at most."""
FREE, CACHED, SHARED, FIRST_OWNER = 0, 1, 2, 3
"""Values of cells: a block without content, a free one that can be found by its hash, one that several requests have;
from FIRST_OWNER on, one that only the request at this place of the running order has."""


@dataclass(frozen=True, slots=True, eq=False)
class SchedulerView:
    """Running requests, in their order, as columns; and the pool's blocks.

    clients: int32 [n].   handles: int64 [n].   num_computed: int32 [n], tokens of its first sequence that have KV.
    num_blocks: int32 [n], distinct blocks.
    blocks_per_cell: so many blocks are a cell, which shows the one of the highest value.   cells: int16.
    """

    clients: np.ndarray
    handles: np.ndarray
    num_computed: np.ndarray
    num_blocks: np.ndarray
    blocks_per_cell: int
    cells: np.ndarray


def view_of(state: SchedulerState) -> SchedulerView:
    """Return what runs now. No Python loop runs over rows' blocks."""
    requests = [request for request in state.batch.requests.values() if request.rows]
    rows = [request.rows for request in requests]
    lengths = np.array([len(some) for some in rows], np.intp)
    flat = np.array([row for some in rows for row in some], np.intp)
    first = flat[lengths.cumsum() - lengths] if len(flat) else flat
    owners = np.repeat(np.arange(len(requests)), lengths)
    values, num_blocks = state.kv.owners_of_blocks(flat, owners, len(requests))
    per_cell = max(1, -(-len(values) // MAX_CELLS))
    cells = np.maximum.reduceat(values, np.arange(0, len(values), per_cell)) if len(values) else values
    return SchedulerView(
        clients=np.array([request.spec.client_index for request in requests], np.int32),
        handles=np.array([request.spec.handle for request in requests], np.int64),
        num_computed=state.table.num_computed[first],
        num_blocks=num_blocks,
        blocks_per_cell=per_cell,
        cells=cells.astype(np.int16),
    )
