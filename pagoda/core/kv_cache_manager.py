"""KVCacheManager: gives blocks to rows and takes them back. The only one that touches pools and block tables."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from pagoda.core.block_moves import BlockMoves
from pagoda.core.block_pool import BlockPool
from pagoda.core.kv_groups import blocks_for, make_groups
from pagoda.core.kv_specs import KVGroupSpec
from pagoda.core.prefix_cache import HashChain, PrefixCache, make_root
from pagoda.core.request_table import Branch, RequestTable


@dataclass(frozen=True, slots=True)
class Hit:
    """What the prefix cache has of a sequence: `num_tokens` tokens, in `blocks` (per KV group; 0: not needed any more)."""

    num_tokens: int
    blocks: tuple[list[int], ...]


class KVCacheManager:
    """One device pool below the tables of all KV groups.

    A row's table is grown by `grow` (whole batches, numpy) or `grow_one` (one row, plain Python; the definition). Both first give
    back what fell behind a window, then copy a shared tail block that is about to be written, then take new blocks.
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
        self.caching = enable_prefix_caching and not self.cross
        self.prefix = PrefixCache(len(specs), prefix_hash_seed, self._note_content)
        self.no_hit = Hit(0, tuple([] for _ in specs))
        self._shared_tails: set[int] = set()  # rows whose next write may fall into a block that others reference

    def _note_content(self, blocks: Iterable[int]) -> None:
        self.pool.has_content[blocks] = True

    # Prefix hits

    def extend_chain(self, branch: Branch) -> None:
        """Name the full blocks of the branch's known tokens (of a branch without a row)."""
        if branch.chain is None:
            request = branch.live.request
            root = make_root(self.prefix.seed, request.lora, request.cache_salt)
            branch.chain = HashChain(root, self.block_size, request.media)
        branch.chain.extend(branch.token_ids, len(branch.token_ids))

    def lookup(self, branch: Branch) -> Hit:
        """The longest prefix of the branch's tokens, but for the last one, that all groups have cached."""
        if not self.caching:
            return self.no_hit
        self.extend_chain(branch)
        assert branch.chain is not None
        names = branch.chain.names[: (len(branch.token_ids) - 1) // self.block_size]
        found: list[list[int]] = [[] for _ in self.groups]
        for group in self.growing:
            if not group.is_window:
                found[group.index] = self.prefix.first_misses(group.index, names)
                names = names[: len(found[group.index])]
        before = -1
        while self.windows and before != len(names):  # a window may shorten what another one agreed to
            before = len(names)
            for group in self.windows:
                found[group.index] = self.prefix.last_run(group.index, names, group.num_hit_blocks)
                names = names[: len(found[group.index])]
        return Hit(len(names) * self.block_size, tuple(blocks[: len(names)] for blocks in found))

    # Counting

    def blocks_to_admit(self, num_tokens: int, hit: Hit, encoder_len: int, capped: bool = False) -> int:
        """Free blocks it takes to hold `num_tokens` tokens behind `hit`. Hit blocks that lie in the free queue count too."""
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
        """Blocks that `num_tokens` tokens and the lookahead hold in an empty pool: more than the pool has means never."""
        end = min(num_tokens + self.num_lookahead_slots, self.max_model_len)
        return self.blocks_to_admit(end, self.no_hit, encoder_len, capped=True)

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
        """First blocks of an empty row: those of `hit`, then new ones for `num_tokens` tokens and the lookahead slots."""
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
            self.prefix.forget(evicted.tolist())
        return taken

    def _set_attention(self, rows: np.ndarray) -> None:
        """Up to where `rows` can go on without the manager."""
        at = self.table.num_blocks[rows] * self.block_size - self.num_lookahead_slots
        for group in self.windows:
            at = np.minimum(at, group.passes_next_at(self.table.num_released[group.index][rows]))
        self.table.attention_at[rows] = at

    def _give_back_passed(self, row: int) -> None:
        """Free the blocks that fell behind a window, counted on what is home: a step in flight still reads the others."""
        done = int(self.table.num_computed[row] - self.table.num_in_flight[row])
        for group in self.windows:
            released = self.table.num_released[group.index]
            first, last = int(released[row]), min(group.num_passed_blocks(done), int(self.table.num_blocks[row]))
            if last > first:
                self.register(row, done)  # while it can still be found
                entries = self.table.block_table[group.index][row, first:last]
                self.pool.release(entries[entries != 0][::-1])
                entries[:] = 0
                released[row] = last

    # Sharing between branches

    def share(self, source: int, row: int, num_tokens: int) -> None:
        """`row` (fresh, or a table fork of `source`) references the blocks of the first `num_tokens` tokens of `source`."""
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

    # Naming full blocks, giving everything back

    def register(self, row: int, num_computed: int) -> None:
        """Tell the prefix cache of the row's blocks that are full of known tokens once `num_computed` are computed."""
        table, branch = self.table, self.table.branch_of[row]
        if branch is None or branch.chain is None:
            return
        filled = min(num_computed, int(table.num_tokens[row]))
        first, last = int(table.num_registered[row]), filled // self.block_size
        if last <= first:
            return
        branch.chain.extend(table.token_ids[row], filled)
        for group in self.growing:
            blocks = table.block_table[group.index][row, first:last].tolist()
            self.prefix.register(group.index, branch.chain.names[first:last], blocks)
        table.num_registered[row] = last

    def unregistered(self, rows: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Which of `rows` have full blocks that `register` was not told of; a bool mask."""
        return np.minimum(ends, self.table.num_tokens[rows]) // self.block_size > self.table.num_registered[rows]

    def unregister_uncomputed(self, row: int) -> None:
        """The row's step was called off: blocks registered for it hold nothing."""
        first = int(self.table.num_computed[row]) // self.block_size
        last = int(self.table.num_registered[row])
        for group in self.growing:
            self._forget(self.table.block_table[group.index][row, first:last])
        self.table.num_registered[row] = min(first, last)

    def _forget(self, blocks: np.ndarray) -> None:
        blocks = blocks[blocks != 0]
        self.prefix.forget(blocks.tolist())
        self.pool.drop_content(blocks)

    def release(self, row: int) -> None:
        """Take every block from the row, tail first."""
        for group, entries in zip(self.groups, self.table.block_table, strict=True):
            count = self.table.num_blocks[row] if group.grows else self.table.num_cross_blocks[row]
            blocks = entries[row, :count]
            self.pool.release(blocks[blocks != 0][::-1])
        self.table.num_blocks[row] = self.table.num_cross_blocks[row] = 0
        self._shared_tails.discard(row)

    def forget_content(self, row: int) -> None:
        """The row's KV cannot be trusted: nobody may find its blocks any more."""
        for group in self.growing:
            self._forget(self.table.block_table[group.index][row, : self.table.num_blocks[row]])
        self.table.num_registered[row] = self.table.num_blocks[row]

    def reset_prefix_cache(self) -> bool:
        """Forget all content; False, and nothing done, while any block is held."""
        if self.pool.num_free != self.pool.num_blocks:
            return False
        self.prefix.clear()
        self.pool.drop_all_content()
        return True
