"""BlockPool: reference counts and free blocks of one memory tier. It knows nothing of tokens, rows or hashes."""

from collections.abc import Sequence

import numpy as np

from pagoda.base.errors import InvariantBroken

NO_BLOCKS = np.empty(0, np.int32)


class BlockPool:
    """Reference counts and free blocks of one tier (device or host). Every operation works on whole arrays of blocks.

    A free block is in one of two places. Blocks without content are a stack, and are used first. Blocks that still
    hold KV that can be found by its hash (`has_content`) are kept in the order in which they were freed, and are
    allocated oldest first. That order is a log with tombstones: `_log` holds block ids in the order of freeing, and
    `_place[block]` is the position of the block's valid entry in it. Allocating a block from the middle clears its
    place; no links are walked. The log is compacted when it is full, which costs O(1) per block freed.

    ids: `first_id` .. `first_id + num_blocks - 1`; ids below `first_id` are never allocated (the null block).
    ref_count: int32 [first_id + num_blocks].   has_content: bool, same length.
    """

    def __init__(self, num_blocks: int, first_id: int = 1) -> None:
        size = first_id + num_blocks
        self.num_blocks = num_blocks
        self.first_id = first_id
        self.ref_count = np.zeros(size, np.int32)
        self.has_content = np.zeros(size, np.bool_)
        self._stack = np.arange(size - 1, first_id - 1, -1, dtype=np.int32)
        self._num_stacked = num_blocks
        self._log = np.empty(2 * num_blocks + 64, np.int32)
        self._place = np.zeros(size, np.int64)  # log position + 1; 0 means "not in the log" (zeros cost no start time)
        self._head = 0
        self._tail = 0
        self._num_logged = 0

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, those that still hold content included."""
        return self._num_stacked + self._num_logged

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
            evicted = self._take_oldest(count - fresh)
            self.has_content[evicted] = False
            taken = np.concatenate((taken, evicted)) if fresh else evicted
        self.ref_count[taken] = 1
        return taken, evicted

    def _take_oldest(self, count: int) -> np.ndarray:
        """Remove the `count` blocks that were freed longest ago from the log. Return them."""
        found: list[np.ndarray] = []
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
        oldest = np.concatenate(found) if len(found) > 1 else found[0]
        self._place[oldest] = 0
        self._num_logged -= count
        return oldest

    def touch(self, blocks: np.ndarray) -> None:
        """Add a reference to each of `blocks` (distinct ids); free ones leave the log of free blocks."""
        if len(blocks):
            self._unlog(blocks[self.ref_count[blocks] == 0])
            self.ref_count[blocks] += 1

    def add_references(self, blocks: np.ndarray, counts: np.ndarray) -> None:
        """Add `counts[i]` references to `blocks[i]`, which has one already. Distinct ids."""
        self.ref_count[blocks] += counts.astype(np.int32)

    def _logged(self) -> np.ndarray:
        """Return the free blocks with content, in the order of freeing."""
        ids = self._log[self._head : self._tail]
        return ids[self._place[ids] == np.arange(self._head + 1, self._tail + 1)]

    def _unlog(self, blocks: np.ndarray) -> None:
        self._num_logged -= int(np.count_nonzero(self._place[blocks]))
        self._place[blocks] = 0

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
            self._append(free[keep])
            free = free[~keep]
        self._push(free)

    def note_content(self, blocks: Sequence[int]) -> None:
        """`blocks`, which are referenced, can be found by hash from now on."""
        self.has_content[blocks] = True

    def drop_content(self, blocks: np.ndarray) -> None:
        """`blocks` cannot be found by hash any more; free ones move to the stack."""
        self.has_content[blocks] = False
        logged = blocks[self._place[blocks] != 0]
        if len(logged):
            self._unlog(logged)
            self._push(logged)

    def drop_all_content(self) -> None:
        """No block can be found by hash any more."""
        self.drop_content(self._logged())
        self.has_content[:] = False

    def start_over(self) -> None:
        """Give blocks out as at first. All must be free and without content."""
        self._stack[::-1].sort()

    def _push(self, blocks: np.ndarray) -> None:
        count = len(blocks)
        self._stack[self._num_stacked : self._num_stacked + count] = blocks
        self._num_stacked += count

    def _append(self, blocks: np.ndarray) -> None:
        if self._tail + len(blocks) > len(self._log):
            self._compact()
        stop = self._tail + len(blocks)
        self._log[self._tail : stop] = blocks
        self._place[blocks] = np.arange(self._tail + 1, stop + 1)
        self._tail = stop
        self._num_logged += len(blocks)

    def _compact(self) -> None:
        """Move the valid entries of the log to its front. They are at most half of it, so this is rare."""
        valid = self._logged()
        self._head, self._tail = 0, len(valid)
        self._log[: self._tail] = valid
        self._place[valid] = np.arange(1, self._tail + 1)

    def check(self) -> None:
        """Check that every block is free or referenced, never both. Raises InvariantBroken."""
        stacked = self._stack[: self._num_stacked]
        logged = self._logged()
        free = np.concatenate((stacked, logged))
        if len(logged) != self._num_logged or len(np.unique(free)) != len(free):
            raise InvariantBroken("a block is free twice")
        if self.ref_count[free].any() or len(free) != np.count_nonzero(self.ref_count[self.first_id :] == 0):
            raise InvariantBroken("a block is free and referenced, or neither")
        if self.has_content[stacked].any() or not self.has_content[logged].all():
            raise InvariantBroken("a free block with content is among those without, or the other way round")
