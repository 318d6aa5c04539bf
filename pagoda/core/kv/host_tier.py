"""HostTier: keeps the KV of whole requests in host memory and brings it back."""

from collections.abc import Iterable

import numpy as np

from pagoda.base.errors import InvariantBroken
from pagoda.core.kv.block_pool import BlockPool
from pagoda.core.kv.block_tables import BlockTables
from pagoda.core.kv.sizing import KVSizing, blocks_for
from pagoda.core.request import Sequence
from pagoda.core.request_table import RequestTable
from pagoda.core.scheduler_output import NO_PAIRS

_HostEntries = tuple[np.ndarray, np.ndarray]  # of one KV group, int32 each: table indices, the blocks there


class HostTier:
    """Moves block references between the device pool and a host pool, and notes the copies that workers must make.

    pool: of the host. Its block ids start at 0.
    A block that several sequences share is moved once, and is shared again on return.
    """

    def __init__(self, table: RequestTable, tables: BlockTables, sizing: KVSizing, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, first_id=0)
        self._table = table
        self._tables = tables
        self._sizing = sizing
        self._moves_out = self._moves_in = NO_PAIRS  # of the step being planned
        self._swapped: dict[Sequence, tuple[_HostEntries, ...]] = {}

    def _in_use(self, row: int) -> list[_HostEntries]:
        """Per KV group: (table indices, device blocks) that hold computed tokens of the row."""
        tables, used = self._tables, list[_HostEntries]()
        computed = blocks_for(int(self._table.num_computed[row]), self._sizing.block_size)
        for group, entries in zip(tables.groups, tables.entries, strict=True):
            count = computed if group.grows else int(tables.num_cross_blocks[row])
            index = np.flatnonzero(entries[row, :count]).astype(np.int32)
            used.append((index, entries[row, index]))
        return used

    def blocks_to_swap_out(self, rows: list[int]) -> int:
        """Host blocks that these rows would take: distinct ones that hold computed tokens."""
        return len({block for row in rows for _, blocks in self._in_use(row) for block in blocks.tolist()})

    def swap_out(self, sequences: list[Sequence]) -> int:
        """Move the KV of sibling sequences to the host. Their rows lose all device blocks. Return how many move."""
        rows = [sequence.row for sequence in sequences]
        used = [self._in_use(row) for row in rows]
        device = np.concatenate([blocks for row_used in used for _, blocks in row_used])
        unique, order, inverse, counts = _distinct(device)
        host, _ = self.pool.allocate(len(unique))
        host[order] = np.sort(host)
        self.pool.add_references(host, counts - 1)
        # A copy-on-write of this very step has not happened when swap-outs run: its source still has the content.
        copied_from = self._tables.sources_of(set(rows))
        sources = np.array([copied_from.get(block, block) for block in unique.tolist()], np.int32)
        self._moves_out = np.concatenate((self._moves_out, np.stack((sources[order], host[order]), axis=1)))
        for sequence, swapped in zip(sequences, _replaced(used, host[inverse]), strict=True):
            self._swapped[sequence] = swapped
            self._tables.free_row(sequence.row)
        return len(unique)

    def blocks_to_swap_in(self, sequences: list[Sequence], ends: list[int]) -> int:
        """Free device blocks needed to bring `sequences` back, with their tokens up to `ends` and the lookahead."""
        need = len(np.unique(self.blocks_of(sequences)))
        for sequence, end in zip(sequences, ends, strict=True):
            want = blocks_for(self._sizing.slots_up_to(end), self._sizing.block_size)
            for (
                group
            ) in self._tables.growing:  # it may have a block after its last token: what was in flight is not kept
                index, _ = self._swapped[sequence][group.index]
                need += max(want - int(index[-1]) - 1, 0) if len(index) else want
        return need + self._num_tail_copies(sequences)

    def _num_tail_copies(self, sequences: list[Sequence]) -> int:
        """Copies of shared tails that `sequences` need: the last one with a reference writes to the block itself."""
        partly = [self._swapped[one] for one in sequences if one.num_computed % self._sizing.block_size]
        tails = [swapped[group.index][1][-1] for swapped in partly for group in self._tables.growing]
        blocks, num_writers = np.unique(np.array(tails, np.int32), return_counts=True)
        return int(np.minimum(num_writers, self.pool.ref_count[blocks] - 1).sum())

    def blocks_of(self, sequences: list[Sequence]) -> np.ndarray:
        """Return the host blocks of sequences that are swapped out; a shared one as often as it is theirs."""
        return np.concatenate([blocks for sequence in sequences for _, blocks in self._swapped[sequence]])

    def swap_in(self, sequences: list[Sequence]) -> int:
        """Bring sibling sequences back into their new rows; the caller checked `blocks_to_swap_in`.

        Return how many blocks move.
        """
        unique, order, inverse, counts = _distinct(self.blocks_of(sequences))
        device = self._tables.allocate(len(unique))
        self._tables.pool.add_references(device, counts - 1)
        self._moves_in = np.concatenate((self._moves_in, np.stack((unique[order], device[order]), axis=1)))
        swapped = [self._swapped[sequence] for sequence in sequences]
        for sequence, parts in zip(sequences, _replaced(swapped, device[inverse]), strict=True):
            self._tables.restore(sequence.row, parts, has_tail=sequence.num_computed % self._sizing.block_size != 0)
            self.drop(sequence)
        return len(unique)

    def take_moves(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the blocks that move out and in with the step that is planned, int32 [k, 2]; the next starts empty."""
        moves = self._moves_out, self._moves_in
        self._moves_out = self._moves_in = NO_PAIRS
        return moves

    def drop(self, sequence: Sequence) -> None:
        """Free the host blocks of a sequence, if it has any."""
        for _, blocks in self._swapped.pop(sequence, ()):
            self.pool.free(blocks[::-1])

    def check(self) -> None:
        """Check the pool, and that its counts equal the swapped references. Raises InvariantBroken."""
        self.pool.check()
        counted = np.zeros(len(self.pool.ref_count), np.int64)
        for sequence, swapped in self._swapped.items():
            for _, blocks in swapped:
                np.add.at(counted, blocks, 1)
            if sequence.is_finished or sequence.row >= 0:
                raise InvariantBroken(
                    f"{sequence.request.spec.request_id}: a sequence that is not swapped out has host blocks"
                )
        if (counted != self.pool.ref_count).any():
            raise InvariantBroken("a host block's reference count is not that of the swapped sequences")


def _distinct(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the distinct blocks, what sorts them in table order, each block's place among them, and their counts."""
    unique, first, inverse, counts = np.unique(blocks, return_index=True, return_inverse=True, return_counts=True)
    return unique, np.argsort(first), inverse, counts


def _replaced(tables: Iterable[Iterable[_HostEntries]], blocks: np.ndarray) -> list[tuple[_HostEntries, ...]]:
    """Return the tables with `blocks` in place of their own, one after the other."""
    rest = iter(np.split(blocks, np.cumsum([len(own) for table in tables for _, own in table])))
    return [tuple((index, next(rest)) for index, _ in table) for table in tables]
