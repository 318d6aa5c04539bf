"""FileTier: core's KVTier over folders of records."""

import hashlib
import logging
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
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
"""Of the thread that writes: it takes the time that nothing else wants."""


class FileTier:
    """See KVTier. A block is written to all folders, and read from the first that has it.

    One thread reads, since requests wait for it. Another one writes: it copies a block, makes sure that the pool still
    held it when it was copied, and writes the copy. The scheduler waits for neither.

    Make it before compute threads are pinned, since its threads may use the CPUs that the calling one may use; then
    `attach` it to the pool.
    """

    def __init__(self, levels: Sequence[Records], end: Callable[[], None] = lambda: None) -> None:
        """levels: the fastest first.   end: called when it is closed."""
        self._levels, self._end = levels, end
        self._memory: Sequence[np.ndarray] = ()
        self._ends: list[int] = []
        self._loads: queue.SimpleQueue[Load | None] = queue.SimpleQueue()
        self._writes: deque[Callable[[], None]] = deque()
        self._has_writes = threading.Event()
        self._num_begun = self._num_ended = 0  # loads: written by the scheduler's thread and by the one that reads
        self._has_ended = threading.Event()
        self._has_scanned = threading.Event()
        self._is_closed = self._is_writing = False
        for run, name in ((self._read_all, "pagoda-tier-read"), (self._write_all, "pagoda-tier-write")):
            threading.Thread(target=run, name=name, daemon=True).start()

    def attach(self, memory: Sequence[np.ndarray]) -> None:
        """Keep the blocks of a pool, whose memory is uint8 [num_blocks, bytes per block] for each of its planes."""
        self._ends = np.cumsum([plane.shape[1] for plane in memory]).tolist()
        # A block that was filled long ago has most likely been filled again since.
        self._writes = deque(maxlen=2 * len(memory[0]))
        self._memory = memory
        if not self._has_scanned.wait(_FIRST_SCAN_S):
            logger.warning("kv_tier: the folder is not read yet; requests find what has been read so far")

    # What the scheduler calls

    def num_leading(self, hashes: Sequence[bytes]) -> int:
        for count, block_hash in enumerate(hashes):
            if not self._has(block_hash):
                return count
        return len(hashes)

    def load(self, load: Load) -> None:
        self._num_begun += 1
        self._loads.put(load)

    def store(self, blocks: Sequence[FilledBlock], holds: Callable[[FilledBlock], bool]) -> None:
        self._writes.extend(partial(self._write, one, holds) for one in blocks)
        self._has_writes.set()

    def keep(self, hashes: Sequence[bytes], ttl_s: int) -> None:
        until_s = int(time.time()) + ttl_s
        self._writes.extend(partial(level.keep, hashes, until_s) for level in self._levels)
        self._has_writes.set()

    def take_changes(self) -> list[TierChange]:
        return [TierChange(level.tier, *level.take_changes()) for level in self._levels]

    def _has(self, block_hash: bytes) -> bool:
        return any(block_hash in level for level in self._levels)

    # What the engine calls

    def wait(self, timeout_s: float) -> None:
        """Return when a load has ended, at once if there is none, or after `timeout_s`."""
        if self._num_begun > self._num_ended:
            self._has_ended.wait(timeout_s)
        self._has_ended.clear()

    def close(self) -> None:
        """Write what is still to be written, as far as that goes in two seconds; then let go of the pool."""
        if self._is_closed:
            return
        end_s = time.monotonic() + _CLOSE_S
        while (self._writes or self._is_writing) and time.monotonic() < end_s:
            self._has_writes.set()
            time.sleep(0.005)
        self._is_closed = True
        self._writes.clear()
        self._has_writes.set()
        self._loads.put(None)
        self._end()

    # Reading

    def _read_all(self) -> None:
        while (load := self._loads.get()) is not None:
            began_s = time.perf_counter()
            content = np.empty(self._ends[-1], np.uint8)
            fill = partial(self._fill, content)
            for block_hash in load.hashes:
                load.why = self._read(block_hash, content)
                load.busy_s = time.perf_counter() - began_s
                if load.why or self._is_closed or not load.fill_next(fill):
                    break
            load.is_done = True
            self._num_ended += 1
            self._has_ended.set()

    def _read(self, block_hash: bytes, content: np.ndarray) -> str:
        """As Records.read, from the first level that can; the others before it get the block, too."""
        why = "a record is gone"
        for level in self._levels:
            if block_hash in level and not (why := level.read(block_hash, content)):
                if level is not self._levels[0]:
                    self._writes.append(partial(self._copy_up, block_hash))
                    self._has_writes.set()
                return ""
        return why

    def _fill(self, content: np.ndarray, block: int) -> None:
        begin = 0
        for plane, end in zip(self._memory, self._ends, strict=True):
            plane[block] = content[begin:end]
            begin = end

    # Writing

    def _write_all(self) -> None:
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while not self._is_closed:
            for level in self._levels:
                level.scan()
            self._has_scanned.set()
            next_scan_s = time.monotonic() + _SCAN_EVERY_S
            while not self._is_closed and (left_s := next_scan_s - time.monotonic()) > 0:
                self._has_writes.wait(left_s)
                self._has_writes.clear()
                self._is_writing = True
                while self._writes and time.monotonic() < next_scan_s:
                    self._writes.popleft()()
                self._is_writing = False

    def _write(self, one: FilledBlock, holds: Callable[[FilledBlock], bool]) -> None:
        if all(one.known[1] in level for level in self._levels) or not holds(one):
            return
        content = np.empty(self._ends[-1], np.uint8)
        begin = 0
        for plane, end in zip(self._memory, self._ends, strict=True):
            content[begin:end] = plane[one.block]
            begin = end
        if holds(one):
            owner = hashlib.sha256(one.owner.encode()).hexdigest()[:8] if one.owner else ""
            for level in self._levels:
                level.write(one.known[1], content, owner)

    def _copy_up(self, block_hash: bytes) -> None:
        """Write a block that a slower level has to the first one."""
        first, *slower = self._levels
        content = np.empty(self._ends[-1], np.uint8)
        for level in slower:
            if block_hash not in first and not level.read(block_hash, content):
                first.write(block_hash, content, level.owner_of(block_hash))
