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
shown_with_tools = pytest.mark.slow
"""Each takes ten seconds to import its package, and test_tool_clients.py runs the same package against a model."""


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
    assert saw["files"] == {"status": 404, "sent": 1}


@shown_with_tools
def test_instructor__answers_plainly_and_in_json(saw: dict[str, Any]) -> None:
    assert saw["plain"]
    assert saw["json"]


@shown_with_tools
def test_langchain__chats_streams_and_batches(saw: dict[str, Any]) -> None:
    assert saw["whole"] == saw["streamed"] != ""
    assert saw["batch"] == [saw["whole"]] * 2
    assert saw["usage"] == 8
    assert saw["json_mode"] in (200, "cut off")  # eight tokens may be too few for the object


@shown_with_tools
def test_pydantic_ai__runs_an_agent(saw: dict[str, Any]) -> None:
    assert saw["whole"] == saw["streamed"] != ""
    assert saw["tools"] == 200  # described in a message: this model's template has no place for them


@shown_with_tools
def test_openai_agents__runs_an_agent(saw: dict[str, Any]) -> None:
    assert saw["whole"] == saw["streamed"] != ""
    assert saw["tools"] == 200
