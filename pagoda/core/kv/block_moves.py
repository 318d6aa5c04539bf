"""BlockMoves: what one step does to block tables and block contents, gathered while the step is planned."""

from dataclasses import dataclass, field

import numpy as np

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


class BlockMoves:
    """Table entries that were set, and block copies, of the step being planned.

    copies: (row, source, target), copy-on-write.
    """

    def __init__(self) -> None:
        self._entries: list[_Entries] = []
        self.copies: list[tuple[int, int, int]] = []
        self._swap_out: list[np.ndarray] = []
        self._swap_in: list[np.ndarray] = []

    def set_entries(self, rows: np.ndarray, group: int, index: np.ndarray, block_ids: np.ndarray) -> None:
        """table[group][rows, index] = block_ids."""
        self._entries.append((rows, group, index, block_ids))

    def copy(self, row: int, group: int, index: int, source: int, target: int) -> None:
        """Entry `index` of the row's table changes from `source` to `target`, whose content comes from `source`."""
        self.copies.append((row, source, target))
        self.set_entries(np.array([row], np.int32), group, np.array([index], np.int32), np.array([target], np.int32))

    def swap_out(self, pairs: np.ndarray) -> None:
        self._swap_out.append(pairs)

    def swap_in(self, pairs: np.ndarray) -> None:
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

    def drain(self) -> StepMoves:
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
