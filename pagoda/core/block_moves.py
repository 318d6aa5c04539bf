"""BlockMoves: what one step does to block tables and block contents, gathered while the step is planned."""

import numpy as np

from pagoda.core.request_table import RowState
from pagoda.core.scheduler_output import NO_INTS, NO_PAIRS, BlockDelta

EMPTY_DELTA = BlockDelta(NO_INTS, NO_INTS, NO_INTS, NO_INTS)


class BlockMoves:
    """Table entries that were set, and block copies, of the step being planned."""

    def __init__(self) -> None:
        self._entries: list[tuple[np.ndarray, int, np.ndarray, np.ndarray]] = []
        self._copies: list[tuple[int, int, int]] = []
        self._swap_out: list[np.ndarray] = []
        self._swap_in: list[np.ndarray] = []

    def set_entries(self, rows: np.ndarray, group: int, index: np.ndarray, block_ids: np.ndarray) -> None:
        """table[group][rows, index] = block_ids."""
        self._entries.append((rows, group, index, block_ids))

    def copy(self, row: int, group: int, index: int, source: int, target: int) -> None:
        """Entry `index` of the row's table changes from `source` to `target`, whose content comes from `source`."""
        self._copies.append((row, source, target))
        self.set_entries(np.array([row], np.int32), group, np.array([index], np.int32), np.array([target], np.int32))

    def swap_out(self, pairs: np.ndarray) -> None:
        self._swap_out.append(pairs)

    def swap_in(self, pairs: np.ndarray) -> None:
        self._swap_in.append(pairs)

    def source_of(self, rows: set[int]) -> dict[int, int]:
        """Copies of this step that `rows` wait for, target -> source. They have not happened when swap-outs are made."""
        return {target: source for row, source, target in self._copies if row in rows}

    def drain(self, row_state: np.ndarray) -> tuple[BlockDelta, np.ndarray, np.ndarray, np.ndarray]:
        """(block delta, copies, swap-outs, swap-ins) of the step, and start the next.

        Rows that left the table again while the step was planned (by `row_state`, RequestTable.state) are left out.
        """
        delta, copies = EMPTY_DELTA, NO_PAIRS
        if self._entries:
            rows = np.concatenate([entry[0] for entry in self._entries])
            groups = np.repeat(
                np.array([entry[1] for entry in self._entries], np.int32), [len(entry[0]) for entry in self._entries]
            )
            index = np.concatenate([entry[2] for entry in self._entries])
            block_ids = np.concatenate([entry[3] for entry in self._entries])
            live = row_state[rows] == RowState.LIVE
            if not live.all():
                rows, groups, index, block_ids = rows[live], groups[live], index[live], block_ids[live]
            delta = BlockDelta(rows, groups, index, block_ids)
            self._entries = []
        if self._copies:
            triples = np.array(self._copies, np.int32)
            copies = triples[row_state[triples[:, 0]] == RowState.LIVE, 1:]
            self._copies = []
        swap_out = np.concatenate(self._swap_out) if self._swap_out else NO_PAIRS
        swap_in = np.concatenate(self._swap_in) if self._swap_in else NO_PAIRS
        if self._swap_out or self._swap_in:
            self._swap_out, self._swap_in = [], []
        return delta, copies, swap_out, swap_in
