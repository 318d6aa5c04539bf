"""What the events of the prefix cache tell, held against what the twin can find."""

from collections.abc import Hashable, Iterable
from itertools import pairwise

import numpy as np

from pagoda.core.events import CacheEvent, Stored
from pagoda.core.kv.prefix_cache import HashChain, make_root
from pagoda.core.request import Request
from pagoda.core.scheduler import Scheduler
from tests.twin import TwinScheduler


class CacheEvents:
    """Folds them.   found: KV group and hash of what can be found."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.found: set[tuple[int, bytes]] = set()
        self._state = scheduler._state
        self._block_size = self._state.kv.sizing.block_size
        self._tokens_of: dict[bytes | None, list[int]] = {None: []}
        self._hash_of: dict[Hashable, tuple[int, bytes]] = {}  # what the twin calls the content of a block
        self._parent_of: dict[tuple[int, bytes], bytes | None] = {}

    def note(self, event: CacheEvent) -> None:
        blocks = {(event.group, one) for one in event.hashes}
        assert len(blocks) == len(event.hashes)
        if not isinstance(event, Stored):
            assert blocks <= self.found, "what is not there is removed"
            self.found -= blocks
            return
        assert not blocks & self.found, "what is there is stored"
        self.found |= blocks
        for parent, block_hash in pairwise((event.parent, *event.hashes)):
            assert self._parent_of.get((event.group, block_hash or b""), parent) == parent  # not known of beams
        tokens = np.frombuffer(event.token_ids, np.int32).tolist()
        assert len(tokens) == self._block_size * len(event.hashes)
        before = self._tokens_of.get(event.parent)
        if before is not None:  # a window may begin with blocks that were never cached
            assert len(before) == event.first_token
            assert self._hashes(event.request, before + tokens)[-len(event.hashes) :] == [*event.hashes]
            for number, block_hash in enumerate(event.hashes, 1):
                self._tokens_of[block_hash] = before + tokens[: number * self._block_size]

    def expect(self, request: Request, output: list[int], twin: TwinScheduler) -> None:
        """A sequence of the request will have this output: note what each of its blocks is called."""
        tokens = [*request.prompt_token_ids.tolist(), *output]
        hashes = self._hashes(request, tokens)
        for group in range(len(self._state.kv.sizing.groups)):
            for number, (parent, block_hash) in enumerate(pairwise((None, *hashes)), 1):
                content = twin.memory.content(group, request, tokens, number * self._block_size)
                self._hash_of[content] = group, block_hash
                self._parent_of[group, block_hash] = parent

    def check(self, contents: Iterable[Hashable]) -> None:
        """What the twin finds is found, but for full blocks of running rows: decoding does not insert these before the
        next lookup."""
        theirs = {self._hash_of[content] for content in contents}
        assert self.found <= theirs
        if theirs == self.found:
            return
        table, later = self._state.table, set[bytes]()
        for row in self._state.batch.running.rows.tolist():
            known = min(int(table.num_computed[row]), int(table.num_tokens[row]))
            hashes = self._hashes(table.owner(row).request.spec, table.token_ids[row, :known].tolist())
            later.update(hashes[int(self._state.kv.prefix_cache.num_cached[row]) :])
        assert {block_hash for _, block_hash in theirs - self.found} <= later

    def _hashes(self, request: Request, tokens: list[int]) -> list[bytes]:
        root = make_root(self._state.kv.prefix_cache.seed, request.lora, request.cache_salt)
        chain = HashChain(root, self._block_size, request.media, request.prompt_embeds)
        chain.extend(np.array(tokens, np.int32), len(tokens))
        return chain.hashes
