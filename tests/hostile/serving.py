"""A watched server: two API keys, short deadlines, and a StallWatch on its event loop."""

import contextlib
import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.hostile.stall_watch import StallReader
from tests.server.live import FAKE_ENGINE, LiveServer, serving

KEY = "healthy"
_LIMITS = (
    "--api-key",
    KEY,
    "--api-key",
    "attacker",
    "--admin-api-key",
    "admin",
    "--header-timeout-s",
    "2",
    "--body-timeout-s",
    "2",
)
FAKE_FLAGS = (*FAKE_ENGINE, "--trust-request-chat-template", *_LIMITS)
REAL_FLAGS = ("--num-blocks", "512", "--max-model-len", "2048", "--trust-request-chat-template", *_LIMITS)


@contextlib.contextmanager
def watched_serving(folder: Path, *flags: str) -> Iterator[tuple[LiveServer, StallReader]]:
    """A server as `serving` starts it, and what reads its stalls."""
    stalls = StallReader(folder)
    with serving(folder, *flags, program=("tests.hostile.watched_server", str(folder))) as server:
        yield server, stalls


def get(server: LiveServer, path: str) -> str:
    """The answer to a GET under the healthy client's key."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {KEY}"})
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def load(server: LiveServer) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(get(server, "/load"))
    return answer
