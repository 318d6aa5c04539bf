"""Servers over the fake executor for all tests here that need sockets and a tokenizer but no model's numbers."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.live import LiveServer, serving


@pytest.fixture(scope="session")
def fake_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """`pagoda serve` whose tokens come from the fake executor: real processes and sockets, no model."""
    folder: Path = tmp_path_factory.mktemp("server")
    flags = (
        "--distributed-executor-backend",
        "fake",
        "--num-blocks",
        "512",
        "--max-model-len",
        "2048",
        "--trust-request-chat-template",
    )
    with serving(folder, *flags) as server:
        yield server


@pytest.fixture(scope="session")
def keyed_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """The same with API keys "one" and "two", for browsers on https://a.example; renders no caller's template."""
    flags = ("--distributed-executor-backend", "fake", "--num-blocks", "512", "--max-model-len", "2048")
    keys = ("--api-key", "one", "--api-key", "two")
    folder: Path = tmp_path_factory.mktemp("keyed")
    with serving(folder, *flags, *keys, "--cors-origins", "https://a.example") as server:
        yield server
