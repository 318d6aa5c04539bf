"""KVContent: what blocks hold. Names rows' full blocks for the prefix cache, and finds prefixes in it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pagoda.core.block_pool import BlockPool
from pagoda.core.kv_groups import KVGroup
from pagoda.core.prefix_cache import HashChain, PrefixCache, make_root
from pagoda.core.request_table import Branch, RequestTable


@dataclass(frozen=True, slots=True)
class Hit:
    """What the prefix cache has of a sequence: `num_tokens` tokens, in `blocks` (per KV group; 0: behind a window)."""

    num_tokens: int
    blocks: tuple[list[int], ...]


class KVContent:
    """The prefix cache as rows see it. Naming is left until someone looks up, or a block is about to be given back.

    caching: whether prefix caching is on (never for encoder-decoder models: their KV depends on the encoder's input).
    """

    def __init__(
        self,
        table: RequestTable,
        groups: tuple[KVGroup, ...],
        num_groups: int,
        pool: BlockPool,
        block_size: int,
        caching: bool,
        seed: int | None,
    ) -> None:
        self.caching = caching
        self.prefix = PrefixCache(num_groups, seed, self._note_content)
        self.no_hit = Hit(0, tuple([] for _ in range(num_groups)))
        self._table = table
        self._groups = groups
        self._windows = tuple(group for group in groups if group.is_window)
        self._num_groups = num_groups
        self._pool = pool
        self._block_size = block_size

    def _note_content(self, blocks: Sequence[int]) -> None:
        self._pool.has_content[blocks] = True

    def extend_chain(self, branch: Branch) -> None:
        """Name the full blocks of the branch's known tokens (of a branch without a row)."""
        if branch.chain is None:
            request = branch.live.request
            root = make_root(self.prefix.seed, request.lora, request.cache_salt)
            branch.chain = HashChain(root, self._block_size, request.media)
        branch.chain.extend(branch.token_ids, len(branch.token_ids))

    def lookup(self, branch: Branch) -> Hit:
        """The longest prefix of the branch's tokens, but for the last one, that all groups have cached."""
        if not self.caching:
            return self.no_hit
        self.extend_chain(branch)
        assert branch.chain is not None
        names = branch.chain.names[: (len(branch.token_ids) - 1) // self._block_size]
        found: list[list[int]] = [[] for _ in range(self._num_groups)]
        for group in self._groups:
            if not group.is_window:
                found[group.index] = self.prefix.first_misses(group.index, names)
                names = names[: len(found[group.index])]
        before = -1
        while self._windows and before != len(names):  # a window may shorten what another one agreed to
            before = len(names)
            for group in self._windows:
                found[group.index] = self.prefix.last_run(group.index, names, group.num_hit_blocks)
                names = names[: len(found[group.index])]
        return Hit(len(names) * self._block_size, tuple(blocks[: len(names)] for blocks in found))

    def register(self, row: int, num_computed: int) -> None:
        """Tell the prefix cache of the row's blocks that are full of known tokens once `num_computed` are computed."""
        table, branch = self._table, self._table.branch_of[row]
        if branch is None or branch.chain is None:
            return
        filled = min(num_computed, int(table.num_tokens[row]))
        first, last = int(table.num_registered[row]), filled // self._block_size
        if last <= first:
            return
        branch.chain.extend(table.token_ids[row], filled)
        for group in self._groups:
            blocks = table.block_table[group.index][row, first:last].tolist()
            self.prefix.register(group.index, branch.chain.names[first:last], blocks)
        table.num_registered[row] = last

    def unregistered(self, rows: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Which of `rows` have full blocks that `register` was not told of; a bool mask."""
        return np.minimum(ends, self._table.num_tokens[rows]) // self._block_size > self._table.num_registered[rows]

    def unregister_uncomputed(self, row: int) -> None:
        """The row's step was called off: blocks registered for it hold nothing."""
        first = int(self._table.num_computed[row]) // self._block_size
        last = int(self._table.num_registered[row])
        for group in self._groups:
            self._forget(self._table.block_table[group.index][row, first:last])
        self._table.num_registered[row] = min(first, last)

    def _forget(self, blocks: np.ndarray) -> None:
        blocks = blocks[blocks != 0]
        self.prefix.forget(blocks.tolist())
        self._pool.drop_content(blocks)

    def forget_content(self, row: int) -> None:
        """The row's KV cannot be trusted: nobody may find its blocks any more."""
        for group in self._groups:
            self._forget(self._table.block_table[group.index][row, : self._table.num_blocks[row]])
        self._table.num_registered[row] = self._table.num_blocks[row]

    def reset_prefix_cache(self) -> bool:
        """Forget all content; False, and nothing done, while any block is held."""
        if self._pool.num_free != self._pool.num_blocks:
            return False
        self.prefix.clear()
        self._pool.drop_all_content()
        return True
