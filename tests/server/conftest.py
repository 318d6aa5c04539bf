"""Servers over the fake executor for all tests here that need sockets and a tokenizer but no model's numbers."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cached_models import cached_model
from tests.server.live import FAKE_ENGINE, FAKE_FLAGS, LiveServer, serving


@pytest.fixture(scope="session")
def fake_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """`pagoda serve` whose tokens come from the fake executor: real processes and sockets, no model.

    Tests may limit its steps for a while (Steps.held_after).
    """
    folder: Path = tmp_path_factory.mktemp("server")
    with serving(folder, *FAKE_FLAGS, stepped=True) as server:
        yield server


@pytest.fixture(scope="session")
def keyed_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """The same with API keys "one" and "two", for browsers on https://a.example; renders no caller's template."""
    keys = ("--api-key", "one", "--api-key", "two")
    folder: Path = tmp_path_factory.mktemp("keyed")
    with serving(folder, *FAKE_ENGINE, *keys, "--cors-origins", "https://a.example") as server:
        yield server


@pytest.fixture(scope="session")
def real_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """`pagoda serve` with SmolLM2, in float32: what every processor computes fast.

    Tests may kill its engine, or limit its steps for a while (Steps.held_after).
    """
    cached_model("smollm2-135m")  # skips where it cannot be had
    folder: Path = tmp_path_factory.mktemp("real")
    flags = ("--dtype", "float32", "--max-model-len", "2048", "--num-blocks", "400", "--ollama")
    with serving(folder, *flags, stepped=True) as server:
        yield server


@pytest.fixture(scope="session")
def gemma_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """As fake_server, with Gemma's tokenizer, which puts a token before each text."""
    cached_model("gemma3-270m")  # skips where it cannot be had
    folder: Path = tmp_path_factory.mktemp("gemma")
    with serving(folder, *FAKE_FLAGS, "--model", "gemma3-270m") as server:
        yield server
