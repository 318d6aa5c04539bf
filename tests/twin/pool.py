"""Blocks as plain objects: a free list, reference counts, and a dict of what full blocks hold."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

NULL = 0


@dataclass
class Block:
    number: int
    pool: int = 0
    references: int = 0
    content: Hashable | None = None  # what a full block holds, if it may be found by it
    times_taken: int = 0
    pinned_until: int = 0  # a second; 0: not pinned
    owner: str = ""  # of the pin

    @property
    def stamp(self) -> tuple[int, int]:
        """The block from when it was taken to when it is taken again."""
        return self.number, self.times_taken


class Pool:
    """`free` is a list of the longest unused first. Blocks without content are reused first, pinned ones last.

    sizes: blocks of attention, and of states if they have a pool of their own; numbered one after the other.
    """

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        pools = [pool for pool, size in enumerate(sizes) for _ in range(size)]
        self.blocks = {number: Block(number, pool) for number, pool in enumerate(pools, start=1)}
        self.free = list(self.blocks.values())
        self.known: dict[Hashable, list[int]] = {}  # content -> blocks that hold it, first recorded first

    def num_free(self) -> list[int]:
        return [sum(block.pool == pool for block in self.free) for pool in range(len(self.sizes))]

    def take(self, count: int, pool: int) -> list[int]:
        """Blocks to write into. What they held can no longer be found."""
        taken: list[Block] = []
        for _ in range(count):
            free = [block for block in self.free if block.pool == pool]
            block = min(free, key=lambda one: (one.content is not None, one.pinned_until > 0))
            self.free.remove(block)
            taken.append(block)
            assert block.references == 0
            block.references = 1
            block.times_taken += 1
            self._forget(block)
        return [block.number for block in taken]

    def share(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            if number == NULL:
                continue
            block = self.blocks[number]
            if block.references == 0:
                self.free.remove(block)
            block.references += 1

    def free_blocks(self, numbers: Iterable[int]) -> None:
        """Drop one reference each. Of those that have none left, the first of `numbers` is reused first."""
        plain: list[Block] = []
        findable: list[Block] = []
        for number in numbers:
            if number == NULL:
                continue
            block = self.blocks[number]
            assert block.references > 0
            block.references -= 1
            if block.references == 0:
                (plain if block.content is None else findable).append(block)
        self.free[:0] = plain
        self.free.extend(findable)

    def record(self, number: int, content: Hashable) -> bool:
        """Whether the block did not hold anything before."""
        block = self.blocks[number]
        if block.content is not None:
            return False
        block.content = content
        self.known.setdefault(content, []).append(number)
        return True

    def find(self, content: Hashable) -> int | None:
        return next(iter(self.known.get(content, ())), None)

    @property
    def contents(self) -> list[Hashable]:
        """All that can be found."""
        return [content for content, blocks in self.known.items() if blocks]

    def is_free(self, number: int) -> bool:
        return self.blocks[number].references == 0

    def forget_contents(self) -> bool:
        """Only while nothing is in use."""
        if any(block.references for block in self.blocks.values()):
            return False
        for block in self.blocks.values():
            self._forget(block)
        return True

    def forget_blocks(self, numbers: Iterable[int]) -> None:
        """What these blocks hold can no longer be found; free ones are reused first."""
        for number in numbers:
            block = self.blocks[number]
            if block.content is not None:
                self._forget(block)
                if block.references == 0:
                    self.free.remove(block)
                    self.free.insert(0, block)

    def pin(self, numbers: list[int], owner: str, until: int, *, partly: bool) -> int:
        """Pin those that can be found; if the owner may not have as many, the first ones, or none if not `partly`.

        Return how many are pinned. Without its states, attention's blocks are of no use.
        """
        num_pinned = 0
        for pool in reversed(range(len(self.sizes))):
            of_pool = [number for number in numbers if self.blocks[number].pool == pool]
            if not (new := self._pin_in(pool, of_pool, owner, until, partly=partly)):
                break
            num_pinned += new
        return num_pinned

    def _pin_in(self, pool: int, numbers: list[int], owner: str, until: int, *, partly: bool) -> int:
        blocks = [self.blocks[number] for number in numbers]
        blocks = [block for block in blocks if block.content is not None]
        most, num_new = self.sizes[pool] // 4, sum(not block.pinned_until for block in blocks)
        give_way = [block for block in self.free if block.pool == pool and block.pinned_until and block.owner == owner]
        if not partly and self._num_pinned(owner, pool) - len(give_way) + num_new > most:
            return 0
        for block in give_way:
            if self._num_pinned(owner, pool) + num_new > most:
                self._unpin(block)
        num_pinned = 0
        for block in blocks:
            if not block.pinned_until and self._num_pinned(owner, pool) < most:
                block.owner, block.pinned_until = owner, until
            elif not block.pinned_until:
                continue
            block.pinned_until = max(block.pinned_until, until)
            num_pinned += 1
        return num_pinned

    def end_pins(self, second: int) -> None:
        in_use = [block for block in self.blocks.values() if block.references]
        for block in [*self.free, *in_use]:
            if 0 < block.pinned_until <= second:
                self._unpin(block)

    def _num_pinned(self, owner: str, pool: int) -> int:
        blocks = [block for block in self.blocks.values() if block.pool == pool]
        return sum(block.pinned_until > 0 and block.owner == owner for block in blocks)

    def _unpin(self, block: Block) -> None:
        """A free one is as young as if it became free now."""
        block.pinned_until = 0
        if block.references == 0:
            self.free.remove(block)
            self.free.append(block)

    def _forget(self, block: Block) -> None:
        block.pinned_until = 0
        if block.content is not None:
            self.known[block.content].remove(block.number)
            block.content = None
