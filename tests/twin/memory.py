"""Which blocks a branch needs, which it may give back, and what of its prompt is in the cache already."""

from collections.abc import Hashable

from pagoda.core.kv_specs import KVGroupKind, KVGroupSpec
from pagoda.core.request import Request
from tests.twin.pool import NULL, Pool
from tests.twin.state import Branch, Live


def blocks_for(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


class Memory:
    def __init__(
        self,
        groups: tuple[KVGroupSpec, ...],
        pool: Pool,
        block_size: int,
        caching: bool,
        max_model_len: int,
        max_in_flight: int,
    ) -> None:
        self.groups = groups
        self.pool = pool
        self.block_size = block_size
        self.caching = caching
        self.max_model_len = max_model_len
        self.max_in_flight = max_in_flight
        self.copies: list[tuple[int, int]] = []  # of this step

    # Prefix caching -------------------------------------------------------------------------------------------

    def content(self, group: int, request: Request, tokens: list[int], end: int) -> Hashable:
        """The name of the block that ends at `end`: everything its KV depends on."""
        media = tuple((item.content_hash, item.offset) for item in request.media if item.offset < end)
        return (group, tuple(tokens[:end]), request.lora, request.cache_salt, media)

    def hit(self, request: Request, tokens: list[int]) -> tuple[int, list[list[int]]]:
        """Tokens found, and the blocks that hold them per group. The last token is always left to compute."""
        nothing: tuple[int, list[list[int]]] = (0, [[] for _ in self.groups])
        if not self.caching or request.skip_prefix_read or _wants_prompt_logprobs(request):
            return nothing
        size = self.block_size
        for length in range((len(tokens) - 1) // size, 0, -1):
            tables = [self._hit_of_length(group, request, tokens, length) for group in range(len(self.groups))]
            if all(table is not None for table in tables):
                return length * size, [table for table in tables if table is not None]
        return nothing

    def _hit_of_length(self, group: int, request: Request, tokens: list[int], length: int) -> list[int] | None:
        spec = self.groups[group]
        if spec.kind is KVGroupKind.CROSS:
            return []
        first = 0
        if spec.kind is KVGroupKind.WINDOW:
            first = max(0, length - blocks_for(spec.window - 1, self.block_size))
        table = [NULL] * first
        for index in range(first, length):
            found = self.pool.find(self.content(group, request, tokens, (index + 1) * self.block_size))
            if found is None:
                return None
            table.append(found)
        # A hit may reach into what the window no longer needs: those places stay empty.
        behind = self.behind_window(group, length * self.block_size)
        return [NULL] * behind + table[behind:]

    def record(self, request: Request, branch: Branch, confirmed: int) -> None:
        """Full blocks up to `confirmed` tokens can be found from now on."""
        if not self.caching:
            return
        for group, spec in enumerate(self.groups):
            if spec.kind is KVGroupKind.CROSS:
                continue
            table = branch.tables[group]
            for index in range(branch.hashed[group], min(confirmed // self.block_size, len(table))):
                if table[index] != NULL:
                    self.pool.record(
                        table[index], self.content(group, request, branch.tokens, (index + 1) * self.block_size)
                    )
                branch.hashed[group] = index + 1

    # Room -----------------------------------------------------------------------------------------------------

    def behind_window(self, group: int, processed: int) -> int:
        """Leading blocks that no later token of this group attends to."""
        spec = self.groups[group]
        if spec.kind is not KVGroupKind.WINDOW:
            return 0
        return max(0, processed - spec.window + 1) // self.block_size

    def release_behind_windows(self, branch: Branch) -> None:
        for group in range(len(self.groups)):
            table = branch.tables[group]
            last = min(self.behind_window(group, branch.computed - branch.in_flight), len(table))
            self.pool.give_back(table[index] for index in range(last - 1, -1, -1))
            for index in range(last):
                table[index] = NULL

    def admission_need(self, request: Request, tokens: int, hits: list[list[int]], capped: bool) -> int:
        """Blocks a newcomer takes out of the free list so that `tokens` have slots, cached ones that lie free included.

        capped: count for a window group no more than it can ever hold at once.
        """
        need = 0
        for group, spec in enumerate(self.groups):
            if spec.kind is KVGroupKind.CROSS:
                need += blocks_for(request.encoder_len, self.block_size)
                continue
            want = blocks_for(tokens, self.block_size)
            if capped and spec.kind is KVGroupKind.WINDOW:
                most = min(spec.window - 1 + self.max_in_flight, self.max_model_len)
                want = min(want, blocks_for(most, self.block_size) + 1)
            need += max(want - len(hits[group]), 0)
            need += len({block for block in hits[group] if block != NULL and self.pool.is_free(block)})
        return need

    def growth_need(self, branch: Branch, upto: int) -> int:
        """New blocks so that the branch has slots for `upto` tokens, a copy of a shared block it writes to included."""
        need = 0
        for group, spec in enumerate(self.groups):
            if spec.kind is KVGroupKind.CROSS:
                continue
            need += max(blocks_for(upto, self.block_size) - len(branch.tables[group]), 0)
            if self._shared_write(branch, group) is not None:
                need += 1
        return need

    def _shared_write(self, branch: Branch, group: int) -> int | None:
        """The place of the shared block that the next token would be written into, if there is one."""
        index = branch.computed // self.block_size
        table = branch.tables[group]
        if index < len(table) and table[index] != NULL and self.pool.blocks[table[index]].references > 1:
            return index
        return None

    def adopt(self, request: Request, branch: Branch, hits: list[list[int]]) -> None:
        for group in range(len(self.groups)):
            self.pool.share(hits[group])
            branch.tables[group] = list(hits[group])
            branch.hashed[group] = len(hits[group])
        for group, spec in enumerate(self.groups):
            if spec.kind is KVGroupKind.CROSS:
                branch.tables[group] = self.pool.take(blocks_for(request.encoder_len, self.block_size))

    def grow(self, branch: Branch, upto: int) -> None:
        for group, spec in enumerate(self.groups):
            if spec.kind is KVGroupKind.CROSS:
                continue
            table = branch.tables[group]
            index = self._shared_write(branch, group)
            if index is not None:
                [fresh] = self.pool.take(1)
                self.copies.append((table[index], fresh))
                self.pool.give_back([table[index]])
                table[index] = fresh
            missing = blocks_for(upto, self.block_size) - len(table)
            if missing > 0:
                table.extend(self.pool.take(missing))

    def fork(self, source: Branch, number: int) -> Branch:
        """A branch that shares every block of `source`."""
        child = Branch(number, list(source.tokens), source.num_prompt, [list(table) for table in source.tables])
        child.computed, child.in_flight = source.computed, source.in_flight
        child.placeholders = source.placeholders
        child.hashed = list(source.hashed)
        for table in child.tables:
            self.pool.share(table)
        return child

    def free(self, branch: Branch) -> None:
        for group in range(len(self.groups)):
            self.pool.give_back(reversed(branch.tables[group]))
            branch.tables[group] = []
            branch.hashed[group] = 0

    def free_all(self, live: Live) -> None:
        for branch in live.branches:
            self.free(branch)


def _wants_prompt_logprobs(request: Request) -> bool:
    return request.sampling is not None and request.sampling.prompt_logprobs is not None
