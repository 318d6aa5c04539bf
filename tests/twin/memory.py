"""The twin's memory rules: which blocks a sequence needs, which it may free, and which of its prompt are cached."""

from collections import Counter
from collections.abc import Hashable
from itertools import zip_longest

from pagoda.core.kv import KVGroupKind, KVGroupSpec
from pagoda.core.request import Request
from tests.twin.pool import NULL, Pool
from tests.twin.state import TwinRequest, TwinSequence


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
        self.open_step()

    def open_step(self) -> None:
        self.copies: list[tuple[TwinSequence, int, int]] = []  # sequence, source, target
        self.copied: list[tuple[tuple[int, int], tuple[int, int]]] = []  # the same, as stamps
        self.swapped_out = 0

    def stamps(self, sequence: TwinSequence, start: int, end: int) -> set[tuple[int, int]]:
        """The blocks of positions `start` .. `end` - 1."""
        first, last = start // self.block_size, blocks_for(end, self.block_size)
        tables = [
            table
            for spec, table in zip(self.groups, sequence.tables, strict=True)
            if spec.kind is not KVGroupKind.CROSS
        ]
        return {self.pool.blocks[number].stamp for table in tables for number in table[first:last] if number != NULL}

    def equal_blocks(self, request: Request, tokens: list[int]) -> set[int]:
        """All blocks that hold what the full blocks of these tokens do."""
        ends = range(self.block_size, len(tokens) + 1, self.block_size)
        contents = [self.content(group, request, tokens, end) for group in range(len(self.groups)) for end in ends]
        return {number for content in contents for number in self.pool.known.get(content, ())}

    @property
    def has_windows(self) -> bool:
        return any(spec.window for spec in self.groups)

    def in_order(self, sequence: TwinSequence) -> list[int]:
        """The blocks by their place in the tables, those of all groups at a place before those of the next."""
        return [number for place in zip_longest(*sequence.tables, fillvalue=NULL) for number in place if number != NULL]

    # Prefix caching -------------------------------------------------------------------------------------------

    def content(self, group: int, request: Request, tokens: list[int], end: int) -> Hashable:
        """The name of the block that ends at `end`: everything its KV depends on."""
        media = tuple((item.content_hash, item.offset) for item in request.media if item.offset < end)
        given = request.prompt_embeds and request.prompt_embeds.within(0, end)
        embeds = given and (given.positions.tobytes(), given.values.tobytes())
        return (group, tuple(tokens[:end]), embeds, adapter_of(request), request.cache_salt, media)

    def hit(self, request: Request, tokens: list[int]) -> tuple[int, list[list[int]]]:
        """Tokens found, and the blocks that hold them per group. The last token is always computed."""
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
        if spec.window:
            first = max(0, length - blocks_for(spec.window - 1, self.block_size))
        table = [NULL] * first
        for index in range(first, length):
            found = self.pool.find(self.content(group, request, tokens, (index + 1) * self.block_size))
            if found is None:
                return None
            table.append(found)
        # A hit may reach into what the window no longer needs: those places stay empty.
        freed = self.behind_window(group, length * self.block_size)
        return [NULL] * freed + table[freed:]

    def record(self, request: Request, sequence: TwinSequence, confirmed: int) -> list[int]:
        """Full blocks up to `confirmed` tokens can be found from now on; return those that could not before."""
        new: list[int] = []
        if not self.caching:
            return new
        for group, spec in enumerate(self.groups):
            if spec.kind is KVGroupKind.CROSS:
                continue
            table = sequence.tables[group]
            for index in range(sequence.hashed[group], min(confirmed // self.block_size, len(table))):
                content = self.content(group, request, sequence.tokens, (index + 1) * self.block_size)
                if table[index] != NULL and self.pool.record(table[index], content):
                    new.append(table[index])
                sequence.hashed[group] = index + 1
        return new

    # Room -----------------------------------------------------------------------------------------------------

    def behind_window(self, group: int, processed: int) -> int:
        """Leading blocks that no later token of this group attends to."""
        spec = self.groups[group]
        if not spec.window:
            return 0
        return max(0, processed - spec.window + 1) // self.block_size

    def release_behind_windows(self, sequence: TwinSequence) -> None:
        for group in range(len(self.groups)):
            table = sequence.tables[group]
            last = min(self.behind_window(group, sequence.computed - sequence.in_flight), len(table))
            self.pool.free_blocks(table[index] for index in range(last - 1, -1, -1))
            for index in range(last):
                table[index] = NULL

    def admission_need(self, request: Request, tokens: int, hits: list[list[int]], capped: bool) -> int:
        """Blocks that a new request takes from the free list for `tokens`, including free blocks that are cached.

        capped: count for a window group no more than it can ever hold at once.
        """
        need = 0
        for group, spec in enumerate(self.groups):
            if spec.kind is KVGroupKind.CROSS:
                need += blocks_for(request.encoder_len, self.block_size)
                continue
            want = max(blocks_for(tokens, self.block_size) - len(hits[group]), 0)
            want += len({block for block in hits[group] if block != NULL and self.pool.is_free(block)})
            if capped and spec.window:
                want = min(want, self._most_held(spec))
            need += want
        return need

    def _most_held(self, spec: KVGroupSpec) -> int:
        """Blocks that a sequence holds at once in a window group."""
        most = min(spec.window - 1 + self.max_in_flight, self.max_model_len)
        return blocks_for(most, self.block_size) + 1

    def growth_need(self, sequence: TwinSequence, upto: int) -> int:
        """New blocks so that the sequence has slots for `upto` tokens, with a copy of a shared block it writes to."""
        growing = [group for group, spec in enumerate(self.groups) if spec.kind is not KVGroupKind.CROSS]
        copies = sum(self._shared_write(sequence, group) is not None for group in growing)
        return self.num_missing(sequence, upto) + copies

    def num_missing(self, sequence: TwinSequence, upto: int) -> int:
        """New blocks so that the sequence has slots for `upto` tokens."""
        tables = [
            table
            for spec, table in zip(self.groups, sequence.tables, strict=True)
            if spec.kind is not KVGroupKind.CROSS
        ]
        return sum(max(blocks_for(upto, self.block_size) - len(table), 0) for table in tables)

    def _shared_write(self, sequence: TwinSequence, group: int) -> int | None:
        """The place of the shared block that the next token would be written into, if there is one."""
        index = sequence.computed // self.block_size
        table = sequence.tables[group]
        if index < len(table) and table[index] != NULL and self.pool.blocks[table[index]].references > 1:
            return index
        return None

    def adopt(self, request: Request, sequence: TwinSequence, hits: list[list[int]]) -> None:
        for group in range(len(self.groups)):
            self.pool.share(hits[group])
            sequence.tables[group] = list(hits[group])
            sequence.hashed[group] = len(hits[group])
        for group, spec in enumerate(self.groups):
            if spec.kind is KVGroupKind.CROSS:
                sequence.tables[group] = self.pool.take(blocks_for(request.encoder_len, self.block_size))

    def grow(self, sequence: TwinSequence, upto: int) -> None:
        for group, spec in enumerate(self.groups):
            if spec.kind is KVGroupKind.CROSS:
                continue
            table = sequence.tables[group]
            index = self._shared_write(sequence, group)
            if index is not None:
                [fresh] = self.pool.take(1)
                self.copies.append((sequence, table[index], fresh))
                self.copied.append((self.pool.blocks[table[index]].stamp, self.pool.blocks[fresh].stamp))
                self.pool.free_blocks([table[index]])
                table[index] = fresh
            missing = blocks_for(upto, self.block_size) - len(table)
            if missing > 0:
                table.extend(self.pool.take(missing))

    def call_off_copies(self, sequences: list[TwinSequence]) -> None:
        """They do not run in this step: nothing is copied for them."""
        self.copies = [copy for copy in self.copies if copy[0] not in sequences]

    def fork(self, source: TwinSequence, child: TwinSequence) -> None:
        """`child` shares every block of `source`, and is as far as it is."""
        child.computed = source.computed  # what is in flight is the source's alone
        child.placeholders = source.placeholders
        self.share_prefix(source, child, source.computed)

    def share_prefix(self, source: TwinSequence, child: TwinSequence, tokens: int) -> None:
        """`child`, which has nothing, shares the blocks of the first `tokens` tokens, and the cross-attention ones."""
        count = blocks_for(tokens, self.block_size)
        for group, spec in enumerate(self.groups):
            table = source.tables[group]
            child.tables[group] = list(table if spec.kind is KVGroupKind.CROSS else table[:count])
            self.pool.share(child.tables[group])
            child.hashed[group] = min(source.hashed[group], tokens // self.block_size)

    def sibling_need(self, state: TwinRequest) -> int:
        """Blocks of the other sequences than the first, after the full prompt blocks that all share."""
        shared = state.request.num_prompt_tokens // self.block_size
        need = 0
        for sequence in state.alive[1:]:
            own = blocks_for(len(sequence.tokens), self.block_size) - shared
            for spec in self.groups:
                if spec.window:
                    need += min(own, self._most_held(spec))
                elif spec.kind is not KVGroupKind.CROSS:
                    need += own
        return need

    # Host memory ----------------------------------------------------------------------------------------------

    def _parked(self, sequence: TwinSequence) -> list[list[int]]:
        """Per group, the table entries that hold KV."""
        return [
            list(table) if spec.kind is KVGroupKind.CROSS else table[: blocks_for(sequence.computed, self.block_size)]
            for spec, table in zip(self.groups, sequence.tables, strict=True)
        ]

    def host_need(self, sequences: list[TwinSequence]) -> int:
        return len(
            {block for sequence in sequences for table in self._parked(sequence) for block in table if block != NULL}
        )

    def kept_without(self, sequences: list[TwinSequence]) -> int:
        """Leading tokens of the first one that can be found without them, because others hold their blocks, too."""
        if not self.caching or self.has_windows:
            return 0
        first, kept = sequences[0], 0
        for index in range(first.computed // self.block_size):
            for group, table in enumerate(first.tables):
                block = self.pool.blocks[table[index]]
                own = sum(block.number in one.tables[group] for one in sequences)
                if block.content is None or block.references <= own:
                    return kept
            kept += self.block_size
        return kept

    def swap_out(self, sequences: list[TwinSequence], host: Pool) -> int:
        """Return how many blocks move."""
        moved: dict[int, int] = {}
        for sequence in sequences:
            sequence.on_host = []
            for table in self._parked(sequence):
                there: list[int] = []
                for block in table:
                    if block == NULL:
                        there.append(NULL)
                    elif block in moved:
                        host.share([moved[block]])
                        there.append(moved[block])
                    else:
                        [moved[block]] = host.take(1)
                        there.append(moved[block])
                sequence.on_host.append(there)
            self.free(sequence)
        self.swapped_out += len(moved)
        return len(moved)

    def return_need(self, sequences: list[TwinSequence], uptos: list[int], host: Pool) -> int:
        """Device blocks that bring the sequences back, with slots for `uptos` tokens and copies of shared tails."""
        distinct: set[int] = set()
        writers: Counter[int] = Counter()
        need = 0
        for sequence, upto in zip(sequences, uptos, strict=True):
            assert sequence.on_host is not None
            for spec, table in zip(self.groups, sequence.on_host, strict=True):
                distinct.update(block for block in table if block != NULL)
                if spec.kind is KVGroupKind.CROSS:
                    continue
                need += max(blocks_for(upto, self.block_size) - len(table), 0)
                if sequence.computed % self.block_size and table[-1] != NULL:
                    writers[table[-1]] += 1
        # Each writer of a shared tail copies it, except one that is left alone with it.
        copies = sum(min(count, host.blocks[block].references - 1) for block, count in writers.items())
        return need + copies + len(distinct)

    def swap_in(self, sequences: list[TwinSequence], host: Pool) -> int:
        """Return how many blocks move."""
        moved: dict[int, int] = {}
        for sequence in sequences:
            assert sequence.on_host is not None
            for group, there in enumerate(sequence.on_host):
                table: list[int] = []
                for block in there:
                    if block == NULL:
                        table.append(NULL)
                    elif block in moved:
                        self.pool.share([moved[block]])
                        table.append(moved[block])
                    else:
                        [moved[block]] = self.pool.take(1)
                        table.append(moved[block])
                sequence.tables[group] = table
                sequence.hashed[group] = 0
            self.drop_host(sequence, host)
        return len(moved)

    def drop_host(self, sequence: TwinSequence, host: Pool) -> None:
        for there in sequence.on_host or ():
            host.free_blocks(there)
        sequence.on_host = None

    def free(self, sequence: TwinSequence) -> None:
        self.pool.free_blocks(reversed(self.in_order(sequence)))
        for group in range(len(self.groups)):
            sequence.tables[group] = []
            sequence.hashed[group] = 0


def _wants_prompt_logprobs(request: Request) -> bool:
    return request.sampling is not None and request.sampling.prompt_logprobs is not None


def adapter_of(request: Request) -> Hashable:
    """What makes its adapter the same as another's: the contents, where they are known. None without one."""
    lora = request.lora
    return lora and (lora.digest or (lora.name, lora.path))
