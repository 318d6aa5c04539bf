"""BlockPools against a pool made of plain lists: same counts, same order, over random operations."""

import random

import numpy as np
import pytest

from pagoda.base.errors import InvariantBroken
from pagoda.core.kv.block_pool import BlockPools


class PlainPool:
    """The definition: a stack of empty blocks, a list of free blocks with content, oldest first."""

    def __init__(self, num_blocks: int) -> None:
        self.stack = list(range(num_blocks, 0, -1))
        self.cached: list[int] = []
        self.references = dict.fromkeys(range(1, num_blocks + 1), 0)
        self.content: set[int] = set()

    def allocate(self, count: int) -> list[int]:
        taken = [self.stack.pop() if self.stack else self.cached.pop(0) for _ in range(count)]
        self.content -= set(taken)
        self.references.update(dict.fromkeys(taken, 1))
        return taken

    def touch(self, blocks: list[int]) -> None:
        for block in blocks:
            if self.references[block] == 0:
                self.cached.remove(block)
            self.references[block] += 1

    def free(self, blocks: list[int]) -> None:
        for block in blocks:
            self.references[block] -= 1
            if self.references[block] == 0:
                (self.cached if block in self.content else self.stack).append(block)


@pytest.mark.parametrize("seed", range(20))
def test_pool_equals_plain_lists(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice([3, 8, 33])
    pool, plain = BlockPools((size,)), PlainPool(size)
    held: list[int] = []
    for _ in range(400):
        action = rng.choice(["allocate", "free", "touch", "content"])
        if action == "allocate":
            count = rng.randint(0, min(4, pool.num_free[0]))
            had_content = set(plain.content)
            expected = plain.allocate(count)
            taken, evicted = pool.allocate(0, count)
            assert sorted(taken.tolist()) == sorted(expected)
            assert set(evicted.tolist()) == had_content & set(expected)
            held += expected
        elif action == "free" and held:
            blocks = rng.sample(sorted(set(held)), rng.randint(1, min(4, len(set(held)))))
            for block in blocks:
                held.remove(block)
            # The stack's order inside one call is not promised: give the plain pool what the real one does.
            plain.free(blocks)
            pool.free(np.array(blocks, np.int32))
        elif action == "touch":
            known = [block for block in plain.references if plain.references[block] or block in plain.cached]
            blocks = rng.sample(known, min(len(known), rng.randint(1, 3)))
            plain.touch(blocks)
            pool.touch(np.array(blocks, np.int32))
            held += blocks
        elif action == "content" and held:
            block = rng.choice(held)
            plain.content.add(block)
            pool.has_content[block] = True
        pool.check()
        assert pool.num_free[0] == len(plain.stack) + len(plain.cached)
        assert pool.ref_count[1:].tolist() == list(plain.references.values())


def test_cached_blocks_are_allocated_last_and_oldest_first() -> None:
    pool = BlockPools((6,))
    first, _ = pool.allocate(0, 3)
    second, _ = pool.allocate(0, 2)
    pool.has_content[first] = pool.has_content[second] = True
    pool.free(first[::-1])
    pool.free(second[::-1])
    taken, evicted = pool.allocate(0, 4)
    assert taken.tolist()[1:] == first[::-1].tolist()
    assert evicted.tolist() == first[::-1].tolist()
    assert pool.num_free[0] == 2


def test_a_hit_makes_a_block_the_most_recently_used() -> None:
    pool = BlockPools((3,))
    blocks, _ = pool.allocate(0, 3)
    pool.has_content[blocks] = True
    pool.free(blocks)
    pool.touch(blocks[:1])
    pool.free(blocks[:1])
    assert pool.allocate(0, 3)[0].tolist() == [*blocks[1:].tolist(), int(blocks[0])]


def test_freeing_a_free_block_is_a_defect() -> None:
    pool = BlockPools((2,))
    blocks, _ = pool.allocate(0, 1)
    pool.free(blocks)
    with pytest.raises(InvariantBroken, match="freed again"):
        pool.free(blocks)


def test_taking_more_than_is_free_is_a_defect() -> None:
    with pytest.raises(InvariantBroken, match="cannot allocate 3 blocks: 2 are free"):
        BlockPools((2,)).allocate(0, 3)


def test_dropped_content_is_free_without_being_evicted() -> None:
    pool = BlockPools((4,))
    blocks, _ = pool.allocate(0, 4)
    pool.has_content[blocks] = True
    pool.free(blocks)
    pool.drop_content(blocks[:2])
    pool.check()
    assert len(pool.allocate(0, 2)[1]) == 0
    pool.drop_content(np.flatnonzero(pool.has_content))
    pool.check()
    assert len(pool.allocate(0, 2)[1]) == 0
