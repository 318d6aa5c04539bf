"""BlockAllocator: gives blocks to rows, shares them between rows, and frees them."""

import numpy as np

from pagoda.base.errors import InvariantBroken
from pagoda.core.kv.block_pool import BlockPool
from pagoda.core.kv.block_tables import BlockTables
from pagoda.core.kv.cached_content import CachedContent, CachedPrefix
from pagoda.core.kv.sizing import KVSizing, blocks_for
from pagoda.core.request_table import RequestTable


class BlockAllocator:
    """One device pool under the tables of all KV groups. The only writer of the tables' columns.

    `extend_rows` (whole batches, numpy) and `extend_row` (one row; the definition) first free what a window has
    left, then copy a shared tail block that is about to be written, then allocate new blocks.

    common_changed: set when a table changed in a way that may shorten the prefix common to all rows.
    """

    def __init__(
        self,
        table: RequestTable,
        tables: BlockTables,
        pool: BlockPool,
        content: CachedContent,
        sizing: KVSizing,
    ) -> None:
        self._table = table
        self._tables = tables
        self._pool = pool
        self._content = content
        self._sizing = sizing
        self._block_size = sizing.block_size
        self.growing = tuple(group for group in sizing.groups if group.grows)
        self.windows = tuple(group for group in sizing.groups if group.is_window)
        self._cross = tuple(group for group in sizing.groups if not group.grows)
        self._shared_tails: set[int] = set()  # rows whose next write may be into a block that others reference
        self.common_changed = True

    # Counting

    def most_blocks_to_extend(self, rows: np.ndarray, ends: np.ndarray) -> int:
        """Most free blocks that `extend_rows` needs, copies included, ignoring what windows would free."""
        need = int(np.maximum(self._missing(rows, ends), 0).sum())
        if self._shared_tails:
            need += len(self._shared_tails.intersection(rows.tolist()))
        return need * len(self.growing)

    def _missing(self, rows: np.ndarray, ends: np.ndarray) -> np.ndarray:
        target = np.minimum(ends + self._sizing.num_lookahead_slots, self._sizing.max_model_len)
        return -(-target // self._block_size) - self._tables.num_blocks[rows]

    # New rows and longer rows

    def fill_row(self, row: int, prefix: CachedPrefix, end: int, encoder_len: int) -> None:
        """Give an empty row its first blocks: those of `prefix`, then new ones for tokens up to `end`."""
        tables = self._tables
        for group in self.growing:
            blocks = np.array(prefix.blocks[group.index], np.int32)
            passed = min(group.num_passed_blocks(prefix.num_tokens), len(blocks))
            blocks[:passed] = 0
            tables.entries[group.index][row, : len(blocks)] = blocks
            tables.num_released[group.index][row] = passed
            self._pool.touch(blocks[blocks != 0])
        tables.num_blocks[row] = prefix.num_tokens // self._block_size
        tables.num_cross_blocks[row] = count = blocks_for(encoder_len, self._block_size) if self._cross else 0
        for group in self._cross:
            self._widen(group.index, count)
            tables.entries[group.index][row, :count] = self.allocate(count)
        self.append(row, end, is_known=False)

    def _widen(self, group: int, num_blocks: int) -> None:
        """Make room for `num_blocks` entries in a cross-attention table (encoders may outrun the model length)."""
        entries = self._tables.entries
        missing = num_blocks - entries[group].shape[1]
        if missing > 0:
            entries[group] = np.pad(entries[group], ((0, 0), (0, missing)))

    def extend_row(self, row: int, end: int) -> bool:
        """Make room for the row's tokens up to `end`.

        Return False if blocks are short; out-of-window blocks are freed either way.
        """
        self._free_passed(row)
        missing = max(
            blocks_for(self._sizing.slots_up_to(end), self._block_size) - int(self._tables.num_blocks[row]), 0
        )
        if missing * len(self.growing) + len(self._shared_tail_groups(row)) > self._pool.num_free:
            return False
        self.unshare_tail(row)
        self.append(row, end, is_known=True)
        return True

    def extend_rows(self, rows: np.ndarray, ends: np.ndarray) -> None:
        """`extend_row` for many rows at once. The caller checked that `most_blocks_to_extend` are free."""
        tables = self._tables
        if self.windows:
            for row in rows.tolist():
                self._free_passed(row)
        if self._shared_tails:
            for row in self._shared_tails.intersection(rows.tolist()):
                self.unshare_tail(row)
        have = tables.num_blocks[rows]
        missing = np.maximum(self._missing(rows, ends), 0)
        total = int(missing.sum())
        if total:
            if total == len(rows) and missing.max() == 1:
                where, index = rows, have
            else:
                where = np.repeat(rows, missing)
                first = np.cumsum(missing) - missing
                index = np.repeat(have - first, missing) + np.arange(total)
            allocated = self.allocate(total * len(self.growing))
            where, index = where.astype(np.int32), index.astype(np.int32)
            for nth, group in enumerate(self.growing):
                block_ids = allocated[nth * total : (nth + 1) * total]
                tables.entries[group.index][where, index] = block_ids
                self._tables.note_entries(where, group.index, index, block_ids)
            tables.num_blocks[rows] = have + missing
        self.reserve(rows)

    def append(self, row: int, end: int, *, is_known: bool) -> None:
        """Allocate new blocks at the end of one row's tables. is_known: workers know the row, and get a delta."""
        tables = self._tables
        have, want = int(tables.num_blocks[row]), blocks_for(self._sizing.slots_up_to(end), self._block_size)
        if want > have:
            for group in self.growing:
                allocated = self.allocate(want - have)
                tables.entries[group.index][row, have:want] = allocated
                if is_known:
                    index = np.arange(have, want, dtype=np.int32)
                    self._tables.note_entries(np.full(want - have, row, np.int32), group.index, index, allocated)
            tables.num_blocks[row] = want
        self.reserve(np.array([row]))

    def allocate(self, count: int) -> np.ndarray:
        """Allocate `count` blocks, int32; what they held is removed from the prefix cache."""
        allocated, evicted = self._pool.allocate(count)
        if len(evicted):
            self._content.prefix_cache.remove(evicted.tolist())
        return allocated

    def reserve(self, rows: np.ndarray) -> None:
        """Note up to where `rows` can continue without the KV manager."""
        tables = self._tables
        until = tables.num_blocks[rows] * self._block_size - self._sizing.num_lookahead_slots
        for group in self.windows:
            until = np.minimum(until, group.next_passed_at(tables.num_released[group.index][rows]))
        tables.reserved_until[rows] = until

    def _free_passed(self, row: int) -> None:
        """Free the blocks that a window has left. Only complete steps count: those in flight read the others."""
        tables = self._tables
        done = int(self._table.num_computed[row] - self._table.num_in_flight[row])
        for group in self.windows:
            released = tables.num_released[group.index]
            first, last = int(released[row]), min(group.num_passed_blocks(done), int(tables.num_blocks[row]))
            if last > first:
                self._content.cache_blocks(row, done)  # while the entries still name the blocks
                entries = tables.entries[group.index][row, first:last]
                self._pool.free(entries[entries != 0][::-1])
                entries[:] = 0
                released[row] = last
                self.common_changed = True

    # Rows that share blocks

    def share(self, source: int, row: int, num_tokens: int) -> None:
        """`row` (fresh, or a fork of `source`) references the blocks of the first `num_tokens` tokens of `source`."""
        tables = self._tables
        count = blocks_for(num_tokens, self._block_size)
        for group in self.growing:
            entries = tables.entries[group.index]
            entries[row, :count] = entries[source, :count]
            entries[row, count:] = 0
            self._pool.touch(entries[row, :count][entries[row, :count] != 0])
            tables.num_released[group.index][row] = min(int(tables.num_released[group.index][source]), count)
        for group in self._cross:
            held = int(tables.num_cross_blocks[source])
            entries = tables.entries[group.index]
            entries[row, :held] = entries[source, :held]
            self._pool.touch(entries[row, :held])
        tables.num_cross_blocks[row] = tables.num_cross_blocks[source]
        tables.num_blocks[row] = count
        self.reserve(np.array([row]))
        if num_tokens % self._block_size:
            self._mark_shared_tail(source)
            self._mark_shared_tail(row)

    def restore(self, row: int, parts: list[tuple[np.ndarray, np.ndarray]], *, tail_is_shared: bool) -> None:
        """Fill an empty row with blocks that hold its content already: per KV group, (table indices, blocks)."""
        tables = self._tables
        tables.num_blocks[row] = tables.num_cross_blocks[row] = 0
        for group, entries, released, (index, blocks) in zip(
            tables.groups, tables.entries, tables.num_released, parts, strict=True
        ):
            first = int(index[0]) if len(index) and group.grows else 0
            entries[row, :first] = 0
            entries[row, index] = blocks
            released[row] = first
            if not group.grows:
                tables.num_cross_blocks[row] = len(index)
            elif len(index):
                tables.num_blocks[row] = max(int(tables.num_blocks[row]), int(index[-1]) + 1)
        self.reserve(np.array([row]))
        if tail_is_shared:
            self._mark_shared_tail(row)

    def _mark_shared_tail(self, row: int) -> None:
        """The partly filled block that the row writes next has other references."""
        self._shared_tails.add(row)
        self._tables.reserved_until[row] = -1

    def unshare_tail(self, row: int) -> None:
        """Copy the block that the row writes next, if other rows still reference it."""
        for group, index in self._shared_tail_groups(row):
            self._copy_on_write(row, group, index)
        self._shared_tails.discard(row)

    def _shared_tail_groups(self, row: int) -> list[tuple[int, int]]:
        """(group, table index) of the partly filled block the row writes next, where others reference it."""
        if row not in self._shared_tails:
            return []
        index = int(self._table.num_computed[row]) // self._block_size
        entries, ref_count = self._tables.entries, self._pool.ref_count
        return [(group.index, index) for group in self.growing if ref_count[entries[group.index][row, index]] > 1]

    def _copy_on_write(self, row: int, group: int, index: int) -> None:
        source = int(self._tables.entries[group][row, index])
        target = int(self.allocate(1)[0])
        self._tables.entries[group][row, index] = target
        self._pool.free(np.array([source], np.int32))
        self._tables.note_copy(row, group, index, source, target)
        self.common_changed = True

    def free_row(self, row: int) -> None:
        """Free every block of the row, tail first."""
        tables = self._tables
        for group, entries in zip(tables.groups, tables.entries, strict=True):
            blocks = entries[row, : tables.num_used(row, group)]
            self._pool.free(blocks[blocks != 0][::-1])
        tables.num_blocks[row] = tables.num_cross_blocks[row] = 0
        self._shared_tails.discard(row)
        self.common_changed = True  # a row may stay, and get other blocks

    # Invariants

    def check(self, rows: np.ndarray) -> None:
        """Check reference counts, and who may write, of the running `rows`. Raises InvariantBroken."""
        self._check_references(rows)
        self._check_writers(rows)

    def _check_references(self, rows: np.ndarray) -> None:
        """Every block's count equals the number of table entries naming it."""
        tables, ref_count = self._tables, self._pool.ref_count
        counted = np.zeros(len(ref_count), np.int64)
        for group, entries in zip(tables.groups, tables.entries, strict=True):
            used = tables.num_blocks[rows] if group.grows else tables.num_cross_blocks[rows]
            held = entries[rows][np.arange(entries.shape[1]) < used[:, None]]
            counted += np.bincount(held, minlength=len(counted))
        counted[0] = 0
        if (counted != ref_count).any():
            block = int(np.flatnonzero(counted != ref_count)[0])
            raise InvariantBroken(
                f"block {block} has {ref_count[block]} references, but {counted[block]} table entries name it"
            )

    def _check_writers(self, rows: np.ndarray) -> None:
        """No row continues to write to a block that others reference without the manager being asked first."""
        tables, num_computed = self._tables, self._table.num_computed[rows]
        tail = num_computed // self._block_size
        inside = (tail < tables.num_blocks[rows]) & (num_computed % self._block_size != 0)
        rows, tail, num_computed = rows[inside], tail[inside], num_computed[inside]
        for group in self.growing:
            shared = self._pool.ref_count[tables.entries[group.index][rows, tail]] > 1
            if (tables.reserved_until[rows[shared]] >= num_computed[shared]).any():
                raise InvariantBroken("a row would write to a block that another row references")
