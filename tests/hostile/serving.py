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
_KEYS = ("--api-key", KEY, "--api-key", "attacker", "--admin-api-key", "admin")
_DEADLINES = (
    "--server-timeouts.header-timeout-s",
    "2",
    "--server-timeouts.body-timeout-s",
    "2",
    "--server-timeouts.template-timeout-s",
    "1",
)
_LIMITS = (*_KEYS, *_DEADLINES, "--trust-request-chat-template")
FAKE_FLAGS = (*FAKE_ENGINE, *_LIMITS)
REAL_FLAGS = ("--num-blocks", "512", "--max-model-len", "2048", *_LIMITS)


@contextlib.contextmanager
def watched_serving(folder: Path, *flags: str) -> Iterator[tuple[LiveServer, StallReader]]:
    """A server as `serving` starts it, and what reads its stalls."""
    stalls = StallReader(folder)
    with serving(folder, *flags, program=("tests.hostile.watched_server", str(folder), "--debug")) as server:
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
