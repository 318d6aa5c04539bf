"""A tier over the memory of an ExactWorker, which does its work when the test says so, and fails as it says."""

import random
from collections.abc import Callable, Sequence
from functools import partial

from pagoda.core.kv import FilledBlock, Load, TierChange
from tests.core.exact_worker import ExactWorker, Name


class SlowTier:
    """See KVTier.   content: what it has, by hash.   kept: hashes that it had when it was told to keep them.

    loads: not done.   num_loaded: blocks, so far.   is_quick: loads are done at once.
    """

    def __init__(self) -> None:
        self.worker: ExactWorker | None = None
        self.content: dict[bytes, list[Name | None]] = {}
        self.kept: list[bytes] = []
        self.loads: list[Load] = []
        self.num_loaded = 0
        self.is_quick = False
        self._writes: list[Callable[[], None]] = []
        self._changes: tuple[list[bytes], list[bytes]] = [], []

    def num_leading(self, hashes: Sequence[bytes]) -> int:
        return next((count for count, one in enumerate(hashes) if one not in self.content), len(hashes))

    def load(self, load: Load) -> None:
        self.loads.append(load)
        if self.is_quick:
            self.read()

    def store(self, blocks: Sequence[FilledBlock], holds: Callable[[FilledBlock], bool]) -> None:
        self._writes += [partial(self._write, one, holds) for one in blocks]

    def keep(self, hashes: Sequence[bytes], ttl_s: int) -> None:
        self._writes.append(lambda: self.kept.extend(one for one in hashes if one in self.content))

    def take_changes(self) -> list[TierChange]:
        changes, self._changes = self._changes, ([], [])
        return [TierChange("disk", *changes)]

    # What the test says

    def write(self, count: int = 1_000_000) -> None:
        """Store blocks that it was given, and keep those that it was told to."""
        for write in self._writes[:count]:
            write()
        del self._writes[:count]

    def _write(self, one: FilledBlock, holds: Callable[[FilledBlock], bool]) -> None:
        assert self.worker is not None
        if one.known[1] not in self.content and holds(one):
            self.content[one.known[1]] = list(self.worker.device[one.block])
            self._changes[0].append(one.known[1])

    def read(self, count: int = 1_000_000, why: str = "") -> None:
        """Load blocks of the first load; end it if these were its last, or with `why`."""
        assert self.worker is not None
        if not self.loads:
            return
        load = self.loads[0]
        for block_hash in load.hashes[load.num_loaded :][:count]:
            if (content := self.content.get(block_hash)) is None:
                why = "gone"
            if why or not load.fill_next(lambda block, content=content: self._fill(block, content)):
                break
            self.num_loaded += 1
            load.busy_s += 0.001
        if why or load.num_loaded == len(load.hashes) or load._is_stopped:
            load.why, load.is_done = why, True
            del self.loads[0]

    def _fill(self, block: int, content: list[Name | None] | None) -> None:
        assert self.worker is not None
        assert content is not None
        self.worker.device[block] = list(content)

    def lose(self, rng: random.Random) -> None:
        """Lose a block."""
        if self.content:
            lost = rng.choice(list(self.content))
            del self.content[lost]
            self._changes[1].append(lost)
