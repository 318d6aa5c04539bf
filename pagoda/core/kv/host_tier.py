"""HostTier: keeps the KV of whole requests in host memory and brings it back."""

from collections.abc import Callable, Iterable

import numpy as np

from pagoda.base.errors import InvariantBroken
from pagoda.core.events import EventStream, Swapped
from pagoda.core.kv.block_pool import NO_BLOCKS, BlockCounts, BlockPools
from pagoda.core.kv.block_tables import BlockTables
from pagoda.core.kv.sizing import KVSizing, blocks_for
from pagoda.core.request import Sequence
from pagoda.core.request_table import RequestTable
from pagoda.core.scheduler_output import NO_PAIRS

_HostEntries = tuple[np.ndarray, np.ndarray]  # of one KV group, int32 each: table indices, the blocks there


class HostTier:
    """Moves block references between device and host pools, and notes the copies that workers must make.

    pools: of the host, as many as of the device. Block ids start at 0.
    A block that several sequences share is moved once, and is shared again on return.
    """

    def __init__(
        self, table: RequestTable, tables: BlockTables, sizing: KVSizing, num_blocks: int, events: EventStream
    ) -> None:
        self.pools = BlockPools(sizing.pool_sizes(num_blocks), first_id=0)
        self._table = table
        self._tables = tables
        self._sizing = sizing
        self._events = events
        self._moves_out = self._moves_in = NO_PAIRS  # of the step being planned
        self._swapped: dict[Sequence, tuple[_HostEntries, ...]] = {}

    def _in_use(self, row: int) -> tuple[_HostEntries, ...]:
        """Per KV group: (table indices, device blocks) that hold computed tokens of the row."""
        tables, used = self._tables, list[_HostEntries]()
        num_computed = int(self._table.num_computed[row])
        for group, entries in zip(tables.groups, tables.entries, strict=True):
            count = blocks_for(num_computed, group.block_size) if group.grows else int(tables.num_cross_blocks[row])
            index = np.flatnonzero(entries[row, :count]).astype(np.int32)
            used.append((index, entries[row, index]))
        return tuple(used)

    def blocks_to_swap_out(self, rows: list[int]) -> BlockCounts:
        """Host blocks that these rows would take: distinct ones that hold computed tokens."""
        return self._tables.pools.count(np.unique(_blocks_of([self._in_use(row) for row in rows])))

    def swap_out(self, sequences: list[Sequence]) -> None:
        """Move the KV of sibling sequences to the host. Their rows lose all device blocks."""
        rows = [sequence.row for sequence in sequences]
        used = [self._in_use(row) for row in rows]
        replaced, moves = _replace(used, self._tables.pools, self.pools, lambda *args: self.pools.allocate(*args)[0])
        # A copy-on-write of this very step has not happened when swap-outs run: its source still has the content.
        copied_from = self._tables.sources_of(set(rows))
        moves[:, 0] = [copied_from.get(block, block) for block in moves[:, 0].tolist()]
        self._moves_out = np.concatenate((self._moves_out, moves))
        for sequence, swapped in zip(sequences, replaced, strict=True):
            self._swapped[sequence] = swapped
            self._tables.free_row(sequence.row)
        self._events.write(Swapped, sequences[0].request.spec, True, len(moves))

    def blocks_to_swap_in(self, sequences: list[Sequence], ends: list[int]) -> BlockCounts:
        """Free device blocks needed to bring `sequences` back, with their tokens up to `ends`."""
        need, tails = list(self.pools.count(np.unique(self.blocks_of(sequences)))), list[int]()
        for sequence, end in zip(sequences, ends, strict=True):
            snapshots = self._sizing.snapshots_of(sequence.request.spec.num_prompt_tokens)
            for group in self._tables.growing:
                index, blocks = self._swapped[sequence][group.index]
                # It may have a block after its last token: what was in flight is not kept.
                have = int(index[-1]) + 1 if len(index) else 0
                need[group.pool] += group.num_new_blocks(have, end, snapshots)
                if sequence.num_computed % group.block_size:
                    tails.append(int(blocks[-1]))
        # Of the sequences that share a tail, the last one with a reference writes to the block itself.
        shared, num_writers = np.unique(np.array(tails, np.int32), return_counts=True)
        num_copies = np.minimum(num_writers, self.pools.ref_count[shared] - 1)
        for pool, count in zip(self.pools.pool_of(shared).tolist(), num_copies.tolist(), strict=True):
            need[pool] += count
        return tuple(need)

    def blocks_of(self, sequences: Iterable[Sequence]) -> np.ndarray:
        """Return the host blocks of sequences that are swapped out; a shared one as often as it is theirs."""
        return _blocks_of(self._swapped[sequence] for sequence in sequences)

    def swap_in(self, sequences: list[Sequence]) -> None:
        """Bring sibling sequences back into their new rows; the caller checked `blocks_to_swap_in`."""
        swapped = [self._swapped[sequence] for sequence in sequences]
        replaced, moves = _replace(swapped, self.pools, self._tables.pools, self._tables.allocate)
        self._moves_in = np.concatenate((self._moves_in, moves))
        for sequence, parts in zip(sequences, replaced, strict=True):
            has_tail = sequence.num_computed % self._sizing.block_size != 0
            self._tables.restore(sequence.row, parts, has_tail=has_tail)
            self.drop(sequence)
        self._events.write(Swapped, sequences[0].request.spec, False, len(moves))

    def take_moves(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the blocks that move out and in with the step that is planned, int32 [k, 2]; the next starts empty."""
        moves = self._moves_out, self._moves_in
        self._moves_out = self._moves_in = NO_PAIRS
        return moves

    def drop(self, sequence: Sequence) -> None:
        """Free the host blocks of a sequence, if it has any."""
        for _, blocks in self._swapped.pop(sequence, ()):
            self.pools.free(blocks[::-1])

    def check(self) -> None:
        """Check the pools, and that their counts equal the swapped references. Raises InvariantBroken."""
        for sequence in self._swapped:
            if sequence.is_finished or sequence.row >= 0:
                raise InvariantBroken(
                    f"{sequence.request.spec.request_id}: a sequence that is not swapped out has host blocks"
                )
        self.pools.check()
        counted = np.bincount(self.blocks_of(self._swapped), minlength=len(self.pools.ref_count))
        if (counted != self.pools.ref_count).any():
            raise InvariantBroken("a host block's reference count is not that of the swapped sequences")


def _blocks_of(tables: Iterable[Iterable[_HostEntries]]) -> np.ndarray:
    """Return all blocks in these tables; a shared one as often as it is there."""
    return np.concatenate([NO_BLOCKS, *(blocks for table in tables for _, blocks in table)])


def _replace(
    tables: list[tuple[_HostEntries, ...]],
    source: BlockPools,
    target: BlockPools,
    allocate: Callable[[int, int], np.ndarray],
) -> tuple[list[tuple[_HostEntries, ...]], np.ndarray]:
    """Return the tables with new blocks of `target` in place of those of `source`, which are shared as those were.

    The second is int32 [k, 2]: each block that was replaced, and its new one.   allocate: blocks of a pool of `target`.
    """
    unique, first, inverse, counts = np.unique(
        _blocks_of(tables), return_index=True, return_inverse=True, return_counts=True
    )
    order = np.argsort(first)  # so that blocks ascend in the tables
    pools, new = source.pool_of(unique[order]), np.empty(len(unique), np.int32)
    for pool, count in enumerate(source.count(unique)):
        new[order[pools == pool]] = np.sort(allocate(pool, count))
    target.add_references(new, counts - 1)
    sizes = [len(index) for table in tables for index, _ in table]
    parts = iter(np.split(new[inverse], np.cumsum(sizes)[:-1]))
    replaced = [tuple([(index, next(parts)) for index, _ in table]) for table in tables]
    return replaced, np.stack((unique[order], new[order]), axis=1)
