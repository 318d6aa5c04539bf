"""--api-server-count: several processes serve one port before one engine."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.server.live import FAKE_FLAGS, LiveServer, children, serving

COUNT = 2


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Two processes; tests may kill them, the engine too, and limit its steps for a while."""
    folder: Path = tmp_path_factory.mktemp("several")
    with serving(folder, *FAKE_FLAGS, "--api-server-count", str(COUNT), stepped=True) as served:
        yield served


def api_pids(server: LiveServer) -> list[int]:
    return [pid for pid, command in children(server.process.pid).items() if b"api_process" in command]


def client_of(server: LiveServer) -> openai.OpenAI:
    """A client whose every request goes over a connection of its own, so that all processes get some."""
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", default_headers={"Connection": "close"})


def answered_by(server: LiveServer) -> set[str]:
    """The processes that the access log names."""
    lines = [line for line in server.log.read_text().splitlines() if " POST /v1/" in line]
    return {line.split()[3].partition("[")[0] for line in lines}


def test_all_processes_answer_on_one_port(server: LiveServer) -> None:
    client, until_s = client_of(server), time.monotonic() + 20
    while answered_by(server) != {"api-1", "api-2"}:
        assert time.monotonic() < until_s, server.log.read_text()
        chat = client.chat.completions.create(
            model="smollm2-135m", messages=[{"role": "user", "content": "hello"}], max_tokens=5
        )
        assert chat.choices[0].finish_reason == "length"
        text = "".join(
            chunk.choices[0].text
            for chunk in client.completions.create(model="smollm2-135m", prompt="a", max_tokens=5, stream=True)
        )
        assert text


def test_a_killed_process_is_started_again_and_no_connection_is_lost(server: LiveServer) -> None:
    client, before = client_of(server), set(api_pids(server))
    os.kill(next(iter(before)), signal.SIGKILL)
    for _ in range(10):  # of which some reach the port of the dead process
        answer = client.completions.create(model="smollm2-135m", prompt="a", max_tokens=5, timeout=60)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 5
    after = set(api_pids(server))
    assert len(after) == COUNT
    assert len(after & before) == COUNT - 1
