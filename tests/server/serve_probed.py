"""`pagoda serve` that notes its event loop's stalls: `python -m tests.server.serve_probed FILE serve FLAGS...`"""

import asyncio
import mmap
import struct
import sys
import time
from pathlib import Path
from typing import Any

from pagoda.cli.main import main
from pagoda.engine.process_client import ProcessClient

_RECORD = struct.Struct("dd")
_INTERVAL_S = 0.002


class LoopProbe:
    """A file with the longest stall of an event loop since `reset`, in seconds of the loop thread's CPU and of time.

    CPU seconds do not depend on what else the machine does; they leave out waits for another thread's lock.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(_RECORD.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _RECORD.size)

    def reset(self) -> None:
        _RECORD.pack_into(self._map, 0, 0.0, 0.0)

    def worst(self) -> tuple[float, float]:
        return _RECORD.unpack_from(self._map, 0)

    async def watch(self) -> None:
        cpu_s, at_s = time.thread_time(), time.monotonic()
        while True:
            await asyncio.sleep(_INTERVAL_S)
            new_cpu_s, new_at_s = time.thread_time(), time.monotonic()
            worst_cpu_s, worst_s = self.worst()
            _RECORD.pack_into(
                self._map, 0, max(worst_cpu_s, new_cpu_s - cpu_s), max(worst_s, new_at_s - at_s - _INTERVAL_S)
            )
            cpu_s, at_s = new_cpu_s, new_at_s


if __name__ == "__main__":
    probe = LoopProbe(Path(sys.argv.pop(1)))
    plain = ProcessClient.start
    tasks: list[asyncio.Task[None]] = []

    async def start_watched(client: ProcessClient) -> Any:
        facts = await plain(client)
        tasks.append(asyncio.create_task(probe.watch()))
        return facts

    ProcessClient.start = start_watched  # type: ignore[method-assign]
    main()
