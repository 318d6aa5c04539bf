"""KVCacheManager: the one owner of block tables, pools and the prefix cache. Passes ask it; workers get its deltas."""

from collections.abc import Iterable
from enum import Enum

import numpy as np

from pagoda.base.config import CacheConfig
from pagoda.base.errors import InvariantBroken
from pagoda.core.kv.allocator import BlockAllocator
from pagoda.core.kv.block_moves import BlockMoves, StepMoves
from pagoda.core.kv.block_pool import BlockPool
from pagoda.core.kv.block_tables import BlockTables
from pagoda.core.kv.cached_content import CachedContent, CachedPrefix
from pagoda.core.kv.host_tier import HostTier
from pagoda.core.kv.sizing import KVSizing, blocks_for
from pagoda.core.readonly import readonly
from pagoda.core.request import Sequence
from pagoda.core.request_table import RequestTable


class AdmissionResult(Enum):
    """Whether blocks are there for a request that wants to enter."""

    OK = "ok"
    NO_BLOCKS = "too few free blocks now"
    WATERMARK = "the watermark would be broken"
    NEVER = "too few blocks even in an empty pool"


class KVCacheManager:
    """Blocks for rows: device pool, prefix cache and host tier.

    num_blocks: usable device blocks; block 0 is the null block.   num_host_blocks: blocks of the swap pool.
    watermark_blocks: kept free when a request enters next to running ones.
    prefix_hash_seed: seed of the block hashes; None draws a secret one.
    reserved_until: int32 [rows], read-only: up to this position a row needs nothing from the manager.
    """

    def __init__(
        self,
        table: RequestTable,
        sizing: KVSizing,
        num_blocks: int,
        num_host_blocks: int,
        watermark_blocks: int,
        cache: CacheConfig,
        prefix_hash_seed: int | None = None,
    ) -> None:
        self.sizing = sizing
        self.block_size = sizing.block_size
        self.num_blocks = num_blocks
        self._watermark_blocks = watermark_blocks
        self._table = table
        max_blocks = blocks_for(sizing.max_model_len, sizing.block_size)
        self._tables = BlockTables(sizing.groups, table.max_rows, max_blocks)
        self.reserved_until = readonly(self._tables.reserved_until)
        self._pool = BlockPool(num_blocks)
        self._moves = BlockMoves()
        has_cross = not all(group.grows for group in sizing.groups)
        caching = cache.enable_prefix_caching and not has_cross
        self._content = CachedContent(table, self._tables, self._pool, sizing.block_size, caching, prefix_hash_seed)
        self._allocator = BlockAllocator(table, self._tables, self._pool, self._moves, self._content, sizing)
        host_pool = BlockPool(num_host_blocks, first_id=0)
        self._host = HostTier(table, self._tables, self._pool, host_pool, self._allocator, self._moves, sizing)
        self._common_rows: np.ndarray | None = None
        self._common: tuple[int, ...] = ()

    # Counts

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free

    @property
    def num_free_host_blocks(self) -> int:
        return self._host.pool.num_free

    @property
    def has_windows(self) -> bool:
        return bool(self._allocator.windows)

    @property
    def caches_prefixes(self) -> bool:
        return self._content.enabled

    def tables_of(self, row: int) -> tuple[np.ndarray, ...]:
        """Return a copy of the row's block table per KV group."""
        return self._tables.of(row)

    def num_blocks_held(self, rows: Iterable[int]) -> list[int]:
        """Per KV group: distinct device blocks that `rows` reference, without the null block."""
        held: list[set[int]] = [set() for _ in self.sizing.groups]
        for row in rows:
            for blocks, entries in zip(held, self.tables_of(row), strict=True):
                blocks.update(entries[entries != 0].tolist())
        return [len(blocks) for blocks in held]

    def num_common_prefix_blocks(self, rows: np.ndarray) -> tuple[int, ...]:
        """Per KV group: leading full blocks that all of `rows` share. Kept until `rows` or a shared block changes."""
        if rows is not self._common_rows or self._allocator.common_changed:
            self._common_rows, self._allocator.common_changed = rows, False
            full = int(self._table.num_computed[rows].min()) // self.block_size if len(rows) > 1 else 0
            self._common = tuple(
                self._tables.num_common_blocks(group, rows, self._pool.ref_count, full) if full else 0
                for group in self.sizing.groups
            )
        return self._common

    # A request enters

    def hash_prompt(self, sequence: Sequence) -> None:
        """Hash a new sequence's tokens now, so that its admission need not."""
        if self._content.enabled:
            self._content.hash_tokens(sequence)

    def get_computed_blocks(self, sequence: Sequence, *, skip: bool = False) -> CachedPrefix:
        """Return the cached prefix of a sequence without a row, as block ids per KV group. skip: do not look."""
        return self._content.nothing if skip else self._content.longest_prefix(sequence)

    def blocks_to_admit(self, num_tokens: int, prefix: CachedPrefix, encoder_len: int, *, capped: bool = False) -> int:
        """Free blocks needed to hold `num_tokens` tokens after `prefix`; its blocks that are free count too.

        capped: count at most what a window group holds at once.
        """
        need = 0
        for group in self.sizing.groups:
            if not group.grows:
                need += blocks_for(encoder_len, self.block_size)
                continue
            blocks = prefix.blocks[group.index]
            passed = group.num_passed_blocks(prefix.num_tokens)
            need += max(group.num_required(num_tokens, capped) - max(passed, len(blocks)), 0)
            cached = [block for block in blocks[passed:] if block]
            if cached:
                need += int(np.count_nonzero(self._pool.ref_count[cached] == 0))
        return need

    def can_allocate(self, num_needed: int, *, others_run: bool) -> AdmissionResult:
        """Whether `num_needed` blocks are free for a newcomer. The watermark is kept only next to running requests."""
        free = self._pool.num_free
        if num_needed > free:
            is_empty = free == self.num_blocks and not others_run
            return AdmissionResult.NEVER if is_empty else AdmissionResult.NO_BLOCKS
        if others_run and num_needed + self._watermark_blocks > free:
            return AdmissionResult.WATERMARK
        return AdmissionResult.OK

    def allocate_prompt(self, row: int, prefix: CachedPrefix, end: int, encoder_len: int) -> None:
        """Give an empty row the blocks of `prefix`, and new ones up to `end`. The caller asked `can_allocate`."""
        self._allocator.fill_row(row, prefix, end, encoder_len)
        self._content.start_row(row, prefix.num_tokens // self.block_size)
        self._content.cache_blocks(row, end)

    # A row goes on

    def allocate_slots(self, rows: np.ndarray, ends: np.ndarray) -> bool:
        """Make room for the tokens of `rows` up to `ends`. Return False, and do nothing, if blocks may be short."""
        if self._allocator.most_blocks_to_extend(rows, ends) > self._pool.num_free:
            return False
        self._allocator.extend_rows(rows, ends)
        return True

    def allocate_slots_for(self, row: int, end: int) -> bool:
        """`allocate_slots` for one row, exactly. If blocks are short, it has only freed out-of-window blocks."""
        return self._allocator.extend_row(row, end)

    def fork(self, source: int, row: int, num_tokens: int) -> None:
        """`row` references the blocks of the first `num_tokens` tokens of `source`; writing to them copies them."""
        self._allocator.share(source, row, num_tokens)
        self._content.share(source, row, num_tokens)

    def fork_hashes(self, source: Sequence, sequence: Sequence) -> None:
        """`sequence` starts with all tokens of `source`."""
        self._content.fork_hashes(source, sequence)

    def cache_blocks(self, rows: np.ndarray, ends: np.ndarray) -> None:
        """Insert the full blocks of `rows` into the prefix cache, up to `ends` computed tokens."""
        self._content.cache_filled(rows, ends)

    def uncache_uncomputed(self, row: int) -> None:
        """The row was taken out of the step: what it would have computed is removed from the prefix cache."""
        self._content.uncache_uncomputed(row)

    def uncache_row(self, row: int) -> None:
        """The row's KV cannot be trusted: its blocks are removed from the prefix cache."""
        self._content.uncache_row(row)

    def uncache_sequence(self, sequence: Sequence) -> None:
        """`uncache_row` for a sequence that has left its row."""
        self._content.uncache_sequence(sequence)

    # A row leaves

    def free(self, row: int) -> None:
        """Free every block of the row; what it has computed stays findable."""
        self._content.cache_blocks(row, int(self._table.num_computed[row] - self._table.num_pending[row]))
        self._allocator.free_row(row)

    def forget(self, row: int) -> None:
        """The row is no longer in the table: nothing is set or copied for it in this step."""
        self._moves.forget(row)

    def forget_sequence(self, sequence: Sequence) -> None:
        """The sequence has ended: free what it has on the host."""
        self._host.drop(sequence)
        self._content.forget_hashes(sequence)

    # Host memory

    def can_swap_out(self, rows: list[int]) -> bool:
        """Whether the host pool can take all blocks of these rows."""
        return self._host.has_room_for(rows)

    def swap_out(self, sequences: list[Sequence]) -> None:
        """Move the KV of sibling sequences to the host. Their rows lose all device blocks."""
        self._host.swap_out(sequences)

    def blocks_to_swap_in(self, sequences: list[Sequence], ends: list[int]) -> int:
        """Free device blocks needed to bring `sequences` back, with room for their tokens up to `ends`."""
        return self._host.blocks_to_swap_in(sequences, ends)

    def swap_in(self, sequences: list[Sequence]) -> None:
        """Bring sibling sequences back into their new rows."""
        self._host.swap_in(sequences)
        for sequence in sequences:
            self._content.start_row(sequence.row, 0)
            self._content.cache_blocks(sequence.row, sequence.num_computed)

    def allocate_slots_swapped_in(self, row: int, end: int) -> None:
        """Make room for a row that comes back in this step; workers get its tables whole."""
        self._allocator.unshare_tail(row)
        self._allocator.append(row, end, is_known=False)

    # The step ends

    @property
    def copies(self) -> list[tuple[int, int, int]]:
        """Copy-on-writes of the step being planned: (row, source block, target block)."""
        return self._moves.copies

    def drain_moves(self) -> StepMoves:
        """Return what the step does to tables and blocks; the next step starts empty."""
        return self._moves.drain()

    def reset(self) -> bool:
        """Empty the prefix cache. Return False, and do nothing, while any block is in use."""
        return self._content.reset()

    def check(self, rows: np.ndarray) -> None:
        """Check pools, tables of the running `rows`, and who may write. Raises InvariantBroken."""
        self._pool.check()
        self._host.check()
        self._content.check()
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
        """No row goes on writing to a block that others reference without the manager being asked first."""
        tables, num_computed = self._tables, self._table.num_computed[rows]
        tail = num_computed // self.block_size
        inside = (tail < tables.num_blocks[rows]) & (num_computed % self.block_size != 0)
        rows, tail, num_computed = rows[inside], tail[inside], num_computed[inside]
        for group in self.sizing.groups:
            if group.grows:
                shared = self._pool.ref_count[tables.entries[group.index][rows, tail]] > 1
                if (tables.reserved_until[rows[shared]] >= num_computed[shared]).any():
                    raise InvariantBroken("a row would write to a block that another row references")
