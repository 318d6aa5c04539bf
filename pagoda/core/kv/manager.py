"""KVCacheManager: the one owner of block tables, pools and the prefix cache. Plans ask it; workers get its deltas."""

from collections.abc import Iterable

import numpy as np

from pagoda.base.config import CacheConfig
from pagoda.core.events import EventStream, Pinned
from pagoda.core.kv.block_pool import NO_BLOCKS, BlockCounts, BlockPools
from pagoda.core.kv.block_tables import BlockTables
from pagoda.core.kv.host_tier import HostTier
from pagoda.core.kv.prefix_cache import CachedPrefix, PrefixCache
from pagoda.core.kv.sizing import KVSizing, blocks_for, exceeds
from pagoda.core.kv.transfers import KVTier, Transfers
from pagoda.core.request import Reason, RequestState, Sequence
from pagoda.core.request_table import RequestTable
from pagoda.core.scheduler_options import SchedulerOptions


class KVCacheManager:
    """Blocks for rows: device pools, prefix cache and host tier.

    num_blocks: usable device blocks of each pool; block 0 is the null block.
    pools, tables, prefix_cache, host, transfers: its parts, for what concerns one of them alone.
    A model without KV groups (an encoder) never needs a block, and nothing of it is cached.
    """

    def __init__(
        self,
        table: RequestTable,
        sizing: KVSizing,
        num_blocks: int,
        num_host_blocks: int,
        cache: CacheConfig,
        options: SchedulerOptions,
        events: EventStream,
        tier: KVTier | None = None,
    ) -> None:
        self.sizing = sizing
        self.pools = BlockPools(sizing.pool_sizes(num_blocks))
        self.num_blocks = self.pools.num_blocks
        # Free when a request enters next to others.
        self._watermark: BlockCounts = tuple(int(cache.watermark * (count + 1)) for count in self.num_blocks)
        self._admit_whole_prompt = options.admit_whole_prompt
        self._table = table
        # Drafts leave a state in the block after that of the tokens before them; tables of all groups grow together.
        longest = sizing.max_model_len + sizing.block_size * sizing.has_states
        widths = [blocks_for(longest, group.block_size) * group.grows for group in sizing.groups]
        entries = [np.zeros((table.max_rows, width), np.int32) for width in widths]
        caching = cache.enable_prefix_caching and bool(sizing.groups) and all(group.grows for group in sizing.groups)
        self.prefix_cache = PrefixCache(
            table, entries, self.pools, sizing, events, enabled=caching, seed=options.prefix_hash_seed
        )
        self.tables = BlockTables(table, entries, self.pools, self.prefix_cache, sizing)
        self.host = HostTier(table, self.tables, sizing, num_host_blocks, events)
        self.transfers = Transfers(tier, self.tables, self.prefix_cache, sizing.block_size, events)
        self._events = events

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, of all pools."""
        return sum(self.pools.num_free)

    def num_blocks_held(self, rows: Iterable[int]) -> list[int]:
        """Per KV group: distinct device blocks that `rows` reference, without the null block."""
        held: list[set[int]] = [set() for _ in self.sizing.groups]
        for row in rows:
            for blocks, entries in zip(held, self.tables.of(row), strict=True):
                blocks.update(entries[entries != 0].tolist())
        return [len(blocks) for blocks in held]

    def owners_of_blocks(self, rows: np.ndarray, owners: np.ndarray, num_owners: int) -> tuple[np.ndarray, np.ndarray]:
        """Return what each usable block is for, and how many distinct blocks each owner has.

        owners: of each of `rows`, from 0.
        The first is int32 [blocks of all pools]: 0 free, 1 free and in the prefix cache, 2 of several owners, 3 + its
        only one.
        """
        held_by, blocks = [NO_BLOCKS], [NO_BLOCKS]
        for group, entries in zip(self.sizing.groups, self.tables.entries, strict=True):
            used = self.tables.used(group)[rows]
            held = entries[rows, : used.max(initial=0)]
            row_at, place = np.nonzero((held != 0) & (np.arange(held.shape[1]) < used[:, None]))
            held_by.append(owners[row_at])
            blocks.append(held[row_at, place])
        return _owners_of(self.pools, np.concatenate(held_by), np.concatenate(blocks), num_owners)

    def owners_of_host_blocks(self, swapped: list[list[Sequence]]) -> tuple[np.ndarray, np.ndarray]:
        """Return the same of host blocks; each of the lists is of one owner."""
        each = [self.host.blocks_of(sequences) for sequences in swapped]
        owners = np.repeat(np.arange(len(each)), [len(blocks) for blocks in each])
        return _owners_of(self.host.pools, owners, np.concatenate([NO_BLOCKS, *each]), len(each))

    # A request enters

    def hash_prompt(self, request: RequestState) -> None:
        """Hash the tokens of a request without rows now, so that its admission need not."""
        if self.prefix_cache.enabled:
            for sequence in (request.unfinished[0], *request.siblings):
                self.prefix_cache.hash_tokens(sequence)

    def get_computed_blocks(self, request: RequestState) -> CachedPrefix:
        """Return the cached prefix of the first sequence of a request without rows, `nothing` without a look."""
        # Its siblings share its blocks, which a hit in a window group may not all have.
        if not request.spec.reads_prefix_cache or (self.tables.windows and request.siblings):
            self.hash_prompt(request)  # it fills the cache all the same; the sequence that was hashed may have failed
            return self.prefix_cache.nothing
        return self.prefix_cache.longest_prefix(request.unfinished[0])

    def most_blocks(self, request: RequestState) -> BlockCounts:
        """Return the most blocks that the request's known tokens hold at once. Pools with fewer can never serve it."""
        num_tokens, encoder_len = len(request.unfinished[0].token_ids), request.spec.encoder_len
        most = self._with_siblings(self.sizing.blocks_for_request(num_tokens, encoder_len), request)
        if (num_seqs := len(request.unfinished)) > 1 and self.sizing.has_states:
            # From the fork on, each of its sequences writes to a state of its own.
            states = self.sizing.total((group, num_seqs) for group in self.sizing.groups if group.spec.has_states)
            most = tuple(map(max, most, states))
        return most

    def why_no_blocks(
        self,
        request: RequestState,
        prefix: CachedPrefix,
        num_new: int,
        *,
        others_run: bool,
        num_freed: BlockCounts | None = None,
    ) -> Reason | None:
        """Return why a request without rows may not compute `num_new` tokens after `prefix`; None: it may.

        With `admit_whole_prompt`, blocks for all its known tokens must be free (a check, not a reservation).
        num_freed: blocks that would be free, too.
        """
        need = self._blocks_to_admit(request, prefix.num_tokens + num_new, prefix)
        if self._admit_whole_prompt:
            whole = self._blocks_to_admit(request, len(request.unfinished[0].token_ids), prefix, capped=True)
            need = tuple(map(max, need, self._with_siblings(whole, request)))
        return self._why_short(need, num_freed, others_run=others_run)

    def why_no_swap_in(
        self, sequences: list[Sequence], ends: list[int], running: np.ndarray, running_ends: np.ndarray
    ) -> Reason | None:
        """`why_no_blocks` for sequences that would come back from the host, and compute up to `ends`.

        Next to `running` rows, which compute up to `running_ends`, each of them and of these must find room for its
        next token, too: what comes back would be the first to be swapped out again.
        """
        if not len(running):
            return self._why_short(self.host.blocks_to_swap_in(sequences, ends), None, others_run=False)
        longest = self.sizing.max_model_len
        need = self.host.blocks_to_swap_in(sequences, [min(end + 1, longest) for end in ends])
        of_running = self.tables.num_missing(running, np.minimum(running_ends + 1, longest))
        return self._why_short(_sum(need, of_running), None, others_run=True)

    def num_freed_with(self, rows: list[int], prefix: CachedPrefix) -> BlockCounts:
        """Return how many blocks only `rows` reference, those of `prefix` not counted: a hit would take them again."""
        entries = [entries for row in rows for entries in self.tables.of(row)]
        blocks, counts = np.unique(np.concatenate(entries or [NO_BLOCKS]), return_counts=True)
        left = np.isin(blocks, np.concatenate(prefix.blocks or (NO_BLOCKS,)), invert=True)
        return self.pools.count(blocks[left & (self.pools.ref_count[blocks] == counts)])

    def num_kept_without(self, rows: list[int]) -> int:
        """Return how many computed leading tokens of the first row stay findable when all `rows` leave.

        They are in blocks that others hold, too; what only these rows hold may be evicted at once.
        """
        if not self.prefix_cache.enabled or self.tables.windows:
            return 0
        num_full, kept = int(self._table.num_computed[rows[0]]) // self.sizing.block_size, list[int]()
        for group in self.tables.growing:
            entries = self.tables.entries[group.index][rows, :num_full]
            blocks, num_own = entries[0], (entries == entries[0]).sum(axis=0)
            held = self.pools.has_content[blocks] & (self.pools.ref_count[blocks] > num_own)
            kept.append(int(np.logical_and.accumulate(held).sum()))
        return min(kept) * self.sizing.block_size

    def _with_siblings(self, of_first: BlockCounts, request: RequestState) -> BlockCounts:
        """Add the blocks of the request's other sequences to those of its first."""
        if not request.siblings:
            return of_first
        lengths = [len(sequence.token_ids) for sequence in request.siblings]
        return _sum(of_first, self.sizing.blocks_for_siblings(lengths, request.spec.num_prompt_tokens))

    def _blocks_to_admit(
        self, request: RequestState, num_tokens: int, prefix: CachedPrefix, *, capped: bool = False
    ) -> BlockCounts:
        """Free blocks needed to hold `num_tokens` tokens after `prefix`; its blocks that are free count too.

        capped: count at most what a window group holds at once.
        """
        need, spec = [0] * len(self.num_blocks), request.spec
        snapshots = self.sizing.snapshots_of(spec.num_prompt_tokens, prefix.parts_at)
        for group in self.sizing.groups:
            if not group.grows:
                need[group.pool] += blocks_for(spec.encoder_len, group.block_size)
                continue
            blocks = prefix.blocks[group.index]
            passed = group.num_passed_blocks(prefix.num_tokens)
            own = group.num_new_blocks(len(blocks), num_tokens, snapshots)
            if len(cached := blocks[passed:]):
                own += int(np.count_nonzero((self.pools.ref_count[cached] == 0) & (cached != 0)))
            need[group.pool] += min(own, group.most_held(num_tokens)) if capped else own
        return tuple(need)

    def _why_short(self, needed: BlockCounts, num_freed: BlockCounts | None, *, others_run: bool) -> Reason | None:
        """Return None if `needed` blocks are free for a newcomer, else why not; NEVER if they cannot become free.

        The watermark is kept only next to running requests.   num_freed: blocks that would be free, too.
        """
        free = self.pools.num_free if num_freed is None else _sum(self.pools.num_free, num_freed)
        if exceeds(needed, free):
            is_empty = free == self.num_blocks and not others_run
            return Reason.NEVER if is_empty else Reason.BLOCKS
        if others_run and exceeds(_sum(needed, self._watermark), free):
            return Reason.WATERMARK
        return None

    # A row or a sequence leaves

    def uncache(self, sequence: Sequence) -> None:
        """The sequence's KV cannot be trusted: its blocks are removed from the prefix cache."""
        for row in sequence.request.rows:  # now: a sibling that shares a block must not insert it afterwards
            self.prefix_cache.cache_blocks(row, int(self._table.num_computed[row]))
        tables = self.tables.of(sequence.row) if sequence.row >= 0 else ()
        self.prefix_cache.uncache(sequence, tables)

    def free(self, row: int, *, pins: bool = True) -> None:
        """Free every block of the row; what it has computed stays findable, and with `pins` pinned if asked to."""
        self._keep_findable(row, pins=pins)
        self.tables.free_row(row)

    def swap_out(self, sequences: list[Sequence]) -> None:
        """Move the KV of sibling sequences to the host, as HostTier does; what they have computed stays findable."""
        for sequence in sequences:
            self._keep_findable(sequence.row)
        self.host.swap_out(sequences)

    def _keep_findable(self, row: int, *, pins: bool = True) -> None:
        """The row is about to lose its blocks: insert the full ones into the prefix cache, and pin them if asked to."""
        self.prefix_cache.cache_blocks(row, int(self._table.num_computed[row]))
        sequence = self._table.owner(row)
        request = sequence.request.spec
        if not pins or request.pin is None or not self.prefix_cache.enabled:
            return
        # A hit needs the last run of a window: the first blocks alone would not be found.
        if num_pinned := self.pools.pin(self.tables.in_order(row), request.pin, partly=not self.tables.windows):
            self._events.write(Pinned, request, sequence.index, num_pinned, request.pin.ttl_s)
            self.transfers.keep(self.prefix_cache.hash_tokens(sequence).hashes, request.pin)

    def remove_sequence(self, sequence: Sequence) -> None:
        """The sequence has ended: free what it has on the host."""
        self.host.drop(sequence)
        self.prefix_cache.remove_hashes(sequence)

    def start_over(self) -> None:
        """Empty the prefix cache, and give blocks out as at first. None may be in use."""
        self.prefix_cache.reset()
        self.pools.start_over()
        self.host.pools.start_over()

    def check(self, rows: np.ndarray) -> None:
        """Check pools, tables of the running `rows`, and who may write. Raises InvariantBroken."""
        self.pools.check()
        self.host.check()
        self.prefix_cache.check()
        self.tables.check(rows, self.transfers.held_blocks)


def _sum(counts: BlockCounts, others: BlockCounts) -> BlockCounts:
    return tuple([count + other for count, other in zip(counts, others, strict=True)])


def _owners_of(
    pools: BlockPools, owners: np.ndarray, blocks: np.ndarray, num_owners: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return what `owners_of_blocks` does.   owners: of each of `blocks`."""
    kinds = pools.has_content.astype(np.int32)
    size = len(kinds)
    owner_of, block_of = np.divmod(np.unique(owners.astype(np.int64) * size + blocks), size)
    kinds[block_of] = 3 + owner_of
    kinds[np.bincount(block_of, minlength=size) > 1] = 2
    return kinds[pools.first_id :], np.bincount(owner_of, minlength=num_owners).astype(np.int32)
