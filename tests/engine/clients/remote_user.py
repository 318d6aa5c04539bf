"""A client in a process of its own: once its standard input ends, it runs a request and writes its tokens as JSON.

Arguments: the socket of the ClientServer, a seed, a number of tokens.
"""

import asyncio
import json
import sys

from pagoda.engine.async_engine import AsyncEngine
from pagoda.engine.clients.remote_client import RemoteClient
from tests.engine.clients.test_several_clients import ask
from tests.fake_engine import byte_inputs


async def main(path: str, seed: int, max_tokens: int) -> None:
    client = RemoteClient(path)
    await client.start()
    await asyncio.to_thread(sys.stdin.read)
    async with AsyncEngine(client, byte_inputs()) as llm:
        print(json.dumps(await ask(llm, seed, max_tokens)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
