"""Transfers: blocks on their way between the pool and a tier, which keeps them by their hashes outside of it."""

import threading
from collections import deque
from collections.abc import Callable, Set
from collections.abc import Sequence as Sized
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pagoda.core.events import EventStream, Loaded, TierChanged
from pagoda.core.kv.block_pool import NO_BLOCKS
from pagoda.core.kv.block_tables import BlockTables
from pagoda.core.kv.prefix_cache import CachedPrefix, KnownBlock, PrefixCache
from pagoda.core.request import Pin, Request, RequestKey, RequestState, Sequence

UNMEASURED_S = 10.0
"""A load may take so long while nothing is known of what it would cost to compute its tokens."""

_RETRY_S = 60.0
"""So long after the last load, its speed is forgotten: a tier that was slow is tried again."""

_NUM_MEASURED = 8


class Load:
    """Blocks that a tier copies into the pool for one request, one after the other.

    hashes: bytes per block.   blocks: int32, the pool's, which nobody else reads or writes until the load has ended.
    num_loaded: leading blocks that hold what their hashes say.   busy_s: what the tier has spent on them.
    why: what ended it early, for people; "" if nothing did.   is_done: the tier is done with it.
    The tier's thread writes these; the scheduler's calls `stop`.
    """

    def __init__(self, hashes: Sized[bytes], blocks: np.ndarray) -> None:
        self.hashes, self.blocks = hashes, blocks
        self.num_loaded = 0
        self.busy_s = 0.0
        self.why = ""
        self.is_done = False
        self._is_stopped = False
        self._lock = threading.Lock()

    def fill_next(self, fill: Callable[[int], None]) -> bool:
        """Let `fill` write the next block. Return False, with nothing written, if the load was stopped."""
        with self._lock:
            if self._is_stopped:
                return False
            fill(int(self.blocks[self.num_loaded]))
            self.num_loaded += 1
        return True

    def stop(self) -> None:
        """From now on, nothing is written to its blocks."""
        with self._lock:
            self._is_stopped = True


class KVTier(Protocol):
    """Keeps blocks outside of the pool, by their hashes, of one model and one layout. It may lose any at any time.

    Calls return at once: its own threads read and write.
    """

    def num_leading(self, hashes: Sized[bytes]) -> int:
        """Return how many of the first `hashes` it has, up to the first that it has not."""
        ...

    def load(self, load: Load) -> None:
        """Begin to fill the load's blocks, in order, each with what was stored, to the bit; end at the first miss."""
        ...

    def store(self, blocks: Sized["FilledBlock"], holds: Callable[["FilledBlock"], bool]) -> None:
        """Begin to keep blocks, also loaded ones, wherever they are not yet.

        holds: whether one still holds what it held; to be asked after it was copied.
        """
        ...

    def keep(self, hashes: Sized[bytes], ttl_s: int) -> None:
        """For `ttl_s` seconds, rather lose others than these, which it has or was told to store."""
        ...

    def take_changes(self) -> Sized["TierChange"]:
        """Return what it has got and lost since the last call, by where."""
        ...


@dataclass(frozen=True, slots=True)
class FilledBlock:
    """A block that is full.   known: what the prefix cache knows it by.   owner: who may only have so many."""

    block: int
    known: KnownBlock
    owner: str = ""


@dataclass(frozen=True, slots=True)
class TierChange:
    """Hashes of blocks that a part of a tier has got, and that it has lost.   tier: the part's name."""

    tier: str
    stored: Sized[bytes]
    lost: Sized[bytes]


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """A load, for which a request waits.

    prefix: its blocks in the pool before it, which are referenced meanwhile, int32.   parent: the hash before it.
    first_block: its number of blocks.   deadline_s: when the request waits no longer.
    """

    sequence: Sequence
    load: Load
    prefix: np.ndarray
    first_block: int
    parent: bytes | None
    began_s: float
    deadline_s: float


class Transfers:
    """Which requests wait for which blocks of a tier, and which full blocks the tier is still to be given.

    A block whose transfer is under way is referenced by it. When a load ends, its blocks are in the prefix cache and
    free: the request finds them there like any others.
    num_stored, num_lost: blocks that the tier's parts got, and those that they no longer have, since the start.
    """

    def __init__(
        self, tier: KVTier | None, tables: BlockTables, cache: PrefixCache, block_size: int, events: EventStream
    ) -> None:
        """tier: None: no transfers. Only the first KV group has some."""
        self._tier = tier
        self._tables, self._cache, self._block_size, self._events = tables, cache, block_size, events
        self.num_stored = self.num_lost = 0
        self._waiting: dict[RequestKey, _Waiting] = {}
        self._asked: set[RequestKey] = set()  # since their last admission
        self._measured: deque[tuple[int, float]] = deque(maxlen=_NUM_MEASURED)  # blocks, seconds
        self._measured_at_s = 0.0
        self._filled: list[FilledBlock] = []
        self._kept: list[tuple[Sized[bytes], int]] = []  # hashes, seconds
        # By the step that fills the blocks, or a later one: these, and what is to be kept of those so far.
        self._unstored: deque[tuple[int, list[FilledBlock], list[tuple[Sized[bytes], int]]]] = deque()
        if tier is not None:
            cache.note_filled = self._note_filled

    def __len__(self) -> int:
        """The requests that wait."""
        return len(self._waiting)

    def keys(self) -> Set[RequestKey]:
        """Return which requests wait."""
        return self._waiting.keys()

    # Into the pool

    def num_after(self, request: RequestState, prefix: CachedPrefix) -> int:
        """Return how many blocks after `prefix` the tier has, for a request without rows that may wait for them."""
        spec = request.spec
        if self._tier is None or request.key in self._asked or not _has_lasting_hashes(spec):
            return 0
        if not spec.reads_prefix_cache:
            return 0
        return self._tier.num_leading(self._hashes(request)[prefix.num_tokens // self._block_size :])

    def _hashes(self, request: RequestState) -> list[bytes]:
        """Return the hashes of its blocks; of the last token, whose logits are needed, nothing is looked up."""
        sequence = request.unfinished[0]
        hashes = self._cache.hash_tokens(sequence).hashes
        return hashes[: (len(sequence.token_ids) - 1) // self._block_size]

    def begin(
        self, request: RequestState, prefix: CachedPrefix, count: int, compute_s: float, step_s: float, now_s: float
    ) -> bool:
        """Begin to load `count` blocks after `prefix`, for which there is room, unless it is sooner to compute them.

        compute_s: what that takes, 0 if it is not known.   step_s: what the step takes for which it may miss this one.
        """
        assert self._tier is not None
        self._asked.add(request.key)
        num_before = sum(len(one.load.hashes) - one.load.num_loaded for one in self._waiting.values())
        load_s = (num_before + count) * self._s_per_block(now_s)
        if compute_s and load_s + step_s >= compute_s:
            return False
        hashes, first = self._hashes(request), prefix.num_tokens // self._block_size
        pools, held = self._tables.pools, prefix.blocks[0][prefix.blocks[0] != 0]
        pools.touch(held)
        count = min(count, pools.num_free[0])  # of a prompt that enters by parts, not all may find room
        if not count:
            pools.free(held[::-1])
            return False
        load = Load(hashes[first : first + count], self._tables.allocate(0, count))
        parent = hashes[first - 1] if first else None
        deadline_s = now_s + (compute_s or UNMEASURED_S)
        self._waiting[request.key] = _Waiting(request.unfinished[0], load, held, first, parent, now_s, deadline_s)
        self._tier.load(load)
        return True

    def _s_per_block(self, now_s: float) -> float:
        """Return what a block takes, 0 if that is not known."""
        if now_s - self._measured_at_s > _RETRY_S:
            self._measured.clear()
        num_blocks = sum(num for num, _ in self._measured)
        return sum(seconds for _, seconds in self._measured) / num_blocks if num_blocks else 0.0

    def take_woken(self, now_s: float) -> list[RequestKey]:
        """Return the requests whose wait is over."""
        if self._tier is not None:
            self._note_changes(self._tier)
        over = [key for key, one in self._waiting.items() if one.load.is_done or now_s >= one.deadline_s]
        for key in over:
            self._end(key, now_s)
        return over

    def forget(self, key: RequestKey) -> None:
        """The request runs, or has ended: it waits for nothing."""
        self._asked.discard(key)
        if key in self._waiting:
            self._end(key, self._events.now()[1])

    def _end(self, key: RequestKey, now_s: float) -> None:
        one = self._waiting.pop(key)
        load, pools = one.load, self._tables.pools
        load.stop()
        count = load.num_loaded
        measured = (count, load.busy_s) if load.is_done else (count + 1, now_s - one.began_s)
        if measured[0]:
            self._measured.append(measured)
            self._measured_at_s = now_s
        first, hashes = one.first_block, list(load.hashes[:count])
        self._cache.insert_loaded(one.sequence, first, hashes, load.blocks[:count].tolist(), one.parent)
        for blocks in (load.blocks[count:], load.blocks[:count], one.prefix):  # the deepest are evicted first
            pools.free(blocks[::-1])
        why = load.why or ("" if load.is_done else "not in time")
        asked, loaded = len(load.blocks) * self._block_size, count * self._block_size
        self._events.write(Loaded, one.sequence.request.spec, asked, loaded, now_s - one.began_s, why)

    @property
    def held_blocks(self) -> np.ndarray:
        """Blocks that transfers reference, as often as they do."""
        held = [blocks for one in self._waiting.values() for blocks in (one.load.blocks, one.prefix)]
        return np.concatenate([NO_BLOCKS, *held])

    # Out of the pool

    def _note_filled(self, request: Request, block: int, known: KnownBlock) -> None:
        if _has_lasting_hashes(request):
            salt_owner, colon, _ = (request.cache_salt or "").partition(":")
            self._filled.append(FilledBlock(block, known, salt_owner if colon else ""))

    def store_filled(self, last_step: int, oldest_in_flight: int | None) -> None:
        """Give the tier the blocks that steps have filled whose results are back.

        last_step: the last that was planned.   oldest_in_flight: the first whose result is not back; None: all are.
        """
        if self._tier is None:
            return
        if self._filled or self._kept:
            self._unstored.append((last_step, self._filled, self._kept))
            self._filled, self._kept = [], []
        while self._unstored and (oldest_in_flight is None or self._unstored[0][0] < oldest_in_flight):
            _, filled, kept = self._unstored.popleft()
            self._tier.store([one for one in filled if self._cache.holds(one.block, one.known)], self._holds)
            for hashes, ttl_s in kept:
                self._tier.keep(hashes, ttl_s)

    def _holds(self, one: FilledBlock) -> bool:
        return self._cache.holds(one.block, one.known)

    def keep(self, hashes: Sized[bytes], pin: Pin) -> None:
        """The blocks of a request with a pin leave it: the tier, once it has them, keeps them as long as the pool."""
        if self._tier is None:
            return
        if self._filled or self._unstored:
            self._kept.append((hashes, pin.ttl_s))
        else:
            self._tier.keep(hashes, pin.ttl_s)

    def _note_changes(self, tier: KVTier) -> None:
        for change in tier.take_changes():
            self.num_stored += len(change.stored)
            self.num_lost += len(change.lost)
            if (change.stored or change.lost) and self._events.cache_folds:
                changed = change.tier, tuple(change.stored), tuple(change.lost)
                self._events.write_cache(TierChanged(*self._events.now(), *changed))


def _has_lasting_hashes(request: Request) -> bool:
    """Whether its hashes say which adapter computed it. Names of adapters do not: their files may change."""
    return request.lora is None or bool(request.lora.digest)
