"""HostTier: keeps the KV of whole requests in host memory and brings it back."""

from collections.abc import Iterable

import numpy as np

from pagoda.base.errors import InvariantBroken
from pagoda.core.kv.block_pool import NO_BLOCKS, BlockPool
from pagoda.core.kv.block_tables import BlockTables
from pagoda.core.kv.sizing import BlockCounts, KVSizing, blocks_for
from pagoda.core.request import Sequence
from pagoda.core.request_table import RequestTable
from pagoda.core.scheduler_output import NO_PAIRS

_HostEntries = tuple[np.ndarray, np.ndarray]  # of one KV group, int32 each: table indices, the blocks there


class HostTier:
    """Moves block references between device and host pools, and notes the copies that workers must make.

    pools: of the host, one per device pool. Block ids start at 0.
    A block that several sequences share is moved once, and is shared again on return.
    """

    def __init__(self, table: RequestTable, tables: BlockTables, sizing: KVSizing, num_blocks: int) -> None:
        self.pools = make_pools(sizing, num_blocks, first_id=0)
        self._table = table
        self._tables = tables
        self._sizing = sizing
        self._moves_out = self._moves_in = NO_PAIRS  # of the step being planned
        self._swapped: dict[Sequence, tuple[_HostEntries, ...]] = {}

    def _in_use(self, row: int) -> list[_HostEntries]:
        """Per KV group: (table indices, device blocks) that hold computed tokens of the row."""
        tables, used = self._tables, list[_HostEntries]()
        num_computed = int(self._table.num_computed[row])
        for group, entries in zip(tables.groups, tables.entries, strict=True):
            count = blocks_for(num_computed, group.block_size) if group.grows else int(tables.num_cross_blocks[row])
            index = np.flatnonzero(entries[row, :count]).astype(np.int32)
            used.append((index, entries[row, index]))
        return used

    def num_free(self) -> BlockCounts:
        """Return how many blocks each host pool can give."""
        return tuple(pool.num_free for pool in self.pools)

    def blocks_to_swap_out(self, rows: list[int]) -> BlockCounts:
        """Host blocks that these rows would take: distinct ones that hold computed tokens."""
        used = [self._in_use(row) for row in rows]
        return tuple(len(np.unique(blocks)) for blocks in self._by_pool(used))

    def _by_pool(self, tables: Iterable[Iterable[_HostEntries]]) -> list[np.ndarray]:
        """Return the blocks of each pool in these tables; a shared one as often as it is there."""
        found: list[list[np.ndarray]] = [[NO_BLOCKS] for _ in self.pools]
        for table in tables:
            for group, (_, blocks) in zip(self._sizing.groups, table, strict=True):
                found[group.pool].append(blocks)
        return [np.concatenate(blocks) for blocks in found]

    def swap_out(self, sequences: list[Sequence]) -> int:
        """Move the KV of sibling sequences to the host. Their rows lose all device blocks. Return how many move."""
        rows = [sequence.row for sequence in sequences]
        used = [self._in_use(row) for row in rows]
        # A copy-on-write of this very step has not happened when swap-outs run: its source still has the content.
        copied_from = self._tables.sources_of(set(rows))
        replaced, num_moved = list[np.ndarray](), 0
        for pool, device in zip(self.pools, self._by_pool(used), strict=True):
            unique, order, inverse, counts = _distinct(device)
            host, _ = pool.allocate(len(unique))
            host[order] = np.sort(host)
            pool.add_references(host, counts - 1)
            sources = np.array([copied_from.get(block, block) for block in unique.tolist()], np.int32)
            self._moves_out = np.concatenate((self._moves_out, np.stack((sources[order], host[order]), axis=1)))
            replaced.append(host[inverse])
            num_moved += len(unique)
        for sequence, swapped in zip(sequences, self._replaced(used, replaced), strict=True):
            self._swapped[sequence] = swapped
            self._tables.free_row(sequence.row)
        return num_moved

    def blocks_to_swap_in(self, sequences: list[Sequence], ends: list[int]) -> BlockCounts:
        """Free device blocks needed to bring `sequences` back, with their tokens up to `ends`."""
        need = [len(np.unique(blocks)) for blocks in self._by_pool(self._swapped[one] for one in sequences)]
        for sequence, end in zip(sequences, ends, strict=True):
            # It may have a block after its last token: what was in flight is not kept.
            for group in self._tables.growing:
                index, _ = self._swapped[sequence][group.index]
                want = blocks_for(end, group.block_size)
                need[group.pool] += max(want - int(index[-1]) - 1, 0) if len(index) else want
        for pool in range(len(self.pools)):
            need[pool] += self._num_tail_copies(pool, sequences)
        return tuple(need)

    def _num_tail_copies(self, pool: int, sequences: list[Sequence]) -> int:
        """Copies of shared tails that `sequences` need: the last one with a reference writes to the block itself."""
        partly = [self._swapped[one] for one in sequences if one.num_computed % self._sizing.block_sizes[pool]]
        groups = [group for group in self._tables.growing if group.pool == pool]
        tails = [swapped[group.index][1][-1] for swapped in partly for group in groups]
        blocks, num_writers = np.unique(np.array(tails, np.int32), return_counts=True)
        return int(np.minimum(num_writers, self.pools[pool].ref_count[blocks] - 1).sum())

    def blocks_of(self, sequences: list[Sequence]) -> np.ndarray:
        """Return the host blocks of sequences that are swapped out; a shared one as often as it is theirs."""
        return np.concatenate([blocks for sequence in sequences for _, blocks in self._swapped[sequence]])

    def swap_in(self, sequences: list[Sequence]) -> int:
        """Bring sibling sequences back into their new rows; the caller checked `blocks_to_swap_in`.

        Return how many blocks move.
        """
        swapped, replaced, num_moved = [self._swapped[one] for one in sequences], list[np.ndarray](), 0
        for pool, blocks in enumerate(self._by_pool(swapped)):
            unique, order, inverse, counts = _distinct(blocks)
            device = self._tables.allocate(pool, len(unique))
            self._tables.pools[pool].add_references(device, counts - 1)
            self._moves_in = np.concatenate((self._moves_in, np.stack((unique[order], device[order]), axis=1)))
            replaced.append(device[inverse])
            num_moved += len(unique)
        for sequence, parts in zip(sequences, self._replaced(swapped, replaced), strict=True):
            has_tail = sequence.num_computed % self._sizing.shared_size != 0
            self._tables.restore(sequence.row, parts, has_tail=has_tail)
            self.drop(sequence)
        return num_moved

    def _replaced(
        self, tables: Iterable[Iterable[_HostEntries]], blocks: list[np.ndarray]
    ) -> list[tuple[_HostEntries, ...]]:
        """Return the tables with `blocks`, per pool in the order of `_by_pool`, in place of their own."""
        first, replaced = [0] * len(self.pools), list[tuple[_HostEntries, ...]]()
        for table in tables:
            changed: list[_HostEntries] = []
            for group, (index, _) in zip(self._sizing.groups, table, strict=True):
                begin = first[group.pool]
                first[group.pool] = end = begin + len(index)
                changed.append((index, blocks[group.pool][begin:end]))
            replaced.append(tuple(changed))
        return replaced

    def take_moves(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the blocks that move out and in with the step that is planned, int32 [k, 2]; the next starts empty."""
        moves = self._moves_out, self._moves_in
        self._moves_out = self._moves_in = NO_PAIRS
        return moves

    def drop(self, sequence: Sequence) -> None:
        """Free the host blocks of a sequence, if it has any."""
        for group, (_, blocks) in zip(self._sizing.groups, self._swapped.pop(sequence, ()), strict=False):
            self.pools[group.pool].free(blocks[::-1])

    def check(self) -> None:
        """Check the pools, and that their counts equal the swapped references. Raises InvariantBroken."""
        for sequence in self._swapped:
            if sequence.is_finished or sequence.row >= 0:
                raise InvariantBroken(
                    f"{sequence.request.spec.request_id}: a sequence that is not swapped out has host blocks"
                )
        for pool, blocks in zip(self.pools, self._by_pool(self._swapped.values()), strict=True):
            pool.check()
            if (np.bincount(blocks, minlength=len(pool.ref_count)) != pool.ref_count).any():
                raise InvariantBroken("a host block's reference count is not that of the swapped sequences")


def make_pools(sizing: KVSizing, num_blocks: int, first_id: int) -> tuple[BlockPool, ...]:
    """Return a pool for each kind of block; the first has `num_blocks`. No two have a block id in common."""
    pools: list[BlockPool] = []
    for count in sizing.pool_sizes(num_blocks):
        pools.append(BlockPool(count, first_id))
        first_id += count
    return tuple(pools)


def _distinct(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the distinct blocks, what sorts them in table order, each block's place among them, and their counts."""
    unique, first, inverse, counts = np.unique(blocks, return_index=True, return_inverse=True, return_counts=True)
    return unique, np.argsort(first), inverse, counts
