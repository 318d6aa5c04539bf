"""Clients over openai 3 against a live server: chat, streams, and errors as each of them reports them.

They have their own environment (see the Makefile), because their pins differ from ours.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.server.live import LiveServer

PYTHON = Path(f"{sys.prefix}-clients") / "bin" / "python"
SCRIPT = Path(__file__).parent / "client_scripts" / "openai3_clients.py"

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason=f"no {PYTHON}; install it with: make .venv-clients/.installed"
)


@pytest.fixture
def saw(fake_server: LiveServer, request: pytest.FixtureRequest) -> dict[str, Any]:
    """What the client that the test is named after has seen."""
    name = request.node.name.removeprefix("test_").partition("__")[0]
    command = [str(PYTHON), str(SCRIPT), name, fake_server.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen


def test_openai_package__chats_streams_and_raises(saw: dict[str, Any]) -> None:
    assert saw["version"].startswith("3.")
    assert saw["whole"] == saw["streamed"] != ""
    assert saw["temperature"] == [400, "temperature"]
    assert saw["model"] == [404, "model"]


def test_openai_retries__never_repeats_what_is_not_available(saw: dict[str, Any]) -> None:
    for name in ("embeddings", "responses", "response_format"):
        assert saw[name] == {"status": 200, "sent": 1}, name
    assert saw["fine_tuning"] == {"status": 404, "sent": 1}
