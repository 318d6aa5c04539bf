"""KVCacheManager: gives blocks to rows and takes them back. The only one that touches pools and block tables."""

import numpy as np

from pagoda.core.block_moves import BlockMoves
from pagoda.core.block_pool import BlockPool
from pagoda.core.kv_content import Hit, KVContent
from pagoda.core.kv_groups import blocks_for, make_groups
from pagoda.core.kv_specs import KVGroupSpec
from pagoda.core.request_table import RequestTable


class KVCacheManager:
    """One device pool below the tables of all KV groups.

    A row's table is grown by `grow` (whole batches, numpy) or `grow_one` (one row, plain Python; the definition). Both
    first give back what fell behind a window, then copy a shared tail block that is about to be written, then take
    new blocks.
    """

    def __init__(
        self,
        table: RequestTable,
        specs: tuple[KVGroupSpec, ...],
        *,
        block_size: int,
        num_blocks: int,
        max_model_len: int,
        num_lookahead_slots: int,
        max_in_flight_tokens: int,
        enable_prefix_caching: bool,
        prefix_hash_seed: int | None,
    ) -> None:
        self.table = table
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.num_lookahead_slots = num_lookahead_slots
        self.groups = make_groups(specs, block_size, max_in_flight_tokens, max_model_len)
        self.growing = tuple(group for group in self.groups if group.grows)
        self.windows = tuple(group for group in self.groups if group.is_window)
        self.cross = tuple(group for group in self.groups if not group.grows)
        self.pool = BlockPool(num_blocks)
        self.moves = BlockMoves()
        self.content = KVContent(
            table,
            self.growing,
            len(specs),
            self.pool,
            block_size,
            enable_prefix_caching and not self.cross,
            prefix_hash_seed,
        )
        self._shared_tails: set[int] = set()  # rows whose next write may fall into a block that others reference

    # Counting

    def blocks_to_admit(self, num_tokens: int, hit: Hit, encoder_len: int, capped: bool = False) -> int:
        """Free blocks it takes to hold `num_tokens` tokens behind `hit`; hit blocks that lie free count too."""
        need = 0
        for group in self.groups:
            if not group.grows:
                need += blocks_for(encoder_len, self.block_size)
                continue
            blocks = hit.blocks[group.index]
            passed = group.num_passed_blocks(hit.num_tokens)
            need += max(group.num_required(num_tokens, capped) - max(passed, len(blocks)), 0)
            held = [block for block in blocks[passed:] if block]
            if held:
                need += int(np.count_nonzero(self.pool.ref_count[held] == 0))
        return need

    def blocks_when_alone(self, num_tokens: int, encoder_len: int) -> int:
        """Blocks that so many tokens and the lookahead hold in an empty pool: more than there are means never."""
        end = min(num_tokens + self.num_lookahead_slots, self.max_model_len)
        return self.blocks_to_admit(end, self.content.no_hit, encoder_len, capped=True)

    def blocks_to_grow(self, rows: np.ndarray, ends: np.ndarray) -> int:
        """Most free blocks it takes for rows to hold tokens up to `ends`, copies included, nothing given back."""
        target = np.minimum(ends + self.num_lookahead_slots, self.max_model_len)
        missing = -(-target // self.block_size) - self.table.num_blocks[rows]
        need = int(np.maximum(missing, 0).sum())
        if self._shared_tails:
            need += len(self._shared_tails.intersection(rows.tolist()))
        return need * len(self.growing)

    # Growing

    def place(self, row: int, hit: Hit, num_tokens: int, encoder_len: int) -> None:
        """First blocks of an empty row: those of `hit`, then new ones for `num_tokens` tokens and the lookahead."""
        for group in self.growing:
            blocks = np.array(hit.blocks[group.index], np.int32)
            passed = min(group.num_passed_blocks(hit.num_tokens), len(blocks))
            blocks[:passed] = 0
            self.table.block_table[group.index][row, : len(blocks)] = blocks
            self.table.num_released[group.index][row] = passed
            self.pool.hold(blocks[blocks != 0])
        self.table.num_blocks[row] = self.table.num_registered[row] = hit.num_tokens // self.block_size
        for group in self.cross:
            count = blocks_for(encoder_len, self.block_size)
            self.table.widen_cross(group.index, count)
            self.table.block_table[group.index][row, :count] = self._take(count)
            self.table.num_cross_blocks[row] = count
        self._append(row, num_tokens, note=False)

    def grow_one(self, row: int, end: int) -> bool:
        """Make room for the row's tokens up to `end`, or do nothing but give back window blocks, and say False."""
        self._give_back_passed(row)
        target = min(end + self.num_lookahead_slots, self.max_model_len)
        missing = max(blocks_for(target, self.block_size) - int(self.table.num_blocks[row]), 0)
        shared = self._shared_tail_groups(row)
        if missing * len(self.growing) + len(shared) > self.pool.num_free:
            return False
        for group, index in shared:
            self._copy_on_write(row, group, index)
        self._shared_tails.discard(row)
        self._append(row, end, note=True)
        return True

    def grow(self, rows: np.ndarray, ends: np.ndarray) -> None:
        """`grow_one` for many rows at once. The caller has made sure that `blocks_to_grow` are free."""
        table = self.table
        if self.windows:
            for row in rows.tolist():
                self._give_back_passed(row)
        if self._shared_tails:
            for row in self._shared_tails.intersection(rows.tolist()):
                for group, index in self._shared_tail_groups(row):
                    self._copy_on_write(row, group, index)
                self._shared_tails.discard(row)
        target = np.minimum(ends + self.num_lookahead_slots, self.max_model_len)
        have = table.num_blocks[rows]
        missing = np.maximum(-(-target // self.block_size) - have, 0)
        total = int(missing.sum())
        if total:
            if total == len(rows) and missing.max() == 1:
                where, index = rows, have
            else:
                where = np.repeat(rows, missing)
                first = np.cumsum(missing) - missing
                index = np.repeat(have - first, missing) + np.arange(total)
            taken = self._take(total * len(self.growing))
            where, index = where.astype(np.int32), index.astype(np.int32)
            for nth, group in enumerate(self.growing):
                block_ids = taken[nth * total : (nth + 1) * total]
                table.block_table[group.index][where, index] = block_ids
                self.moves.set_entries(where, group.index, index, block_ids)
            table.num_blocks[rows] = have + missing
        self._set_attention(rows)

    def _append(self, row: int, end: int, *, note: bool) -> None:
        """New blocks at the end of one row's tables; `note` them for workers that know the row."""
        target = min(end + self.num_lookahead_slots, self.max_model_len)
        have, want = int(self.table.num_blocks[row]), blocks_for(target, self.block_size)
        if want > have:
            for group in self.growing:
                taken = self._take(want - have)
                self.table.block_table[group.index][row, have:want] = taken
                if note:
                    index = np.arange(have, want, dtype=np.int32)
                    self.moves.set_entries(np.full(want - have, row, np.int32), group.index, index, taken)
            self.table.num_blocks[row] = want
        self._set_attention(np.array([row]))

    def _take(self, count: int) -> np.ndarray:
        taken, evicted = self.pool.take(count)
        if len(evicted):
            self.content.prefix.forget(evicted.tolist())
        return taken

    def _set_attention(self, rows: np.ndarray) -> None:
        """Up to where `rows` can go on without the manager."""
        at = self.table.num_blocks[rows] * self.block_size - self.num_lookahead_slots
        for group in self.windows:
            at = np.minimum(at, group.passes_next_at(self.table.num_released[group.index][rows]))
        self.table.attention_at[rows] = at

    def _give_back_passed(self, row: int) -> None:
        """Free the blocks that fell behind a window, counted on what is home: steps in flight read the others."""
        done = int(self.table.num_computed[row] - self.table.num_in_flight[row])
        for group in self.windows:
            released = self.table.num_released[group.index]
            first, last = int(released[row]), min(group.num_passed_blocks(done), int(self.table.num_blocks[row]))
            if last > first:
                self.content.register(row, done)  # while it can still be found
                entries = self.table.block_table[group.index][row, first:last]
                self.pool.release(entries[entries != 0][::-1])
                entries[:] = 0
                released[row] = last

    # Sharing between branches

    def share(self, source: int, row: int, num_tokens: int) -> None:
        """`row` (fresh, or a fork of `source`) references the blocks of the first `num_tokens` tokens of `source`."""
        count = blocks_for(num_tokens, self.block_size)
        for group in self.growing:
            entries = self.table.block_table[group.index]
            entries[row, :count] = entries[source, :count]
            entries[row, count:] = 0
            self.pool.hold(entries[row, :count][entries[row, :count] != 0])
            self.table.num_released[group.index][row] = min(int(self.table.num_released[group.index][source]), count)
        for group in self.cross:
            held = int(self.table.num_cross_blocks[source])
            entries = self.table.block_table[group.index]
            entries[row, :held] = entries[source, :held]
            self.pool.hold(entries[row, :held])
            self.table.num_cross_blocks[row] = held
        self.table.num_blocks[row] = count
        self.table.num_registered[row] = min(int(self.table.num_registered[source]), num_tokens // self.block_size)
        self._set_attention(np.array([row]))
        if num_tokens % self.block_size:
            for sharer in (source, row):
                self._shared_tails.add(sharer)
                self.table.attention_at[sharer] = -1

    def _shared_tail_groups(self, row: int) -> list[tuple[int, int]]:
        """(group, table index) of the partly filled block the row writes next, where others reference it."""
        if row not in self._shared_tails:
            return []
        index = int(self.table.num_computed[row]) // self.block_size
        tables = self.table.block_table
        return [
            (group.index, index) for group in self.growing if self.pool.ref_count[tables[group.index][row, index]] > 1
        ]

    def _copy_on_write(self, row: int, group: int, index: int) -> None:
        source = int(self.table.block_table[group][row, index])
        target = int(self._take(1)[0])
        self.table.block_table[group][row, index] = target
        self.pool.release(np.array([source], np.int32))
        self.moves.copy(row, group, index, source, target)

    # Return from the host

    def grow_swapped_in(self, row: int, end: int) -> None:
        """Slots for a row whose tables reach the workers whole."""
        for group, index in self._shared_tail_groups(row):
            self._copy_on_write(row, group, index)
        self._shared_tails.discard(row)
        self._append(row, end, note=False)

    def take_for_return(self, counts: np.ndarray) -> np.ndarray:
        """New blocks with `counts[i]` references each."""
        taken = self._take(len(counts))
        self.pool.ref_count[taken] = counts
        return taken

    def resume_row(self, row: int, tail_is_shared: bool) -> None:
        """The row's tables were filled from outside."""
        self._set_attention(np.array([row]))
        if tail_is_shared:
            self._shared_tails.add(row)
            self.table.attention_at[row] = -1

    def release(self, row: int) -> None:
        """Take every block from the row, tail first."""
        for group, entries in zip(self.groups, self.table.block_table, strict=True):
            count = self.table.num_blocks[row] if group.grows else self.table.num_cross_blocks[row]
            blocks = entries[row, :count]
            self.pool.release(blocks[blocks != 0][::-1])
        self.table.num_blocks[row] = self.table.num_cross_blocks[row] = 0
        self._shared_tails.discard(row)
