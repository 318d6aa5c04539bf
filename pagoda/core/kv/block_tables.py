"""BlockTables: which blocks each row holds, as numpy columns, and what the step being planned does to them.

BlockAllocator alone writes the columns.
"""

from dataclasses import dataclass, field

import numpy as np

from pagoda.core.kv.sizing import KVGroup
from pagoda.core.scheduler_output import NO_INTS, NO_PAIRS, BlockDelta

_Entries = tuple[np.ndarray, int, np.ndarray, np.ndarray]  # rows, group, index, block ids


@dataclass(frozen=True, slots=True, eq=False)
class StepMoves:
    """The block moves of one step. Swaps and copies are int32 [k, 2] (source, destination), as in SchedulerOutput."""

    block_delta: BlockDelta = field(default_factory=BlockDelta)
    copies: np.ndarray = field(default_factory=lambda: NO_PAIRS)
    swap_out: np.ndarray = field(default_factory=lambda: NO_PAIRS)
    swap_in: np.ndarray = field(default_factory=lambda: NO_PAIRS)


NO_MOVES = StepMoves(BlockDelta(NO_INTS, NO_INTS, NO_INTS, NO_INTS), NO_PAIRS, NO_PAIRS, NO_PAIRS)


class BlockTables:
    """The KV columns, one row per running sequence. (`num_cached` is next to the prefix cache, in CachedContent.)

    entries: per KV group, int32 [rows, max blocks]; 0 is the null block.
    num_blocks: int32 [rows], entries used in the tables of the groups that grow (they grow together).
    num_cross_blocks: int32 [rows], entries used in those that do not.
    num_released: per KV group, int32 [rows], leading blocks freed because the window has left them.
    reserved_until: int32 [rows]: while a step ends at or below this position, the row needs nothing from the KV
        manager: no block, no copy, nothing to free. Steps without events compare this column and look no further.
    copies: (row, source, target), copy-on-write, of the step being planned.
    """

    def __init__(self, groups: tuple[KVGroup, ...], max_rows: int, max_blocks: int) -> None:
        self.groups = groups
        self.entries = [np.zeros((max_rows, max_blocks if group.grows else 0), np.int32) for group in groups]
        self.num_blocks = np.zeros(max_rows, np.int32)
        self.num_cross_blocks = np.zeros(max_rows, np.int32)
        self.num_released = [np.zeros(max_rows, np.int32) for _ in groups]
        self.reserved_until = np.zeros(max_rows, np.int32)
        self.copies: list[tuple[int, int, int]] = []
        self._entries: list[_Entries] = []
        self._swap_out: list[np.ndarray] = []
        self._swap_in: list[np.ndarray] = []

    def num_used(self, row: int, group: KVGroup) -> int:
        """Entries in use in the row's table of `group`."""
        return int(self.num_blocks[row] if group.grows else self.num_cross_blocks[row])

    def of(self, row: int) -> tuple[np.ndarray, ...]:
        """Return a copy of the row's table per group, used entries only."""
        return tuple(
            entries[row, : self.num_used(row, group)].copy()
            for group, entries in zip(self.groups, self.entries, strict=True)
        )

    def num_common_blocks(self, group: KVGroup, rows: np.ndarray, ref_count: np.ndarray, most: int) -> int:
        """Leading blocks, `most` at most, that all of `rows` (two at least) hold in common.

        Those are exactly the blocks with one reference per row.
        """
        entries = self.entries[group.index]
        first = entries[rows[0], : min(self.num_used(int(rows[0]), group), most)]
        shared_by_all = (ref_count[first] == len(rows)) & (first != 0)
        if not len(first) or not shared_by_all[0]:
            return 0
        count = len(first) if shared_by_all.all() else int(np.argmin(shared_by_all))
        return int((entries[rows, :count] == first[:count]).all(axis=0).sum())

    # The step being planned

    def note_entries(self, rows: np.ndarray, group: int, index: np.ndarray, block_ids: np.ndarray) -> None:
        """table[group][rows, index] = block_ids."""
        self._entries.append((rows, group, index, block_ids))

    def note_copy(self, row: int, group: int, index: int, source: int, target: int) -> None:
        """Entry `index` of the row's table changes from `source` to `target`, whose content comes from `source`."""
        self.copies.append((row, source, target))
        self.note_entries(np.array([row], np.int32), group, np.array([index], np.int32), np.array([target], np.int32))

    def note_swap_out(self, pairs: np.ndarray) -> None:
        self._swap_out.append(pairs)

    def note_swap_in(self, pairs: np.ndarray) -> None:
        self._swap_in.append(pairs)

    def remove_row(self, row: int) -> None:
        """The row left the table while the step was planned: nothing is set or copied for it any more."""
        if self._entries:
            self._entries = [entry for one in self._entries if (entry := _without(one, row)) is not None]
        if self.copies:
            self.copies = [copy for copy in self.copies if copy[0] != row]

    def sources_of(self, rows: set[int]) -> dict[int, int]:
        """Return the copies of this step that `rows` wait for, target -> source. Swap-outs run before them."""
        return {target: source for row, source, target in self.copies if row in rows}

    def drain_moves(self) -> StepMoves:
        """Return the moves of the step; the next one starts empty."""
        entries, copies, swap_out, swap_in = self._entries, self.copies, self._swap_out, self._swap_in
        if not (entries or copies or swap_out or swap_in):
            return NO_MOVES
        self._entries, self.copies, self._swap_out, self._swap_in = [], [], [], []
        return StepMoves(
            _merge(entries) if entries else NO_MOVES.block_delta,
            np.array(copies, np.int32)[:, 1:] if copies else NO_PAIRS,
            np.concatenate(swap_out) if swap_out else NO_PAIRS,
            np.concatenate(swap_in) if swap_in else NO_PAIRS,
        )


def _merge(entries: list[_Entries]) -> BlockDelta:
    groups = np.array([entry[1] for entry in entries], np.int32)
    return BlockDelta(
        np.concatenate([entry[0] for entry in entries]),
        np.repeat(groups, [len(entry[0]) for entry in entries]),
        np.concatenate([entry[2] for entry in entries]),
        np.concatenate([entry[3] for entry in entries]),
    )


def _without(entry: _Entries, row: int) -> _Entries | None:
    rows, group, index, block_ids = entry
    keep = rows != row
    if keep.all():
        return entry
    return (rows[keep], group, index[keep], block_ids[keep]) if keep.any() else None
