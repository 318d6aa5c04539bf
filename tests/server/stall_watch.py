"""How long a server's event loop was kept from other clients, measured inside its process.

Wall time says little on shared cores: the process waits for a core while others run. So a beat on the loop reads, next
to the wall clock, how long its thread waited for a core (/proc/.../schedstat), and subtracts that. What is left beyond
the beat's own interval is a stall: the thread computed, or waited for a lock that a thread of its own process held.
The longest CPU time between two beats is measured too: it leaves out waits for such locks.
"""

import asyncio
import contextlib
import json
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.server.census import CensusReader, CensusTaker
from tests.server.live import LiveServer, serving
from tests.server.shared_numbers import SharedNumbers

BEAT_S = 0.01
_ANSWER_TIMEOUT_S = 60.0
_STACK_AFTER_S = 0.08  # a stall this long has its stack written down
_ASKED, _ANSWERED, _LONGEST, _LONGEST_CPU = range(4)


class StallWatch:
    """The server's side: `run` on its loop."""

    def __init__(self, folder: Path) -> None:
        self._shared = SharedNumbers(folder / "stall")
        self._log = (folder / "stalls.jsonl").open("a")
        self._census = CensusTaker(folder, "api")
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
        self._census.start()
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
        """On a thread: note where a late loop is."""
        while True:
            time.sleep(0.04)
            if not self._stack and time.monotonic() - self._last_s > _STACK_AFTER_S:
                self._stack = self._main_stack()


class LoopStuck(Exception):
    """The event loop has stopped for so long that waiting for its end makes no sense."""


class StallReader:
    """The test's side. Create it before the server."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shared = SharedNumbers(folder / "stall", create=True)
        self._censuses = {name: CensusReader(folder, name) for name in ("api", "engine")}

    def take(self) -> float:
        """Return the longest stall since the last call, in seconds. Waits for a stall in progress to end."""
        number = self._shared.get(_ASKED) + 1
        self._shared.set(_ASKED, number)
        end_s = time.monotonic() + _ANSWER_TIMEOUT_S
        while self._shared.get(_ANSWERED) != number:
            if time.monotonic() > end_s:
                raise LoopStuck(f"the server's event loop does not answer for {_ANSWER_TIMEOUT_S:g} s")
            time.sleep(0.002)
        return self._shared.get(_LONGEST)

    def cpu_s(self) -> float:
        """Return the longest CPU time of the loop's thread between two beats, in the period of the last `take`."""
        return self._shared.get(_LONGEST_CPU)

    def least_cpu_s(self, ask: Callable[[], object], limit_s: float) -> float:
        """Return the longest CPU time between two beats while `ask` runs; the least of three runs if above the limit.

        What a request needs, it needs each time. The CPU time of a virtual machine also contains, now and then, what
        its host gave to others.
        """
        least_s = math.inf
        for _ in range(3):
            self.take()
            ask()
            self.take()
            least_s = min(least_s, self.cpu_s())
            if least_s < limit_s:
                break
        return least_s

    def census(self, process: str = "api") -> dict[str, int]:
        """See count_objects.   process: "api" or "engine"."""
        counted = self._censuses[process].take()
        self.take()  # counting was a stall of the test's own
        return counted

    def stalls(self) -> list[dict[str, Any]]:
        path = self._folder / "stalls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@contextlib.contextmanager
def watched_serving(
    folder: Path, *flags: str, engine: str = "tests.server.watched_engine"
) -> Iterator[tuple[LiveServer, StallReader]]:
    """Start a server as `serving` does, with a StallWatch on its event loop; yield it and the reader of its stalls.

    engine: the module of its engine process, which lets its objects be counted.
    """
    stalls = StallReader(folder)
    program = ("tests.server.watched_server", str(folder), engine, "--debug")
    with serving(folder, *flags, program=program, env={"CENSUS_FOLDER": str(folder)}) as server:
        yield server, stalls
