"""BlockPool: reference counts and free blocks of one memory tier. It knows nothing of tokens, rows or hashes."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from pagoda.base.errors import InvariantBroken
from pagoda.core.request import Pin

NO_BLOCKS = np.empty(0, np.int32)
PIN_SHARE = 4
"""One owner's pins keep at most the fourth part of a pool."""


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


class BlockPool:
    """Reference counts and free blocks of one tier (device or host). Every operation works on whole arrays of blocks.

    A free block is in one of three places, and blocks are allocated from the first of them that is not empty:
    - a stack of the blocks without content;
    - a log of the blocks whose KV can still be found by its hash (`has_content`), the one freed first at its head;
    - a log of the same kind for pinned blocks. A pin thus changes which blocks lose their content first, nothing else.

    ids: `first_id` .. `first_id + num_blocks - 1`; ids below `first_id` are never allocated (the null block).
    ref_count: int32 [first_id + num_blocks].   has_content: bool, same length.
    pinned_until: int64, same length: the second of the engine's clock at which the block's pin ends; 0: no pin.
    has_pins: whether a block may be pinned.
    """

    def __init__(self, num_blocks: int, first_id: int = 1) -> None:
        size = first_id + num_blocks
        self.num_blocks = num_blocks
        self.first_id = first_id
        self.ref_count = np.zeros(size, np.int32)
        self.has_content = np.zeros(size, np.bool_)
        self.pinned_until = np.zeros(size, np.int64)
        self._stack = np.arange(size - 1, first_id - 1, -1, dtype=np.int32)
        self._num_stacked = num_blocks
        self._unpinned = _AgeOrder(num_blocks, size)
        self._pinned = _AgeOrder(num_blocks, size)
        self._second = 0
        self._owner = np.zeros(size, np.int32)  # of a pinned block: number of its owner
        self._owners: dict[str, int] = {}
        self._num_pinned: Counter[int] = Counter()  # blocks by owner
        self.has_pins = False

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, those that still hold content included."""
        return self._num_stacked + len(self._unpinned) + len(self._pinned)

    def allocate(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Allocate `count` blocks with one reference each. Return (allocated, evicted), int32.

        `evicted` are those of `allocated` that held content: the prefix cache must remove them.
        The caller checks `num_free` first; raises InvariantBroken if too few are free.
        """
        if count > self.num_free:
            raise InvariantBroken(f"cannot allocate {count} blocks: {self.num_free} are free")
        fresh = min(count, self._num_stacked)
        self._num_stacked -= fresh
        taken = self._stack[self._num_stacked : self._num_stacked + fresh].copy()
        evicted = NO_BLOCKS
        if fresh < count:
            num_unpinned = min(count - fresh, len(self._unpinned))
            evicted = self._unpinned.take_oldest(num_unpinned)
            if fresh + num_unpinned < count:
                pinned = self._pinned.take_oldest(count - fresh - num_unpinned)
                self._drop_pins(pinned)
                evicted = np.concatenate((evicted, pinned))
            self.has_content[evicted] = False
            taken = np.concatenate((taken, evicted)) if fresh else evicted
        self.ref_count[taken] = 1
        return taken, evicted

    def touch(self, blocks: np.ndarray) -> None:
        """Add a reference to each of `blocks` (distinct ids); free ones are free no more."""
        if len(blocks):
            free = blocks[self.ref_count[blocks] == 0]
            self._unpinned.remove(free)
            self._pinned.remove(free)
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
        free = blocks[left == 0]
        keep = self.has_content[free]
        if keep.any():
            self._file(free[keep])
            free = free[~keep]
        self._push(free)

    def note_content(self, blocks: Sequence[int]) -> None:
        """`blocks`, which are referenced, can be found by hash from now on."""
        self.has_content[blocks] = True

    def drop_content(self, blocks: np.ndarray) -> None:
        """`blocks` cannot be found by hash any more; free ones move to the stack."""
        self.has_content[blocks] = False
        self._drop_pins(blocks)
        self._push(np.concatenate((self._unpinned.remove(blocks), self._pinned.remove(blocks))))

    def drop_all_content(self) -> None:
        """No block can be found by hash any more. All must be free."""
        self.drop_content(np.concatenate((self._unpinned.ids(), self._pinned.ids())))

    def start_over(self) -> None:
        """Give blocks out as at first. All must be free and without content."""
        self._stack[::-1].sort()
        self.has_pins = False

    def _push(self, blocks: np.ndarray) -> None:
        count = len(blocks)
        self._stack[self._num_stacked : self._num_stacked + count] = blocks
        self._num_stacked += count

    def _file(self, blocks: np.ndarray) -> None:
        """Keep free blocks with content as the youngest ones."""
        if self.has_pins:
            is_pinned = self.pinned_until[blocks] > 0
            self._pinned.append(blocks[is_pinned])
            blocks = blocks[~is_pinned]
        self._unpinned.append(blocks)

    # Pins

    def pin(self, blocks: np.ndarray, pin: Pin, *, partly: bool) -> int:
        """Pin those of `blocks` (distinct ids, referenced) that have content. Return how many of them are pinned.

        If that is more than its owner may have, its least recently used free blocks lose their pins.
        partly: if it is more even so, pin the first ones; else none, and no block loses its pin.
        """
        until, blocks = self._second + pin.ttl_s, blocks[self.has_content[blocks]]
        owner = self._owners.setdefault(pin.owner, len(self._owners))
        has_pin = self.pinned_until[blocks] > 0
        room = self.num_blocks // PIN_SHARE - self._num_pinned[owner]
        num_new = len(blocks) - np.count_nonzero(has_pin)
        if num_new > room:
            free = self._pinned.ids()
            own = free[self._owner[free] == owner][: num_new - room]
            if not partly and num_new > room + len(own):
                return 0
            room += self._unpin(own)
        kept = has_pin | (np.cumsum(~has_pin) <= room)
        new, blocks = blocks[kept & ~has_pin], blocks[kept]
        self._owner[new] = owner
        self._num_pinned[owner] += len(new)
        self.pinned_until[blocks] = np.maximum(self.pinned_until[blocks], until)
        self.has_pins |= len(new) > 0
        return len(blocks)

    def end_pins(self, now_s: float) -> None:
        """It is `now_s` on the engine's clock: end the pins whose time has passed. Free blocks that lose theirs
        move to the end of the unpinned log."""
        second, before = int(now_s), self._second
        self._second = second
        if self.has_pins and second != before:
            free = self._pinned.ids()
            self._unpin(free[self.pinned_until[free] <= second])
            self._drop_pins(np.flatnonzero(self.pinned_until <= second))
            self.has_pins = any(self._num_pinned.values())

    def _unpin(self, free: np.ndarray) -> int:
        """End the pins of free blocks. Return how many these are."""
        self._drop_pins(free)
        self._unpinned.append(self._pinned.remove(free))
        return len(free)

    def _drop_pins(self, blocks: np.ndarray) -> None:
        if self.has_pins:
            pinned = blocks[self.pinned_until[blocks] > 0]
            self.pinned_until[pinned] = 0
            self._num_pinned.subtract(self._owner[pinned].tolist())

    def check(self) -> None:
        """Check that every block is free or referenced, never both. Raises InvariantBroken."""
        stacked = self._stack[: self._num_stacked]
        unpinned, pinned = self._unpinned.ids(), self._pinned.ids()
        kept = np.concatenate((unpinned, pinned))
        free = np.concatenate((stacked, kept))
        if len(free) != self.num_free or len(np.unique(free)) != len(free):
            raise InvariantBroken("a block is free twice")
        if self.ref_count[free].any() or len(free) != np.count_nonzero(self.ref_count[self.first_id :] == 0):
            raise InvariantBroken("a block is free and referenced, or neither")
        if self.has_content[stacked].any() or not self.has_content[kept].all():
            raise InvariantBroken("a free block with content is among those without, or the other way round")
        self._check_pins(unpinned, pinned)

    def _check_pins(self, unpinned: np.ndarray, pinned: np.ndarray) -> None:
        if self.pinned_until[unpinned].any() or not self.pinned_until[pinned].all():
            raise InvariantBroken("a pinned block is among those that are not, or the other way round")
        has_pin = self.pinned_until > 0
        if (has_pin & ~self.has_content).any() or (self.pinned_until[has_pin] <= self._second).any():
            raise InvariantBroken("a block is pinned that has no content, or whose time has passed")
        counted = Counter(self._owner[has_pin].tolist())
        if counted != +self._num_pinned or max(counted.values(), default=0) > self.num_blocks // PIN_SHARE:
            raise InvariantBroken("an owner has more pins than it may have, or than are counted")
