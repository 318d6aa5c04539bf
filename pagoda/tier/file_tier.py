"""FileTier: core's KVTier over folders of records."""

import hashlib
import logging
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np

from pagoda.core.kv import FilledBlock, Load, TierChange
from pagoda.tier.records import Records

logger = logging.getLogger("pagoda")

_SCAN_EVERY_S = 30.0
_FIRST_SCAN_S = 10.0
"""The engine waits so long for the first scan; what is found later can be loaded from then on."""
_CLOSE_S = 2.0
_NICENESS = 19
"""Of the threads that write: they take the time that nothing else wants."""


class FileTier:
    """See KVTier. A block is written to all folders that do not have it, and read from the first that does.

    Each folder has two threads, so that memory does not wait for a disk. One reads, since requests wait for it. The
    other one copies a block, makes sure that the pool still held it when it was copied, and writes the copy. The
    scheduler waits for none of them.

    Make it before compute threads are pinned, since its threads may use the CPUs that the calling one may use; then
    `attach` it to the pool.
    """

    def __init__(self, levels: Sequence[Records], end: Callable[[], None] = lambda: None) -> None:
        """levels: the fastest first.   end: called when it is closed."""
        self._levels, self._end = levels, end
        self._memory: Sequence[np.ndarray] = ()
        self._ends: list[int] = []
        self._loads = [queue.SimpleQueue[Load | None]() for _ in levels]
        self._writers = [_Writer(level) for level in levels]
        self._num_begun = 0  # loads; written by the scheduler's thread
        self._num_ended = [0 for _ in levels]  # each written by the thread that reads
        self._has_ended = threading.Event()
        self._is_closed = False
        for number in range(len(levels)):
            threading.Thread(target=self._read_all, args=[number], name="pagoda-tier-read", daemon=True).start()

    def attach(self, memory: Sequence[np.ndarray]) -> None:
        """Keep the blocks of a pool, whose memory is uint8 [num_blocks, bytes per block] for each of its planes."""
        self._ends = np.cumsum([plane.shape[1] for plane in memory]).tolist()
        for writer in self._writers:  # a block that was filled long ago has most likely been filled again since
            writer.waiting = deque(maxlen=2 * len(memory[0]))
        self._memory = memory
        end_s = time.monotonic() + _FIRST_SCAN_S
        if not all(writer.has_scanned.wait(max(0.0, end_s - time.monotonic())) for writer in self._writers):
            logger.warning("kv_tier: the folder is not read yet; requests find what has been read so far")

    # What the scheduler calls

    def num_leading(self, hashes: Sequence[bytes]) -> int:
        for count, block_hash in enumerate(hashes):
            if not self._has(block_hash):
                return count
        return len(hashes)

    def load(self, load: Load) -> None:
        self._num_begun += 1
        self._loads[max(map(self._first_with, load.hashes), default=0)].put(load)

    def store(self, blocks: Sequence[FilledBlock], holds: Callable[[FilledBlock], bool]) -> None:
        for writer in self._writers:
            writer.put(partial(self._write, writer.level, one, holds) for one in blocks)

    def keep(self, hashes: Sequence[bytes], ttl_s: int) -> None:
        until_s = int(time.time()) + ttl_s
        for writer in self._writers:
            writer.put([partial(writer.level.keep, hashes, until_s)])

    def take_changes(self) -> list[TierChange]:
        return [TierChange(level.tier, *level.take_changes()) for level in self._levels]

    def _has(self, block_hash: bytes) -> bool:
        return any(block_hash in level for level in self._levels)

    def _first_with(self, block_hash: bytes) -> int:
        """Return the number of the first level that has a block; 0 if none does."""
        return next((number for number, level in enumerate(self._levels) if block_hash in level), 0)

    # What the engine calls

    def wait(self, timeout_s: float) -> None:
        """Return when a load has ended, at once if there is none, or after `timeout_s`."""
        if self._num_begun > sum(self._num_ended):
            self._has_ended.wait(timeout_s)
        self._has_ended.clear()

    def close(self) -> None:
        """Write what is still to be written, as far as that goes in two seconds; then let go of the pool."""
        if self._is_closed:
            return
        end_s = time.monotonic() + _CLOSE_S
        while not all(writer.is_idle for writer in self._writers) and time.monotonic() < end_s:
            time.sleep(0.005)
        self._is_closed = True
        for writer in self._writers:
            writer.close()
        for loads in self._loads:
            loads.put(None)
        self._end()

    # Reading

    def _read_all(self, number: int) -> None:
        """Do the loads that need a level, and none after it."""
        while (load := self._loads[number].get()) is not None:
            began_s = time.perf_counter()
            content = np.empty(self._ends[-1], np.uint8)
            fill = partial(self._fill, content)
            for block_hash in load.hashes:
                load.why = self._read(block_hash, content)
                load.busy_s = time.perf_counter() - began_s
                if load.why or self._is_closed or not load.fill_next(fill):
                    break
            load.is_done = True
            self._num_ended[number] += 1
            self._has_ended.set()

    def _read(self, block_hash: bytes, content: np.ndarray) -> str:
        """As Records.read, from the first level that can."""
        why = "a record is gone"
        for level in self._levels:
            if block_hash in level and not (why := level.read(block_hash, content)):
                return ""
        return why

    def _fill(self, content: np.ndarray, block: int) -> None:
        begin = 0
        for plane, end in zip(self._memory, self._ends, strict=True):
            plane[block] = content[begin:end]
            begin = end

    # Writing

    def _write(self, level: Records, one: FilledBlock, holds: Callable[[FilledBlock], bool]) -> None:
        if one.known[1] in level or not holds(one):
            return
        content = np.empty(self._ends[-1], np.uint8)
        begin = 0
        for plane, end in zip(self._memory, self._ends, strict=True):
            content[begin:end] = plane[one.block]
            begin = end
        if holds(one):
            owner = hashlib.sha256(one.owner.encode()).hexdigest()[:8] if one.owner else ""
            level.write(one.known[1], content, owner)


class _Writer:
    """The thread that writes to a level, and reads what others have written there."""

    def __init__(self, level: Records) -> None:
        self.level = level
        self.waiting: deque[Callable[[], None]] = deque()
        self.has_scanned = threading.Event()
        self._has_work = threading.Event()
        self._is_closed = self._is_writing = False
        threading.Thread(target=self._run, name="pagoda-tier-write", daemon=True).start()

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self._is_writing

    def put(self, writes: Iterable[Callable[[], None]]) -> None:
        """Do these when there is time; forget those that have waited longest if there are too many."""
        self.waiting.extend(writes)
        self._has_work.set()

    def close(self) -> None:
        """End once what is being written is; forget what waits."""
        self._is_closed = True
        self.waiting.clear()
        self._has_work.set()

    def _run(self) -> None:
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while not self._is_closed:
            self.level.scan()
            self.has_scanned.set()
            next_scan_s = time.monotonic() + _SCAN_EVERY_S
            while not self._is_closed and (left_s := next_scan_s - time.monotonic()) > 0:
                self._has_work.wait(left_s)
                self._has_work.clear()
                self._is_writing = True
                while time.monotonic() < next_scan_s and (write := self._next()) is not None:
                    write()
                self._is_writing = False

    def _next(self) -> Callable[[], None] | None:
        try:
            return self.waiting.popleft()
        except IndexError:  # nothing waits, or it has just been closed
            return None
