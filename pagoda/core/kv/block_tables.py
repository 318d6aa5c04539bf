"""BlockTables: which blocks each row holds. Gives blocks to rows, shares them between rows, and frees them."""

import numpy as np

from pagoda.base.errors import InvariantBroken
from pagoda.core.kv.block_pool import NO_BLOCKS, BlockCounts, BlockPools
from pagoda.core.kv.prefix_cache import CachedPrefix, PrefixCache
from pagoda.core.kv.sizing import KVGroup, KVSizing, blocks_for, exceeds
from pagoda.core.request_table import RequestTable, readonly
from pagoda.core.scheduler_output import NO_DELTA, NO_PAIRS, BlockDelta

_TableChange = tuple[np.ndarray, int, np.ndarray, np.ndarray]  # rows, group, index, block ids


class BlockTables:
    """The block tables of all KV groups over the device pools, as columns with one row per running sequence.

    `allocate_slots` first frees what a window has left, then copies a shared tail block that is about to be written,
    then allocates new blocks.

    pools: the blocks of attention, and those of states; see KVGroupSpec.
    entries: per KV group, int32 [rows, max blocks]; 0 is the null block. The list is the prefix cache's, too.
    num_blocks: int32 [rows], entries used in the tables of groups that grow (they grow together).
    num_cross_blocks: int32 [rows], entries used in those that do not.
    num_released: per KV group, int32 [rows], leading blocks freed because the window has left them.
    reserved_until: int32 [rows], read-only: while a step ends at or below this position, the row needs nothing here: no
        block, no copy, nothing to free. Steps without events compare this column and look no further.
    has_states: whether there are groups of states. What verifies drafts leaves two of them: that after the row's known
        tokens where it always is, and that after all drafts in the next block.
    """

    def __init__(
        self,
        table: RequestTable,
        entries: list[np.ndarray],
        pools: BlockPools,
        prefix_cache: PrefixCache,
        sizing: KVSizing,
    ) -> None:
        self.entries = entries
        self.num_blocks = np.zeros(table.max_rows, np.int32)
        self.num_cross_blocks = np.zeros(table.max_rows, np.int32)
        self.num_released = [np.zeros(table.max_rows, np.int32) for _ in sizing.groups]
        self._reserved_until = np.zeros(table.max_rows, np.int32)
        self.reserved_until = readonly(self._reserved_until)
        self.pools = pools
        self.groups, self.block_size, self.has_states = sizing.groups, sizing.block_size, sizing.has_states
        self.growing = tuple(group for group in sizing.groups if group.grows)
        self._growing_in = [
            tuple(group for group in self.growing if group.pool == pool) for pool in range(len(pools.num_blocks))
        ]
        self._snapshots = np.zeros((table.max_rows, 2), np.int32)  # see KVSizing.snapshots_of
        self.windows = tuple(group for group in sizing.groups if group.is_window)
        self._cross = tuple(group for group in sizing.groups if not group.grows)
        self._table = table
        self._prefix_cache = prefix_cache
        self._sizing = sizing
        self._shared_tails: set[int] = set()  # rows whose next write may be into a block that others reference
        self._changed: list[_TableChange] = []
        self._copies: list[tuple[int, int, int]] = []  # (row, source, target), of the step being planned

    # Counting

    def used(self, group: KVGroup) -> np.ndarray:
        """Return the entries in use in the tables of `group`, int32 [rows]."""
        return self.num_blocks if group.grows else self.num_cross_blocks

    def num_held(self, row: int) -> int:
        """Return the row's entries that name a block."""
        return sum([int(np.count_nonzero(entries)) for entries in self.of(row)])

    def of(self, row: int) -> tuple[np.ndarray, ...]:
        """Return a copy of the row's table per group, used entries only."""
        return tuple(
            entries[row, : self.used(group)[row]].copy()
            for group, entries in zip(self.groups, self.entries, strict=True)
        )

    def in_order(self, row: int) -> np.ndarray:
        """Return the row's blocks by the position where they end, over all groups: a hit needs them in every group."""
        tables = self.of(row)
        if len(tables) == 1:
            blocks = tables[0]
        else:
            places = [np.arange(len(blocks)) for blocks in tables]
            order = np.argsort(np.concatenate(places or [NO_BLOCKS]), kind="stable")
            blocks = np.concatenate(tables or (NO_BLOCKS,))[order]
        return blocks[blocks != 0]

    def _missing(self, rows: np.ndarray, ends: np.ndarray, known: np.ndarray) -> np.ndarray:
        """Return how many entries the tables of each row lack; int32 [num_rows].

        known: up to where tokens are known of rows that compute up to `ends`; `ends` itself without drafts or states.
        """
        wanted = -(-known // self.block_size)
        if known is not ends:
            wanted += known < ends
        return np.maximum(wanted - self.num_blocks[rows], 0)

    def _lacking(self, rows: np.ndarray, known: np.ndarray, missing: np.ndarray) -> list[np.ndarray]:
        """Return how many blocks each row lacks in each growing group, by pool; int [num_rows].

        known, missing: see `_missing`.
        """
        lacking = [missing] * len(self._growing_in)
        for pool, groups in enumerate(self._growing_in):
            if groups and groups[0].stride > 1:
                at, index = _spread(self.num_blocks[rows], missing)
                held = self._holds(groups[0], rows[at], index, known[at])
                lacking[pool] = np.bincount(at[held], minlength=len(rows))
        return lacking

    def _holds(self, group: KVGroup, rows: np.ndarray, index: np.ndarray, known: np.ndarray) -> np.ndarray:
        """Return which new entries at `index` of `rows` get a block, bool [n]: those that are kept, that of the last
        known token, and that of drafts.
        """
        return group.keeps(index, self._snapshots[rows]) | (index >= (known - 1) // self.block_size)

    def num_missing(self, rows: np.ndarray, ends: np.ndarray) -> BlockCounts:
        """Return how many blocks `rows` lack to compute up to `ends`, without copies."""
        counts = [int(lacking.sum()) for lacking in self._lacking(rows, ends, self._missing(rows, ends, ends))]
        return self._sizing.total((group, counts[group.pool]) for group in self.growing)

    def _num_fitting(self, rows: np.ndarray, missing: list[np.ndarray]) -> int:
        """Return how many leading `rows` certainly find their blocks, copies included; 0 only if the first does not."""
        count = len(rows)
        for pool, most in enumerate(missing):
            if self._shared_tails:  # a copy for each, although the last one writes in place
                most = most + np.isin(rows, list(self._shared_tails))
            free = self.pools.num_free[pool] // max(len(self._growing_in[pool]), 1)
            if int(most.sum()) > free:
                count = min(count, int(np.count_nonzero(np.cumsum(most) <= free)))
        if count:
            return count
        first = int(rows[0])
        self._free_passed(first)
        needed = [(group, 1) for group, _ in self._shared_tail_groups(first)]
        needed += [(group, int(missing[group.pool][0])) for group in self.growing]
        return int(not exceeds(self._sizing.total(needed), self.pools.num_free))

    # New rows and longer rows

    def allocate_prompt(self, row: int, prefix: CachedPrefix, end: int) -> None:
        """Give an empty row the blocks of `prefix`, and new ones up to `end`. The caller asked `why_no_blocks`."""
        encoder_len = self._table.owner(row).request.spec.encoder_len
        for group in self.growing:
            blocks = prefix.blocks[group.index].copy()
            passed = min(group.num_passed_blocks(prefix.num_tokens), len(blocks))
            blocks[:passed] = 0
            self.entries[group.index][row, : len(blocks)] = blocks
            self.num_released[group.index][row] = passed
            self.pools.touch(blocks[blocks != 0])
        self.num_blocks[row] = prefix.num_tokens // self.block_size
        self._snapshots[row] = self._sizing.snapshots_of(int(self._table.num_prompt_tokens[row]), prefix.parts_at)
        self.num_cross_blocks[row] = 0
        for group in self._cross:
            self.num_cross_blocks[row] = count = blocks_for(encoder_len, group.block_size)
            self._widen(group.index, count)
            self.entries[group.index][row, :count] = self.allocate(group.pool, count)
        self._append(row, end)
        self._prefix_cache.start_row(row, prefix.num_tokens)
        self._prefix_cache.cache_blocks(row, end)

    def _widen(self, group: int, num_blocks: int) -> None:
        """Make room for `num_blocks` entries in a cross-attention table (encoders may outrun the model length)."""
        entries = self.entries
        missing = num_blocks - entries[group].shape[1]
        if missing > 0:
            entries[group] = np.pad(entries[group], ((0, 0), (0, missing)))

    def allocate_slots(self, rows: np.ndarray, ends: np.ndarray) -> int:
        """Make room for the tokens of leading `rows` up to `ends`. Return for how many; 0: the first one lacks blocks.

        Out-of-window blocks of that one are freed all the same. More may fit than were served: whether one does is only
        certain for the first.
        """
        known = np.minimum(ends, self._table.num_known(rows)) if self.has_states else ends
        missing = self._missing(rows, ends, known)
        count = self._num_fitting(rows, self._lacking(rows, known, missing))
        # What the window of a later row leaves is not free yet.
        if count > 1 and self.windows and self.pools.has_pins:
            for at in range(count):
                self.allocate_slots(rows[at : at + 1], ends[at : at + 1])
            return count
        rows = rows[:count]
        if self.windows:
            for row in rows.tolist():
                self._free_passed(row)
        if self._shared_tails:
            for row in rows.tolist():  # in running order: the last one of a block writes in place
                self._unshare_tail(row)
        self._changed += self._grow(rows, known[:count], missing[:count])
        return count

    def _grow(self, rows: np.ndarray, known: np.ndarray, missing: np.ndarray) -> list[_TableChange]:
        """Allocate blocks for `missing` new entries at the end of the tables of `rows`. Return what has changed."""
        have, total, changed = self.num_blocks[rows], int(missing.sum()), list[_TableChange]()
        if total:
            if total == len(rows) and missing.max() == 1:
                at, index = slice(None), have
            else:
                at, index = _spread(have, missing)
            where, index = rows[at].astype(np.int32), index.astype(np.int32)
            for pool, groups in enumerate(self._growing_in):
                held, count = None, total
                if groups and groups[0].stride > 1:
                    held = self._holds(groups[0], where, index, known[at])
                    count = int(np.count_nonzero(held))
                allocated = self.allocate(pool, count * len(groups))
                for nth, group in enumerate(groups):
                    block_ids = allocated[nth * count : (nth + 1) * count]
                    if held is not None:
                        block_ids, held_ids = np.zeros(total, np.int32), block_ids
                        block_ids[held] = held_ids
                    self.entries[group.index][where, index] = block_ids
                    changed.append((where, group.index, index, block_ids))
            self.num_blocks[rows] = have + missing
        self._reserve(rows)
        return changed

    def allocate_slots_swapped_in(self, row: int, end: int) -> None:
        """Make room for a row that comes back in this step."""
        self._unshare_tail(row)
        self._append(row, end)

    def _append(self, row: int, end: int) -> None:
        """Allocate new blocks at the end of the tables of one row, which workers get whole."""
        one, ends = np.array([row]), np.array([end])
        self._grow(one, ends, self._missing(one, ends, ends))

    def allocate(self, pool: int, count: int) -> np.ndarray:
        """Allocate `count` blocks, int32; what they held is removed from the prefix cache."""
        allocated, evicted = self.pools.allocate(pool, count)
        if len(evicted):
            self._prefix_cache.remove(evicted.tolist())
        return allocated

    def _reserve(self, rows: np.ndarray) -> None:
        """Note up to where `rows` can continue without the KV manager."""
        until = self.num_blocks[rows] * self.block_size
        for group in self.windows:
            until = np.minimum(until, group.next_passed_at(self.num_released[group.index][rows]))
        self._reserved_until[rows] = until

    def _free_passed(self, row: int) -> None:
        """Free the blocks that a window has left. Only complete steps count: those in flight read the others."""
        done = int(self._table.num_computed[row] - self._table.num_in_flight[row])
        for group in self.windows:
            released = self.num_released[group.index]
            first, last = int(released[row]), min(group.num_passed_blocks(done), int(self.used(group)[row]))
            if last > first:
                self._prefix_cache.cache_blocks(row, done)  # while the entries still name the blocks
                entries = self.entries[group.index][row, first:last]
                if group.stride > 1:  # another row that has not passed a state yet would make it known again
                    kept = group.keeps(np.arange(first, last), self._snapshots[row])
                    self._prefix_cache.uncache_blocks(entries[~kept & (self.pools.ref_count[entries] == 1)])
                self.pools.free(entries[entries != 0][::-1])
                entries[:] = 0
                released[row] = last

    def keep_drafted(self, row: int, num_drafts: int) -> None:
        """All drafts that a complete step has verified were right: the row goes on from the state after them."""
        end = int(self._table.num_computed[row])
        known = end - num_drafts
        index = np.array([0, 1], np.int32) + (known - 1) // self.block_size
        for group in self.windows:
            if not group.spec.has_states:
                continue
            entries = self.entries[group.index][row]
            if end <= index[1] * self.block_size:
                entries[index] = entries[index[::-1]]
            elif known % self.block_size:  # the first is not that of a full block
                self.pools.free(entries[index[:1]])
                entries[index[0]] = 0
            self._changed.append((np.full(2, row, np.int32), group.index, index, entries[index]))

    # Rows that share blocks

    def fork(self, source: int, row: int, num_tokens: int) -> None:
        """`row` references the blocks of the first `num_tokens` tokens of `source`; writing to them copies them."""
        self.num_blocks[row] = blocks_for(num_tokens, self.block_size)
        self._snapshots[row], self.num_cross_blocks[row] = self._snapshots[source], self.num_cross_blocks[source]
        for group, entries, released in zip(self.groups, self.entries, self.num_released, strict=True):
            count = int(self.used(group)[row])
            held = entries[source, :count]
            entries[row, :count], entries[row, count:] = held, 0
            self.pools.touch(held[held != 0])
            released[row] = min(int(released[source]), count)
        self._reserve(np.array([row]))
        if num_tokens % self.block_size:
            self._mark_shared_tail(source)
            self._mark_shared_tail(row)
        self._prefix_cache.share(source, row, num_tokens)

    def restore(self, row: int, parts: tuple[tuple[np.ndarray, np.ndarray], ...], *, has_tail: bool) -> None:
        """Fill an empty row with blocks that hold its content already: per KV group, (table indices, blocks).

        has_tail: the last one of a pool is partly filled; a sibling may have it, too.
        """
        self.num_blocks[row] = self.num_cross_blocks[row] = 0
        self._snapshots[row] = self._sizing.snapshots_of(int(self._table.num_prompt_tokens[row]))
        for group, entries, released, (index, blocks) in zip(
            self.groups, self.entries, self.num_released, parts, strict=True
        ):
            used, end = self.used(group), int(index[-1]) + 1 if len(index) else 0
            entries[row, :end] = 0
            entries[row, index] = blocks
            released[row] = int(index[0]) if len(index) and group.grows else 0
            used[row] = max(int(used[row]), end)
        self._reserve(np.array([row]))
        if has_tail:
            self._mark_shared_tail(row)
        self._prefix_cache.start_row(row, 0)
        self._prefix_cache.cache_blocks(row, int(self._table.num_computed[row]))

    def _mark_shared_tail(self, row: int) -> None:
        """The partly filled block that the row writes next has other references."""
        self._shared_tails.add(row)
        self._reserved_until[row] = -1

    def _unshare_tail(self, row: int) -> None:
        """Copy the block that the row writes next, if other rows still reference it."""
        for group, index in self._shared_tail_groups(row):
            self._copy_on_write(row, group, index)
        self._shared_tails.discard(row)

    def _shared_tail_groups(self, row: int) -> list[tuple[KVGroup, int]]:
        """(group, table index) of the partly filled block the row writes next, where others reference it."""
        if row not in self._shared_tails:
            return []
        num_computed, found = int(self._table.num_computed[row]), list[tuple[KVGroup, int]]()
        for group in self.growing:
            index = num_computed // group.block_size
            if num_computed % group.block_size and self.pools.ref_count[self.entries[group.index][row, index]] > 1:
                found.append((group, index))
        return found

    def _copy_on_write(self, row: int, group: KVGroup, index: int) -> None:
        source = int(self.entries[group.index][row, index])
        target = int(self.allocate(group.pool, 1)[0])
        self.entries[group.index][row, index] = target
        self.pools.free(np.array([source], np.int32))
        self._copies.append((row, source, target))
        where, at, block_ids = np.array([[row], [index], [target]], np.int32)
        self._changed.append((where, group.index, at, block_ids))

    def free_row(self, row: int) -> None:
        """Free every block of the row, tail first."""
        self.pools.free(self.in_order(row)[::-1])
        self.num_blocks[row] = self.num_cross_blocks[row] = 0
        self._shared_tails.discard(row)

    # The step being planned

    def remove_row(self, row: int) -> None:
        """The row left the table while the step was planned: nothing is set or copied for it any more."""
        if self._changed:
            self._changed = [entry for one in self._changed if (entry := _without(one, row)) is not None]
        if self._copies:
            self._copies = [copy for copy in self._copies if copy[0] != row]

    def sources_of(self, rows: set[int]) -> dict[int, int]:
        """Return the copies of this step that `rows` wait for, target -> source. Swap-outs run before them."""
        return {target: source for row, source, target in self._copies if row in rows}

    def take_changes(self) -> tuple[BlockDelta, np.ndarray]:
        """Return how tables change in the step that is planned, and its copies, int32 [k, 2]; the next starts empty."""
        delta = _merge(self._changed) if self._changed else NO_DELTA
        copies = np.array(self._copies, np.int32)[:, 1:] if self._copies else NO_PAIRS
        self._changed, self._copies = [], []
        return delta, copies

    def blocks_between(self, row: int, start: int, end: int) -> set[int]:
        """Return the blocks of positions `start` .. `end` - 1, also of a row that its sequence has left."""
        return {
            block
            for group in self.growing
            for block in self.entries[group.index][
                row, start // group.block_size : blocks_for(end, group.block_size)
            ].tolist()
            if block
        }

    # Invariants

    def check(self, rows: np.ndarray, others: np.ndarray) -> None:
        """Check reference counts, and who may write, of the running `rows`. Raises InvariantBroken.

        others: blocks that something else references, as often as it does.
        """
        self._check_references(rows, others)
        self._check_writers(rows)

    def _check_references(self, rows: np.ndarray, others: np.ndarray) -> None:
        """Every block's count equals the number of table entries, and of others, naming it."""
        ref_count = self.pools.ref_count
        counted = np.bincount(others, minlength=len(ref_count))
        for group, entries in zip(self.groups, self.entries, strict=True):
            held = entries[rows][np.arange(entries.shape[1]) < self.used(group)[rows][:, None]]
            counted += np.bincount(held, minlength=len(counted))
        counted[0] = 0
        for block in np.flatnonzero(counted != ref_count).tolist():
            raise InvariantBroken(
                f"block {block} has {ref_count[block]} references, but {counted[block]} table entries name it"
            )

    def _check_writers(self, rows: np.ndarray) -> None:
        """No row continues to write to a block that others reference without the manager being asked first."""
        for group in self.growing:
            num_computed = self._table.num_computed[rows]
            tail = num_computed // group.block_size
            inside = (tail < self.used(group)[rows]) & (num_computed % group.block_size != 0)
            writers, tail, num_computed = rows[inside], tail[inside], num_computed[inside]
            shared = self.pools.ref_count[self.entries[group.index][writers, tail]] > 1
            if (self._reserved_until[writers[shared]] >= num_computed[shared]).any():
                raise InvariantBroken("a row would write to a block that another row references")


def _spread(have: np.ndarray, missing: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the new entries of tables, int [n]: whose each is, as an index of `have`, and its place in the table.

    have: entries of each table.   missing: how many follow.
    """
    at = np.repeat(np.arange(len(have)), missing)
    return at, (have - (np.cumsum(missing) - missing))[at] + np.arange(len(at))


def _merge(entries: list[_TableChange]) -> BlockDelta:
    groups = np.array([entry[1] for entry in entries], np.int32)
    return BlockDelta(
        np.concatenate([entry[0] for entry in entries]),
        np.repeat(groups, [len(entry[0]) for entry in entries]),
        np.concatenate([entry[2] for entry in entries]),
        np.concatenate([entry[3] for entry in entries]),
    )


def _without(entry: _TableChange, row: int) -> _TableChange | None:
    rows, group, index, block_ids = entry
    keep = rows != row
    if keep.all():
        return entry
    return (rows[keep], group, index[keep], block_ids[keep]) if keep.any() else None
