"""A process that has an engine and serves it to others: `python -m`, with the socket for them.

It writes the engine's process id when that is ready.
"""

import asyncio
import sys

from pagoda.base.config import EngineConfig
from pagoda.engine.clients.client_server import ClientServer
from pagoda.engine.clients.process_client import ProcessClient
from tests.engine.clients.test_process_client import OPTIONS


async def main(path: str) -> None:
    client = ProcessClient(EngineConfig.from_options(**OPTIONS), module="tests.engine.stepped_engine")
    starting = asyncio.create_task(client.start())
    server = ClientServer(client, starting)
    await server.start(path)
    await starting
    print(client.engine_pid, flush=True)
    await client.wait_until_gone()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
