"""CachedContent: what blocks hold. Inserts rows' full blocks into the prefix cache, and finds prefixes in it."""

from dataclasses import dataclass

import numpy as np

from pagoda.base.errors import InvariantBroken
from pagoda.core.kv.block_pool import BlockPool
from pagoda.core.kv.block_tables import BlockTables
from pagoda.core.kv.prefix_cache import HashChain, PrefixCache, make_root
from pagoda.core.request_state import Sequence
from pagoda.core.request_table import RequestTable


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """Tokens of a sequence that the prefix cache has, and their `blocks` (per KV group; 0: out of the window)."""

    num_tokens: int
    blocks: tuple[list[int], ...]


class CachedContent:
    """The prefix cache as rows see it. Hashing is lazy: it happens at the next lookup, or when a block is freed.

    num_cached: int32 [rows], leading blocks of each row that were inserted into the cache.
    enabled: whether prefix caching is on (never for encoder-decoder models: their KV depends on the encoder's input).
    """

    def __init__(
        self,
        table: RequestTable,
        tables: BlockTables,
        pool: BlockPool,
        block_size: int,
        enabled: bool,
        seed: int | None,
    ) -> None:
        self.enabled = enabled
        self.prefix_cache = PrefixCache(len(tables.groups), seed, pool.note_content)
        self.num_cached = np.zeros(table.max_rows, np.int32)
        self.nothing = CachedPrefix(0, tuple([] for _ in tables.groups))
        self._table = table
        self._tables = tables
        self._groups = tuple(group for group in tables.groups if group.grows)
        self._windows = tuple(group for group in self._groups if group.is_window)
        self._pool = pool
        self._block_size = block_size
        self._chains: dict[Sequence, HashChain] = {}

    def start_row(self, row: int, num_cached: int) -> None:
        """The row begins with `num_cached` blocks of the cache; what it had is another sequence's."""
        self.num_cached[row] = num_cached

    def share(self, source: int, row: int, num_tokens: int) -> None:
        """`row` references the blocks of the first `num_tokens` tokens of `source`, and their hashes if it has none."""
        sequence, chain = self._table.owner(row), self._chains.get(self._table.owner(source))
        num_full = num_tokens // self._block_size
        if chain is not None and sequence not in self._chains and len(chain.hashes) <= num_full:
            self._chains[sequence] = chain.fork()
        self.num_cached[row] = min(int(self.num_cached[source]), num_full)

    def hash_tokens(self, sequence: Sequence) -> HashChain:
        """Hash the full blocks of a sequence without a row."""
        chain = self._chains.get(sequence)
        if chain is None:
            spec = sequence.request.spec
            root = make_root(self.prefix_cache.seed, spec.lora, spec.cache_salt)
            chain = self._chains[sequence] = HashChain(root, self._block_size, spec.media, spec.prompt_embeds)
        chain.extend(sequence.token_ids, len(sequence.token_ids))
        return chain

    def remove_hashes(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        self._chains.pop(sequence, None)

    def longest_prefix(self, sequence: Sequence) -> CachedPrefix:
        """Return the longest prefix of the sequence's tokens, without the last one, that all groups have cached."""
        if not self.enabled:
            return self.nothing
        hashes = self.hash_tokens(sequence).hashes[: (len(sequence.token_ids) - 1) // self._block_size]
        found: list[list[int]] = [[] for _ in self._tables.groups]
        for group in self._groups:
            if not group.is_window:
                found[group.index] = self.prefix_cache.longest_cached_prefix(group.index, hashes)
                hashes = hashes[: len(found[group.index])]
        before = -1
        while self._windows and before != len(hashes):  # a window may shorten what another one agreed to
            before = len(hashes)
            for group in self._windows:
                found[group.index] = self.prefix_cache.last_cached_run(group.index, hashes, group.num_hit_blocks)
                hashes = hashes[: len(found[group.index])]
        return CachedPrefix(len(hashes) * self._block_size, tuple(blocks[: len(hashes)] for blocks in found))

    def cache_blocks(self, row: int, num_computed: int) -> None:
        """Insert the row's blocks that are full of known tokens once `num_computed` are computed."""
        table, tables = self._table, self._tables
        sequence = table.sequence_of[row]
        chain = self._chains.get(sequence) if sequence is not None else None
        if chain is None:
            return
        filled = min(num_computed, int(table.num_tokens[row]))
        first, last = int(self.num_cached[row]), filled // self._block_size
        if last <= first:
            return
        chain.extend(table.token_ids[row], filled)
        for group in self._groups:
            blocks = tables.entries[group.index][row, first:last].tolist()
            self.prefix_cache.insert(group.index, chain.hashes[first:last], blocks)
        self.num_cached[row] = last

    def cache_filled(self, rows: np.ndarray, ends: np.ndarray) -> None:
        """`cache_blocks` for all of `rows` that have new full blocks. ends: computed tokens, int32 [num_rows]."""
        if not self.enabled:
            return
        filled = np.minimum(ends, self._table.num_tokens[rows]) // self._block_size
        for i in (filled > self.num_cached[rows]).nonzero()[0].tolist():
            self.cache_blocks(int(rows[i]), int(ends[i]))

    def uncache_uncomputed(self, row: int) -> None:
        """The row was taken out of the step: blocks cached for it hold nothing."""
        first = int(self._table.num_computed[row]) // self._block_size
        last = int(self.num_cached[row])
        for group in self._groups:
            self.uncache_blocks(self._tables.entries[group.index][row, first:last])
        self.num_cached[row] = min(first, last)

    def uncache(self, sequence: Sequence) -> None:
        """The sequence's KV cannot be trusted: its row's blocks are removed, or all that is found by its hashes."""
        if not self.enabled:
            return
        row = sequence.row
        if row >= 0:
            self.num_cached[row] = count = int(self._tables.num_blocks[row])
            for group in self._groups:
                self.uncache_blocks(self._tables.entries[group.index][row, :count])
        else:
            hashes = self.hash_tokens(sequence).hashes
            for group in self._groups:
                self.uncache_blocks(np.array(self.prefix_cache.blocks_with(group.index, hashes), np.int32))

    def uncache_blocks(self, blocks: np.ndarray) -> None:
        """Remove `blocks` from the cache. 0 is the null block."""
        blocks = blocks[blocks != 0]
        self.prefix_cache.remove(blocks.tolist())
        self._pool.drop_content(blocks)

    def reset(self) -> bool:
        """Remove all content; False, and nothing done, while any block is in use."""
        if self._pool.num_free != self._pool.num_blocks:
            return False
        self.prefix_cache.clear()
        self._pool.drop_all_content()
        return True

    def check(self) -> None:
        """Check the cache, and that only unfinished sequences have hashes. Raises InvariantBroken."""
        self.prefix_cache.check()
        for sequence in self._chains:
            if sequence.is_finished:
                raise InvariantBroken(f"{sequence.request.request_id}: a finished sequence still has block hashes")
