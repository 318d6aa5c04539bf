"""`pagoda serve` with a StallWatch on its event loop, and an engine process of one's own:

`python -m tests.server.watched_server FOLDER ENGINE_MODULE serve FLAGS...`
"""

import asyncio
import resource
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import uvloop

from pagoda.cli.main import main
from tests.server.serve_with import use_engine
from tests.server.stall_watch import StallWatch

# What no request may need; beyond it the server meets a MemoryError, and the machine's other processes nothing.
MAX_ADDRESS_BYTES = 6 * 2**30

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESS_BYTES, MAX_ADDRESS_BYTES))
    watch = StallWatch(Path(sys.argv.pop(1)))
    use_engine(sys.argv.pop(1))

    async def watched(server: Coroutine[Any, Any, None]) -> None:
        await watch.run()
        await server

    plain = {module: module.run for module in (uvloop, asyncio)}
    uvloop.run = lambda server: plain[uvloop](watched(server))  # type: ignore[assignment]
    asyncio.run = lambda server: plain[asyncio](watched(server))  # type: ignore[assignment]
    main()
