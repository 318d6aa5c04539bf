"""The twin's memory rules: which blocks a sequence needs, which it may free, and which of its prompt are cached."""

from collections import Counter
from collections.abc import Hashable
from typing import NamedTuple

from pagoda.core.kv import KVGroupKind, KVGroupSpec
from pagoda.core.kv.sizing import blocks_per_snapshot
from pagoda.core.request import Request
from tests.twin.pool import NULL, Pool
from tests.twin.state import TwinRequest, TwinSequence

Need = list[int]
"""Blocks of each pool."""


def blocks_for(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def exceeds(need: Need, there: Need) -> bool:
    return any(count > most for count, most in zip(need, there, strict=True))


def total(*needs: Need) -> Need:
    return [sum(counts) for counts in zip(*needs, strict=True)]


class Hit(NamedTuple):
    """What is cached of a text.   tables: the blocks that hold it, per group.

    parts_at: tokens that groups without windows have, if that is more, else 0.   was_asked: it was looked up.
    """

    num_tokens: int
    tables: list[list[int]]
    parts_at: int = 0
    was_asked: bool = True


class Memory:
    def __init__(
        self,
        groups: tuple[KVGroupSpec, ...],
        pool: Pool,
        block_size: int,
        caching: bool,
        max_model_len: int,
        max_in_flight: int,
        depth: int,
    ) -> None:
        self.groups = groups
        self.pool = pool
        self.block_size = block_size
        self.stride = blocks_per_snapshot(groups, block_size)
        divides = any(spec.kind is not KVGroupKind.STATE for spec in groups)
        self.pool_of = [int(divides and spec.kind is KVGroupKind.STATE) for spec in groups]
        self.caching = caching
        self.max_model_len = max_model_len
        self.max_in_flight = max_in_flight
        self.depth = depth
        self.open_step()

    def open_step(self) -> None:
        self.copies: list[TwinSequence] = []  # whose block is copied
        self.copied: list[tuple[tuple[int, int], tuple[int, int]]] = []  # the same, as stamps
        self.swapped_out = 0

    def stamps(self, sequence: TwinSequence, start: int, end: int) -> set[tuple[int, int]]:
        """The blocks of positions `start` .. `end` - 1."""
        numbers: list[int] = []
        for spec, table in zip(self.groups, sequence.tables, strict=True):
            if spec.kind is not KVGroupKind.CROSS:
                numbers += table[start // self.block_size : blocks_for(end, self.block_size)]
        return {self.pool.blocks[number].stamp for number in numbers if number != NULL}

    def equal_blocks(
        self, request: Request, tokens: list[int], *, of_windows: bool = False, after: int = 0
    ) -> set[int]:
        """All blocks that hold what the full blocks of these tokens do; in groups with a window, or in all.

        after: without those that end in the first `after` tokens.
        """
        contents = [
            self.content(group, request, tokens, end)
            for group, spec in enumerate(self.groups)
            if spec.window or not of_windows
            for end in range(self.block_size, len(tokens) + 1, self.block_size)
            if end > after
        ]
        return {number for content in contents for number in self.pool.known.get(content, ())}

    @property
    def has_states(self) -> bool:
        return any(spec.kind is KVGroupKind.STATE for spec in self.groups)

    @property
    def has_windows(self) -> bool:
        return any(spec.window for spec in self.groups)

    def in_order(self, sequence: TwinSequence) -> list[int]:
        """The blocks by the position at which they end, those of all groups before those of the next."""
        placed = [
            (index, group, number)
            for group, table in enumerate(sequence.tables)
            for index, number in enumerate(table)
            if number != NULL
        ]
        return [number for _, _, number in sorted(placed)]

    # Prefix caching -------------------------------------------------------------------------------------------

    def content(self, group: int, request: Request, tokens: list[int], end: int) -> Hashable:
        """The name of the block that ends at `end`: everything its KV depends on."""
        media = tuple((item.content_hash, item.offset) for item in request.media if item.offset < end)
        given = request.prompt_embeds and request.prompt_embeds.within(0, end)
        embeds = given and (given.positions.tobytes(), given.values.tobytes())
        return (group, tuple(tokens[:end]), embeds, adapter_of(request), request.cache_salt, media)

    def hit(self, request: Request, tokens: list[int]) -> "Hit":
        """What is found of the tokens. The last one is always computed."""
        nothing: list[list[int]] = [[] for _ in self.groups]
        if not self.caching or request.skip_prefix_read or _wants_prompt_logprobs(request):
            return Hit(0, nothing, was_asked=False)
        size, parts_at = self.block_size, 0
        for length in range((len(tokens) - 1) // size, 0, -1):
            tables = [self._hit_of_length(group, request, tokens, length * size) for group in range(len(self.groups))]
            if all(table is not None for table in tables):
                return Hit(length * size, [table for table in tables if table is not None], parts_at)
            without_windows = [table for table, spec in zip(tables, self.groups, strict=True) if not spec.window]
            if all(table is not None for table in without_windows):
                parts_at = max(parts_at, length * size)
        return Hit(0, nothing, parts_at)

    def _hit_of_length(self, group: int, request: Request, tokens: list[int], end: int) -> list[int] | None:
        spec, size = self.groups[group], self.block_size
        if spec.kind is KVGroupKind.CROSS:
            return []
        first, length = 0, end // size
        if spec.window:
            first = max(0, length - blocks_for(self.window(spec) - 1, size))
        table = [NULL] * first
        for index in range(first, length):
            found = self.pool.find(self.content(group, request, tokens, (index + 1) * size))
            if found is None:
                return None
            table.append(found)
        # A hit may reach into what the window no longer needs: those places stay empty.
        freed = self.behind_window(group, end)
        return [NULL] * freed + table[freed:]

    def record(self, request: Request, sequence: TwinSequence, confirmed: int) -> list[int]:
        """Full blocks up to `confirmed` tokens can be found from now on; return those that could not before."""
        new: list[int] = []
        if not self.caching:
            return new
        for group, spec in enumerate(self.groups):
            if spec.kind is KVGroupKind.CROSS:
                continue
            table, size = sequence.tables[group], self.block_size
            for index in range(sequence.hashed[group], min(confirmed // size, len(table))):
                content = self.content(group, request, sequence.tokens, (index + 1) * size)
                if table[index] != NULL and self.pool.record(table[index], content):
                    new.append(table[index])
                sequence.hashed[group] = index + 1
        return new

    # Room -----------------------------------------------------------------------------------------------------

    def window(self, spec: KVGroupSpec) -> int:
        """A state is freed when the block after its own is full."""
        return self.block_size + 1 if spec.kind is KVGroupKind.STATE else spec.window

    def behind_window(self, group: int, processed: int) -> int:
        """Leading blocks that no later token of this group attends to."""
        spec = self.groups[group]
        if not spec.window:
            return 0
        return max(0, processed - self.window(spec) + 1) // self.block_size

    def snapshots(self, num_prompt: int, parts_at: int = 0) -> set[int]:
        """Blocks before which a sequence leaves its state because of its prompt."""
        return {(num_prompt - 1) // self.block_size, parts_at // self.block_size}

    def keeps(self, group: int, index: int, snapshots: set[int]) -> bool:
        """Whether the full block is still found when the sequence has gone on."""
        is_state = self.groups[group].kind is KVGroupKind.STATE
        return not is_state or (index + 1) % self.stride == 0 or index + 1 in snapshots

    def new_blocks(self, group: int, have: int, upto: int, snapshots: set[int], known: int | None = None) -> list[bool]:
        """Of each block after the first `have`, whether there is one: not of states that nothing reads.

        known: tokens before the drafts. With states, what is after these is left, and in the next block what is after
        all.
        """
        want = last = blocks_for(upto, self.block_size)
        if self.has_states and known is not None and known < upto:
            last = blocks_for(known, self.block_size)
            want = last + 1
        return [self.keeps(group, index, snapshots) or index >= last - 1 for index in range(have, want)]

    def keep_drafted(self, sequence: TwinSequence, num_drafts: int) -> None:
        """All were right: the state after them is that of the sequence."""
        size, known = self.block_size, sequence.computed - num_drafts
        before = (known - 1) // size
        for group, spec in enumerate(self.groups):
            if spec.kind is KVGroupKind.STATE:
                table = sequence.tables[group]
                if (sequence.computed - 1) // size == before:
                    table[before], table[before + 1] = table[before + 1], table[before]
                elif known % size:
                    self.pool.free_blocks([table[before]])
                    table[before] = NULL

    def release_behind_windows(self, sequence: TwinSequence) -> None:
        for group in range(len(self.groups)):
            table = sequence.tables[group]
            last = min(self.behind_window(group, sequence.computed - sequence.in_flight), len(table))
            passed = [table[index] for index in range(last) if not self.keeps(group, index, sequence.snapshots)]
            # One that another row still reads goes when that row has passed it.
            self.pool.forget_blocks(one for one in passed if one != NULL and self.pool.blocks[one].references == 1)
            self.pool.free_blocks(table[index] for index in range(last - 1, -1, -1))
            for index in range(last):
                table[index] = NULL

    def admission_need(self, request: Request, tokens: int, hit: "Hit", capped: bool) -> Need:
        """Blocks that a new request takes from the free list for `tokens`, including free blocks that are cached.

        capped: count for a window group no more than it can ever hold at once.
        """
        need = self.nothing()
        for group, spec in enumerate(self.groups):
            if spec.kind is KVGroupKind.CROSS:
                need[self.pool_of[group]] += blocks_for(request.encoder_len, self.block_size)
                continue
            table, snapshots = hit.tables[group], self.snapshots(request.num_prompt_tokens, hit.parts_at)
            want = sum(self.new_blocks(group, len(table), tokens, snapshots))
            want += len({block for block in table if block != NULL and self.pool.is_free(block)})
            need[self.pool_of[group]] += min(want, self._most_held(group, tokens)) if capped else want
        return need

    def most_need(self, request: Request, tokens: int) -> Need:
        """Most blocks that a sequence holds at once while it grows to `tokens` tokens."""
        need = self.nothing()
        for group, spec in enumerate(self.groups):
            is_cross = spec.kind is KVGroupKind.CROSS
            of_encoder = blocks_for(request.encoder_len, self.block_size)
            need[self.pool_of[group]] += of_encoder if is_cross else self._most_held(group, tokens)
        return need

    def nothing(self) -> Need:
        return [0] * len(self.pool.sizes)

    def _most_held(self, group: int, tokens: int) -> int:
        """Blocks that a sequence of so many tokens holds at once."""
        spec, most = self.groups[group], blocks_for(tokens, self.block_size)
        if spec.window:
            most = min(most, blocks_for(self.window(spec) - 1 + self.max_in_flight, self.block_size) + 1)
        if spec.kind is KVGroupKind.STATE and self.stride > 1:
            # Of two blocks and the prompt's two, and of what is in flight: every `stride`th and the last of each chunk.
            of_chunks = blocks_for(min(tokens, self.max_in_flight), self.stride * self.block_size) + self.depth
            most = min(most, 4 + of_chunks)
        return most

    def growth_need(self, sequence: TwinSequence, upto: int, known: int) -> Need:
        """New blocks so that the sequence has slots for `upto` tokens, with a copy of a shared block it writes to."""
        need = self.num_missing(sequence, upto, known)
        for group, spec in enumerate(self.groups):
            if spec.kind is not KVGroupKind.CROSS and self._shared_write(sequence, group) is not None:
                need[self.pool_of[group]] += 1
        return need

    def num_missing(self, sequence: TwinSequence, upto: int, known: int | None = None) -> Need:
        """New blocks so that the sequence has slots for `upto` tokens."""
        need = self.nothing()
        for group, spec in enumerate(self.groups):
            if spec.kind is not KVGroupKind.CROSS:
                new = self.new_blocks(group, len(sequence.tables[group]), upto, sequence.snapshots, known)
                need[self.pool_of[group]] += sum(new)
        return need

    def _shared_write(self, sequence: TwinSequence, group: int) -> int | None:
        """The place of the shared block that the next token would be written into, if there is one."""
        index = sequence.computed // self.block_size
        table = sequence.tables[group]
        if index < len(table) and table[index] != NULL and self.pool.blocks[table[index]].references > 1:
            return index
        return None

    def adopt(self, request: Request, sequence: TwinSequence, hit: "Hit") -> None:
        sequence.snapshots = self.snapshots(sequence.num_prompt, hit.parts_at)
        for group, table in enumerate(hit.tables):
            self.pool.share(table)
            sequence.tables[group] = list(table)
            sequence.hashed[group] = len(table)
        for group, spec in enumerate(self.groups):
            if spec.kind is KVGroupKind.CROSS:
                sequence.tables[group] = self.pool.take(
                    blocks_for(request.encoder_len, self.block_size), self.pool_of[group]
                )

    def grow(self, sequence: TwinSequence, upto: int, known: int | None = None) -> None:
        for group, spec in enumerate(self.groups):
            if spec.kind is KVGroupKind.CROSS:
                continue
            table = sequence.tables[group]
            index = self._shared_write(sequence, group)
            if index is not None:
                [fresh] = self.pool.take(1, self.pool_of[group])
                self.copies.append(sequence)
                self.copied.append((self.pool.blocks[table[index]].stamp, self.pool.blocks[fresh].stamp))
                self.pool.free_blocks([table[index]])
                table[index] = fresh
            new = self.new_blocks(group, len(table), upto, sequence.snapshots, known)
            taken = iter(self.pool.take(sum(new), self.pool_of[group]))
            table.extend(next(taken) if is_there else NULL for is_there in new)

    def call_off_copies(self, sequences: list[TwinSequence]) -> None:
        """They do not run in this step: nothing is copied for them."""
        self.copies = [one for one in self.copies if one not in sequences]

    def fork(self, source: TwinSequence, child: TwinSequence) -> None:
        """`child` shares every block of `source`, and is as far as it is."""
        child.computed = source.computed  # what is in flight is the source's alone
        child.placeholders = source.placeholders
        self.share_prefix(source, child, source.computed)

    def share_prefix(self, source: TwinSequence, child: TwinSequence, tokens: int) -> None:
        """`child`, which has nothing, shares the blocks of the first `tokens` tokens, and the cross-attention ones."""
        child.snapshots = source.snapshots
        for group, spec in enumerate(self.groups):
            table, count = source.tables[group], blocks_for(tokens, self.block_size)
            child.tables[group] = list(table if spec.kind is KVGroupKind.CROSS else table[:count])
            self.pool.share(child.tables[group])
            child.hashed[group] = min(source.hashed[group], tokens // self.block_size)

    def sibling_need(self, state: TwinRequest) -> Need:
        """Blocks of the other sequences than the first, after the full prompt blocks that all share."""
        shared, need = state.request.num_prompt_tokens // self.block_size * self.block_size, self.nothing()
        for sequence in state.alive[1:]:
            for group, spec in enumerate(self.groups):
                if spec.kind is not KVGroupKind.CROSS:
                    need[self.pool_of[group]] += self._most_held(group, len(sequence.tokens) - shared)
        return need

    # Host memory ----------------------------------------------------------------------------------------------

    def _parked(self, sequence: TwinSequence) -> list[list[int]]:
        """Per group, the table entries that hold KV."""
        return [
            list(table) if spec.kind is KVGroupKind.CROSS else table[: blocks_for(sequence.computed, self.block_size)]
            for spec, table in zip(self.groups, sequence.tables, strict=True)
        ]

    def host_need(self, sequences: list[TwinSequence]) -> Need:
        parked = {block for sequence in sequences for table in self._parked(sequence) for block in table} - {NULL}
        return self._by_pool(parked, self.pool)

    def _by_pool(self, numbers: set[int], pool: Pool) -> Need:
        need = self.nothing()
        for number in numbers:
            need[pool.blocks[number].pool] += 1
        return need

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
                        [moved[block]] = host.take(1, self.pool.blocks[block].pool)
                        there.append(moved[block])
                sequence.on_host.append(there)
            self.free(sequence)
        self.swapped_out += len(moved)
        return len(moved)

    def return_need(self, sequences: list[TwinSequence], uptos: list[int], host: Pool) -> Need:
        """Device blocks that bring the sequences back, with slots for `uptos` tokens and copies of shared tails."""
        distinct: set[int] = set()
        writers: Counter[int] = Counter()
        need = self.nothing()
        for sequence, upto in zip(sequences, uptos, strict=True):
            assert sequence.on_host is not None
            for group, (spec, table) in enumerate(zip(self.groups, sequence.on_host, strict=True)):
                distinct.update(block for block in table if block != NULL)
                if spec.kind is KVGroupKind.CROSS:
                    continue
                snapshots = self.snapshots(sequence.num_prompt)
                need[self.pool_of[group]] += sum(self.new_blocks(group, len(table), upto, snapshots))
                if sequence.computed % self.block_size and table[-1] != NULL:
                    writers[table[-1]] += 1
        # Each writer of a shared tail copies it, except one that is left alone with it.
        for block, count in writers.items():
            need[host.blocks[block].pool] += min(count, host.blocks[block].references - 1)
        return total(need, self._by_pool(distinct, host))

    def swap_in(self, sequences: list[TwinSequence], host: Pool) -> int:
        """Return how many blocks move."""
        moved: dict[int, int] = {}
        for sequence in sequences:
            assert sequence.on_host is not None
            sequence.snapshots = self.snapshots(sequence.num_prompt)
            for group, there in enumerate(sequence.on_host):
                table: list[int] = []
                for block in there:
                    if block == NULL:
                        table.append(NULL)
                    elif block in moved:
                        self.pool.share([moved[block]])
                        table.append(moved[block])
                    else:
                        [moved[block]] = self.pool.take(1, self.pool_of[group])
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
