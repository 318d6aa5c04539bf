"""Blocks as plain objects: a free list, reference counts, and a dict of what full blocks hold."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

NULL = 0


@dataclass
class Block:
    number: int
    references: int = 0
    content: Hashable | None = None  # what a full block holds, if it may be found by it
    times_taken: int = 0

    @property
    def stamp(self) -> tuple[int, int]:
        """The block from when it was taken to when it is taken again."""
        return self.number, self.times_taken


class Pool:
    """`free` is a list in the order of reuse: blocks without content first, then the longest unused."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = {number: Block(number) for number in range(1, num_blocks + 1)}
        self.free = [self.blocks[number] for number in range(1, num_blocks + 1)]
        self.known: dict[Hashable, list[int]] = {}  # content -> blocks that hold it, first recorded first

    def __len__(self) -> int:
        return len(self.blocks)

    def take(self, count: int) -> list[int]:
        """Blocks to write into. What they held can no longer be found."""
        assert count <= len(self.free)
        taken = [self.free.pop(0) for _ in range(count)]
        for block in taken:
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

    def _forget(self, block: Block) -> None:
        if block.content is not None:
            self.known[block.content].remove(block.number)
            block.content = None
