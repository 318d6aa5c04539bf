"""How long a server's event loop was kept from other clients, measured inside its process.

Wall time says little on shared cores: the process waits for a core while others run. So a beat on the loop reads, next
to the wall clock, how long its thread waited for a core (/proc/.../schedstat), and subtracts that. What is left beyond
the beat's own interval is a stall: the thread computed, or waited for a lock that a thread of its own process held.
The longest CPU time between two beats is measured too: it leaves out waits for such locks.
"""

import asyncio
import contextlib
import gc
import json
import mmap
import os
import struct
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sized
from pathlib import Path
from typing import Any

from tests.server.live import LiveServer, serving

BEAT_S = 0.01
_STACK_AFTER_S = 0.08  # a stall this long has its stack written down
_SLOTS = struct.Struct("<6d")
_ASKED, _ANSWERED, _LONGEST, _LONGEST_CPU, _CENSUS_ASKED, _CENSUS_DONE = range(6)


class _Shared:
    """Six numbers in a mapped file: each has one writer."""

    def __init__(self, path: Path, create: bool = False) -> None:
        if create:
            path.write_bytes(bytes(_SLOTS.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _SLOTS.size)

    def get(self, slot: int) -> float:
        return float(struct.unpack_from("<d", self._map, slot * 8)[0])

    def set(self, slot: int, value: float) -> None:
        struct.pack_into("<d", self._map, slot * 8, value)


def _census() -> dict[str, int]:
    """How many objects of pagoda's types there are, and how many entries their containers hold."""
    gc.collect()
    counts: Counter[str] = Counter()
    for one in gc.get_objects():
        kind = type(one)
        if kind is asyncio.Task or isinstance(one, asyncio.Task):
            counts["tasks"] += 1
        if not str(kind.__module__).startswith("pagoda."):
            continue
        counts[kind.__qualname__] += 1
        names = [*getattr(one, "__dict__", ()), *(n for k in kind.__mro__ for n in getattr(k, "__slots__", ()))]
        for name in names:
            value = getattr(one, name, None)
            if isinstance(value, dict | list | set | Counter) and isinstance(value, Sized):
                counts[f"{kind.__qualname__}.{name}"] += len(value)
    counts["threads"] = threading.active_count()
    return dict(counts)


class StallWatch:
    """The server's side: `run` on its loop."""

    def __init__(self, folder: Path) -> None:
        self._shared = _Shared(folder / "stall")
        self._log = (folder / "stalls.jsonl").open("a")
        self._census_path = folder / "census.json"
        self._schedstat = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        self._main = threading.get_ident()
        self._last_s = time.monotonic()
        self._last_waited_s = 0.0
        self._last_cpu_s = 0.0
        self._longest_s = 0.0
        self._longest_cpu_s = 0.0
        self._stack: list[str] = []

    async def run(self) -> None:
        threading.Thread(target=self._look, daemon=True).start()
        loop = asyncio.get_running_loop()
        self._last_s, self._last_waited_s = time.monotonic(), self._waited_s()
        self._last_cpu_s = time.thread_time()
        loop.call_later(BEAT_S, self._beat, loop)

    def _waited_s(self) -> float:
        return int(os.pread(self._schedstat, 100, 0).split()[1]) / 1e9

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        now_s, waited_s, cpu_s = time.monotonic(), self._waited_s(), time.thread_time()
        stall_s = now_s - self._last_s - (waited_s - self._last_waited_s) - BEAT_S
        self._longest_s = max(self._longest_s, stall_s)
        self._longest_cpu_s = max(self._longest_cpu_s, cpu_s - self._last_cpu_s)
        if (asked := self._shared.get(_ASKED)) != self._shared.get(_ANSWERED):
            self._shared.set(_LONGEST, self._longest_s)
            self._shared.set(_LONGEST_CPU, self._longest_cpu_s)
            self._shared.set(_ANSWERED, asked)
            self._longest_s = self._longest_cpu_s = 0.0
        if stall_s > _STACK_AFTER_S:
            stall = {"at_s": self._last_s, "stall_ms": round(stall_s * 1e3), "stack": self._stack}
            print(json.dumps(stall), file=self._log, flush=True)
        self._stack = []
        self._last_s, self._last_waited_s, self._last_cpu_s = now_s, waited_s, cpu_s
        loop.call_later(BEAT_S, self._beat, loop)

    def _main_stack(self) -> list[str]:
        """Where the loop's thread is. Keeps no frame: its variables could be what the server wants to close."""
        frame = sys._current_frames().get(self._main)
        return traceback.format_stack(frame)[-8:] if frame is not None else []

    def _look(self) -> None:
        """On a thread: note where a late loop is, and count objects when asked."""
        shared = self._shared
        while True:
            time.sleep(0.04)
            if not self._stack and time.monotonic() - self._last_s > _STACK_AFTER_S:
                self._stack = self._main_stack()
            if (asked := shared.get(_CENSUS_ASKED)) != shared.get(_CENSUS_DONE):
                self._census_path.write_text(json.dumps(_census()))
                shared.set(_CENSUS_DONE, asked)


class LoopStuck(Exception):
    """The event loop has stopped for so long that waiting for its end makes no sense."""


class StallReader:
    """The test's side. Create it before the server."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shared = _Shared(folder / "stall", create=True)

    def take(self) -> float:
        """Return the longest stall since the last call, in seconds. Waits for a stall in progress to end."""
        self._ask(_ASKED, _ANSWERED)
        return self._shared.get(_LONGEST)

    def cpu_s(self) -> float:
        """Return the longest CPU time of the loop's thread between two beats, in the period of the last `take`."""
        return self._shared.get(_LONGEST_CPU)

    def census(self) -> dict[str, int]:
        """See _census."""
        self._ask(_CENSUS_ASKED, _CENSUS_DONE)
        self.take()  # counting was a stall of the test's own
        counted: dict[str, int] = json.loads((self._folder / "census.json").read_text())
        return counted

    def stalls(self) -> list[dict[str, Any]]:
        path = self._folder / "stalls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def _ask(self, asked: int, answered: int, timeout_s: float = 60.0) -> None:
        number = self._shared.get(asked) + 1
        self._shared.set(asked, number)
        end_s = time.monotonic() + timeout_s
        while self._shared.get(answered) != number:
            if time.monotonic() > end_s:
                raise LoopStuck(f"the server's event loop does not answer for {timeout_s:g} s")
            time.sleep(0.002)


@contextlib.contextmanager
def watched_serving(folder: Path, *flags: str) -> Iterator[tuple[LiveServer, StallReader]]:
    """Start a server as `serving` does, with a StallWatch on its event loop; yield it and the reader of its stalls."""
    stalls = StallReader(folder)
    with serving(folder, *flags, program=("tests.server.watched_server", str(folder), "--debug")) as server:
        yield server, stalls
