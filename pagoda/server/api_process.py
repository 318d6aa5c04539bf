"""One of several processes that serve HTTP on one port; ApiGroup starts it as a module.

It serves as a process does that is alone, but for the engine, which its parent has, and what it shares with the others.
"""

import logging
import os
import socket
import sys

import msgspec

from pagoda.base.abbreviate import abbreviate
from pagoda.base.errors import PagodaError
from pagoda.engine.clients.remote_client import RemoteClient
from pagoda.process.allocator import keep_buffers_apart
from pagoda.process.child_process import RendezvousDir, end_with_parent, read_start
from pagoda.process.logs import configure_logging
from pagoda.server.api_start import SOCKET, ApiStart, tell_error
from pagoda.server.app import serve
from pagoda.server.model_engine import ModelEngine
from pagoda.server.model_loader import ModelLoader
from pagoda.server.peers import RemotePeers
from pagoda.server.served_adapters import AdapterChange
from pagoda.server.state import build_state
from pagoda.server.telemetry import telemetry_of

logger = logging.getLogger("pagoda.server")


def main() -> None:
    """Read an ApiStart from standard input, and serve until the parent says that all end."""
    stdin = sys.stdin.buffer
    data = read_start(stdin)
    if data is None:
        return
    start = msgspec.msgpack.decode(data, type=ApiStart)
    place = RendezvousDir(start.folder)
    end_with_parent(stdin, place.remove)
    logs = start.config.server.logs
    configure_logging(f"api-{start.number}", logs.log_level, logs.log_format)
    keep_buffers_apart(os.environ)
    try:
        from uvloop import run
    except ImportError:
        from asyncio import run  # type: ignore[assignment]
    try:
        run(_serve(start, place))
    except PagodaError as error:
        tell_error(place, start.number, error)
        sys.exit(1)


async def _serve(start: ApiStart, place: RendezvousDir) -> None:
    config = start.config
    listeners = [socket.socket(fileno=fd) for fd in dict.fromkeys(start.listeners)]
    peers = RemotePeers(start.salt_secret, listeners)
    client = RemoteClient(str(place.path(SOCKET)))
    peers.calls = client.calls
    loader = ModelLoader([ModelEngine(config, client)])
    loader.start_first()
    try:
        state = await build_state(loader, peers)
        state.telemetry = telemetry_of(os.environ, state.model.name, f"api-{start.number}")
        if start.is_first:
            await state.model.adapters.load_modules(config.server.lora_sources)
        client.calls.offer(peers.services)
        for change in await client.calls.call("begin", start.number, returns=list[AdapterChange]):
            if (failure := await state.model.adapters.try_to(change)) is not None:
                logger.error(
                    "the adapter %s could not be loaded again, and requests that this process gets for it are a 404 "
                    "until it is (/v1/load_lora_adapter with load_inplace): %s",
                    abbreviate(change.name),
                    failure[1],
                )

        def on_ready() -> None:
            logger.info("this process serves")
            client.calls.post("ready", start.number)

        await serve(state, config.server, listeners[(start.number - 1) % len(listeners)], on_ready)
    finally:
        await loader.close()
