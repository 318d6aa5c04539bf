"""Engine processes each of which ends as its word in the environment says.

ENGINE_FATES: a word for each process, the last one for all that follow. "serve": as ever. "short": memory runs out
while it loads. "die": as soon as it is ready. ENGINE_FATES_FILE: counts the processes. Steps can be limited as those of
stepped_engine.
"""

import os
import time
from pathlib import Path
from typing import Any

import pagoda.assembly.engine_process as process
from pagoda.base.errors import CapacityError
from tests.engine.stepped_engine import limit_steps


def run_short(*args: Any, **options: Any) -> Any:
    raise CapacityError("1 GiB does not fit in memory: lower kv_cache_memory")


def die(server: process.EngineServer) -> None:
    server._socket.close(linger=10_000)
    server._socket.context.term()  # returns once the client has been sent that it is ready
    time.sleep(0.2)
    os._exit(3)


def main() -> None:
    count = Path(os.environ["ENGINE_FATES_FILE"])
    count.write_text(count.read_text() + "x" if count.exists() else "x")
    words = os.environ["ENGINE_FATES"].split()
    word = words[min(len(count.read_text()), len(words)) - 1]
    if word == "short":
        process.build_engine_core = run_short  # type: ignore[assignment]
    elif word == "die":
        process.EngineServer.run = die  # type: ignore[method-assign]
    limit_steps()
    process.main()
