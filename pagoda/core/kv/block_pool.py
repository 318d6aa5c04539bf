"""BlockPools: reference counts and free blocks of one memory tier. They know nothing of tokens, rows or hashes."""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import TypeAlias

import numpy as np

from pagoda.base.errors import InvariantBroken
from pagoda.core.request import Pin

NO_BLOCKS = np.empty(0, np.int32)
PIN_SHARE = 4
"""One owner's pins keep at most the fourth part of a pool."""

BlockCounts: TypeAlias = tuple[int, ...]
"""Numbers of blocks, one per pool."""


class _AgeOrder:
    """Free blocks in the order in which they were freed: a log with tombstones.

    `_log` holds block ids, and `_place[block]` is the position of the block's valid entry in it. Taking a block from
    the middle clears its place; no links are walked. The log is compacted when it is full, which costs O(1) per block.
    """

    def __init__(self, num_blocks: int, size: int) -> None:
        self._log = np.empty(2 * num_blocks + 64, np.int32)
        self._place = np.zeros(size, np.int64)  # log position + 1; 0 means "not in the log" (zeros cost no start time)
        self._head = self._tail = self._num_valid = 0

    def __len__(self) -> int:
        return self._num_valid

    def ids(self) -> np.ndarray:
        """Return the blocks, oldest first."""
        ids = self._log[self._head : self._tail]
        return ids[self._place[ids] == np.arange(self._head + 1, self._tail + 1)]

    def append(self, blocks: np.ndarray) -> None:
        if self._tail + len(blocks) > len(self._log):
            self._compact()
        stop = self._tail + len(blocks)
        self._log[self._tail : stop] = blocks
        self._place[blocks] = np.arange(self._tail + 1, stop + 1)
        self._tail = stop
        self._num_valid += len(blocks)

    def take_oldest(self, count: int) -> np.ndarray:
        """Remove the `count` oldest blocks, of at least as many. Return them."""
        found: list[np.ndarray] = [NO_BLOCKS]
        wanted = count
        while wanted:
            stop = min(self._head + max(2 * wanted, 32), self._tail)
            ids = self._log[self._head : stop]
            valid = np.flatnonzero(self._place[ids] == np.arange(self._head + 1, stop + 1))[:wanted]
            if len(valid) == wanted:
                stop = self._head + int(valid[-1]) + 1
            found.append(ids[valid].copy())
            wanted -= len(valid)
            self._head = stop
        oldest = np.concatenate(found) if len(found) > 2 else found[-1]
        self._place[oldest] = 0
        self._num_valid -= count
        return oldest

    def remove(self, blocks: np.ndarray) -> np.ndarray:
        """Remove those of `blocks` that are in it. Return them."""
        if not self._num_valid:
            return NO_BLOCKS
        found = blocks[self._place[blocks] != 0]
        self._place[found] = 0
        self._num_valid -= len(found)
        return found

    def _compact(self) -> None:
        """Move the valid entries of the log to its front. They are at most half of it, so this is rare."""
        valid = self.ids()
        self._head, self._tail = 0, len(valid)
        self._log[: self._tail] = valid
        self._place[valid] = np.arange(1, self._tail + 1)


class _FreeBlocks:
    """The free blocks of one pool. Each is in one of three places, of which the first that is not empty gives blocks:

    - a stack of the blocks without content;
    - a log of the blocks whose KV can still be found by its hash, the one freed first at its head;
    - a log of the same kind for pinned blocks. A pin thus changes which blocks lose their content first, nothing else.

    ids: `first` .. `end - 1`.
    """

    def __init__(self, first: int, end: int, size: int) -> None:
        """size: of what is indexed by block ids, those of other pools included."""
        self.first, self.end = first, end
        self._stack = np.arange(end - 1, first - 1, -1, dtype=np.int32)
        self._num_stacked = end - first
        self.unpinned, self.pinned = _AgeOrder(end - first, size), _AgeOrder(end - first, size)

    def __len__(self) -> int:
        return self._num_stacked + len(self.unpinned) + len(self.pinned)

    @property
    def stacked(self) -> np.ndarray:
        """Those without content."""
        return self._stack[: self._num_stacked]

    def push(self, blocks: np.ndarray) -> None:
        """Keep blocks without content."""
        self._num_stacked += len(blocks)
        self.stacked[self._num_stacked - len(blocks) :] = blocks

    def take(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Remove `count` blocks, of at least as many. Return those without and those with content."""
        fresh = min(count, self._num_stacked)
        self._num_stacked -= fresh
        taken, evicted = self._stack[self._num_stacked : self._num_stacked + fresh].copy(), NO_BLOCKS
        if fresh < count:
            evicted = self.unpinned.take_oldest(min(count - fresh, len(self.unpinned)))
            if fresh + len(evicted) < count:
                evicted = np.concatenate((evicted, self.pinned.take_oldest(count - fresh - len(evicted))))
        return taken, evicted

    def start_over(self) -> None:
        """Give blocks out as at first. All must be here, without content."""
        self._stack[::-1].sort()


class BlockPools:
    """Reference counts and free blocks of one tier (device or host). Every operation works on whole arrays of blocks.

    A tier has a pool for each kind of block (see KVGroupSpec), of `num_blocks` blocks each, numbered from `first_id`
    on, one pool after the other; so a block's id tells its pool. Ids below `first_id` are never allocated (the null
    block).

    ref_count: int32, by block id.   has_content: bool, it can be found by its hash.
    pinned_until: int64, the second of the engine's clock at which the block's pin ends; 0: no pin.
    has_pins: whether a block may be pinned.
    """

    def __init__(self, num_blocks: BlockCounts, first_id: int = 1) -> None:
        self.num_blocks = num_blocks
        self.first_id = first_id
        *firsts, size = accumulate(num_blocks, initial=first_id)
        self._free = [_FreeBlocks(first, first + count, size) for first, count in zip(firsts, num_blocks, strict=True)]
        self.ref_count = np.zeros(size, np.int32)
        self.has_content = np.zeros(size, np.bool_)
        self.pinned_until = np.zeros(size, np.int64)
        self._second = 0
        self._owner = np.zeros(size, np.int32)  # of a pinned block: number of its owner
        self._owners: dict[tuple[int, str], int] = {}  # by pool
        self._num_pinned: Counter[int] = Counter()  # blocks by owner
        self.has_pins = False

    @property
    def num_free(self) -> BlockCounts:
        """Blocks of each pool that can be allocated now, those that still hold content included."""
        return tuple([len(free) for free in self._free])

    def count(self, blocks: np.ndarray) -> BlockCounts:
        """Return how many of `blocks` are of each pool."""
        return tuple(np.bincount(self.pool_of(blocks), minlength=len(self._free)).tolist())

    def pool_of(self, blocks: np.ndarray) -> np.ndarray:
        """Return the number of each block's pool."""
        return np.searchsorted([free.first for free in self._free[1:]], blocks, side="right")

    def _by_pool(self, blocks: np.ndarray) -> list[tuple[_FreeBlocks, np.ndarray]]:
        if len(self._free) == 1:
            return [(self._free[0], blocks)]
        return [(free, blocks[(blocks >= free.first) & (blocks < free.end)]) for free in self._free]

    def allocate(self, pool: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Allocate `count` blocks with one reference each. Return (allocated, evicted), int32.

        `evicted` are those of `allocated` that held content: the prefix cache must remove them.
        The caller checks `num_free` first; raises InvariantBroken if too few are free.
        """
        free = self._free[pool]
        if count > len(free):
            raise InvariantBroken(f"cannot allocate {count} blocks: {len(free)} are free")
        taken, evicted = free.take(count)
        if len(evicted):
            self._drop_pins(evicted)
            self.has_content[evicted] = False
            taken = np.concatenate((taken, evicted)) if len(taken) else evicted
        self.ref_count[taken] = 1
        return taken, evicted

    def touch(self, blocks: np.ndarray) -> None:
        """Add a reference to each of `blocks` (distinct ids); free ones are free no more."""
        if len(blocks):
            unreferenced = blocks[self.ref_count[blocks] == 0]
            for free in self._free:
                free.unpinned.remove(unreferenced)
                free.pinned.remove(unreferenced)
            self.ref_count[blocks] += 1

    def add_references(self, blocks: np.ndarray, counts: np.ndarray) -> None:
        """Add `counts[i]` references to `blocks[i]`, which has one already. Distinct ids."""
        self.ref_count[blocks] += counts.astype(np.int32)

    def free(self, blocks: np.ndarray) -> None:
        """Drop one reference of each of `blocks` (distinct ids). Blocks with none left become free in this order.

        Callers pass the tail of a table first, so that the deepest blocks of a prefix are evicted first.
        """
        left = self.ref_count[blocks] - 1
        if len(left) and left.min() < 0:
            raise InvariantBroken(f"free blocks were freed again: {blocks[left < 0].tolist()}")
        self.ref_count[blocks] = left
        for free, of_pool in self._by_pool(blocks[left == 0]):
            keep = self.has_content[of_pool]
            if keep.any():  # as the youngest ones
                kept, of_pool = of_pool[keep], of_pool[~keep]
                if self.has_pins:
                    is_pinned = self.pinned_until[kept] > 0
                    free.pinned.append(kept[is_pinned])
                    kept = kept[~is_pinned]
                free.unpinned.append(kept)
            free.push(of_pool)

    def note_content(self, blocks: Sequence[int]) -> None:
        """`blocks`, which are referenced, can be found by hash from now on."""
        self.has_content[blocks] = True

    def drop_content(self, blocks: np.ndarray) -> None:
        """`blocks` cannot be found by hash any more; free ones move to the stack of their pool."""
        self.has_content[blocks] = False
        self._drop_pins(blocks)
        for free in self._free:
            free.push(np.concatenate((free.unpinned.remove(blocks), free.pinned.remove(blocks))))

    def start_over(self) -> None:
        """Give blocks out as at first. All must be free and without content."""
        for free in self._free:
            free.start_over()
        self.has_pins = False

    # Pins

    def pin(self, blocks: np.ndarray, pin: Pin, *, partly: bool) -> int:
        """Pin those of `blocks` (distinct ids, referenced) that have content. Return how many of them are pinned.

        If that is more than its owner may have of a pool, its least recently used free blocks lose their pins.
        partly: if it is more even so, pin the first ones; else none, and no block loses its pin.
        Of the last pool, which is the smallest, first: if none of it is pinned, the others' are of no use.
        """
        num_pinned = 0
        for pool, (free, of_pool) in reversed(list(enumerate(self._by_pool(blocks[self.has_content[blocks]])))):
            new = self._pin_in(pool, free, of_pool, pin, partly=partly)
            num_pinned += new
            if not new:
                break
        return num_pinned

    def _pin_in(self, pool: int, free: _FreeBlocks, blocks: np.ndarray, pin: Pin, *, partly: bool) -> int:
        owner = self._owners.setdefault((pool, pin.owner), len(self._owners))
        has_pin = self.pinned_until[blocks] > 0
        room = self.num_blocks[pool] // PIN_SHARE - self._num_pinned[owner]
        num_new = len(blocks) - np.count_nonzero(has_pin)
        if num_new > room:
            ids = free.pinned.ids()
            own = ids[self._owner[ids] == owner][: num_new - room]
            if not partly and num_new > room + len(own):
                return 0
            self._unpin(own)
            room += len(own)
        kept = has_pin | (np.cumsum(~has_pin) <= room)
        new, blocks = blocks[kept & ~has_pin], blocks[kept]
        self._owner[new] = owner
        self._num_pinned[owner] += len(new)
        self.pinned_until[blocks] = np.maximum(self.pinned_until[blocks], self._second + pin.ttl_s)
        self.has_pins |= len(new) > 0
        return len(blocks)

    def end_pins(self, now_s: float) -> None:
        """It is `now_s` on the engine's clock: end the pins whose time has passed. Free blocks that lose theirs
        move to the end of the unpinned log."""
        second, before = int(now_s), self._second
        self._second = second
        if self.has_pins and second != before:
            ids = np.concatenate([free.pinned.ids() for free in self._free])
            self._unpin(ids[self.pinned_until[ids] <= second])
            self._drop_pins(np.flatnonzero(self.pinned_until <= second))
            self.has_pins = any(self._num_pinned.values())

    def _unpin(self, blocks: np.ndarray) -> None:
        """End the pins of free blocks."""
        self._drop_pins(blocks)
        for free in self._free:
            free.unpinned.append(free.pinned.remove(blocks))

    def _drop_pins(self, blocks: np.ndarray) -> None:
        if self.has_pins:
            pinned = blocks[self.pinned_until[blocks] > 0]
            self.pinned_until[pinned] = 0
            self._num_pinned.subtract(self._owner[pinned].tolist())

    def check(self) -> None:
        """Check that every block is free or referenced, never both. Raises InvariantBroken."""
        for free in self._free:
            kept = np.concatenate((free.unpinned.ids(), free.pinned.ids()))
            ids = np.concatenate((free.stacked, kept))
            if len(ids) != len(free) or len(np.unique(ids)) != len(ids):
                raise InvariantBroken("a block is free twice")
            unreferenced = np.flatnonzero(self.ref_count[free.first : free.end] == 0) + free.first
            if sorted(ids.tolist()) != unreferenced.tolist():
                raise InvariantBroken("a block is free and referenced, or neither")
            if self.has_content[free.stacked].any() or not self.has_content[kept].all():
                raise InvariantBroken("a free block with content is among those without, or the other way round")
            if self.pinned_until[free.unpinned.ids()].any() or not self.pinned_until[free.pinned.ids()].all():
                raise InvariantBroken("a pinned block is among those that are not, or the other way round")
        self._check_pins()

    def _check_pins(self) -> None:
        has_pin = self.pinned_until > 0
        if (has_pin & ~self.has_content).any() or (self.pinned_until[has_pin] <= self._second).any():
            raise InvariantBroken("a block is pinned that has no content, or whose time has passed")
        counted = Counter(self._owner[has_pin].tolist())
        most = {owner: self.num_blocks[pool] // PIN_SHARE for (pool, _), owner in self._owners.items()}
        if counted != +self._num_pinned or any(count > most[owner] for owner, count in counted.items()):
            raise InvariantBroken("an owner has more pins than it may have, or than are counted")
