"""The flags of the servers under attack (two API keys, short deadlines), and requests of the healthy client."""

import http.client
import json
from typing import Any

from tests.server.live import FAKE_ENGINE, LiveServer

KEY = "healthy"
_KEYS = ("--api-key", KEY, "--api-key", "attacker", "--admin-api-key", "admin")
_DEADLINES = ("--server-timeouts.template-timeout-s", "1")
_LIMITS = (*_KEYS, *_DEADLINES, "--trust-request-chat-template", "--enable-prompt-embeds")
FAKE_FLAGS = (*FAKE_ENGINE, *_LIMITS)
# With short answers and short steps: a case waits for the answers of others, and the healthy stream for the steps.
REAL_FLAGS = ("--num-blocks", "512", "--max-model-len", "512", "--max-num-batched-tokens", "256", *_LIMITS)


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
