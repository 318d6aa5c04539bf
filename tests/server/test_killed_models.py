"""Three real models in one server, whose engines are killed: no request is lost, and tokens stay the same.

Also: what the process that serves them keeps of loads and unloads.
"""

import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.cached_models import cached_model
from tests.server.live import LiveServer, children, serving
from tests.server.test_several_models import loads_of, states, wait_state

pytestmark = pytest.mark.slow

MODELS = {"chat": "smollm2-135m", "base": "gemma3-270m", "embed": "minilm-l6"}
TABLES = "".join(f'[{name}]\nmodel = "{model}"\nkv_cache_memory = "64MiB"\n' for name, model in MODELS.items()).replace(
    '"minilm-l6"\nkv_cache_memory = "64MiB"', '"minilm-l6"'
)
FITS_TWO = "480MiB"


def ask(server: LiveServer, model: str, number: int = 0, max_tokens: int = 60) -> Any:
    """Return what a model makes of a prompt: its text, or its embedding."""
    if model == "embed":
        status, answer = server.post("/v1/embeddings", {"model": model, "input": f"text {number}"}, 300.0)
        assert status == 200, answer
        return answer["data"][0]["embedding"]
    body = {"model": model, "prompt": f"Story {number}:", "max_tokens": max_tokens, "temperature": 1.0}
    status, answer = server.post("/v1/completions", {**body, "seed": number, "ignore_eos": True}, 300.0)
    assert status == 200, answer
    assert answer["usage"]["completion_tokens"] == max_tokens
    return answer["choices"][0]["text"]


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    for model in MODELS.values():
        cached_model(model)  # skips where it cannot be had
    folder: Path = tmp_path_factory.mktemp("models")
    (folder / "models.toml").write_text(TABLES)
    return lambda *flags: serving(folder, "--models", str(folder / "models.toml"), *flags)


@pytest.fixture(scope="module")
def tight(serve: Callable[..., Any]) -> Iterator[LiveServer]:
    """Two of the three models fit at once, but not the two larger ones."""
    with serve("--max-models-memory", FITS_TWO, "--server-timeouts.queue-timeout-s", "600") as server:
        yield server


def engine_of(server: LiveServer, model: str) -> int:
    """The engine process that has loaded a model last."""
    return int(re.findall(rf"engine\[(\d+)\] model: {MODELS[model]} ", server.log.read_text())[-1])


def test_one_of_three_killed_under_load_concerns_no_other(serve: Callable[..., Any]) -> None:
    """Each in turn. What ran in it goes on with the same tokens."""
    asked = [(model, number) for number in range(4) for model in MODELS]
    with serve() as server, ThreadPoolExecutor(len(asked)) as pool:
        expected = {one: ask(server, *one, 200) for one in asked}
        for at, victim in enumerate(MODELS, 1):
            running = {one: pool.submit(ask, server, *one, 200) for one in asked}
            time.sleep(0.3 * at)
            os.kill(engine_of(server, victim), signal.SIGKILL)
            assert {one: answer.result() for one, answer in running.items()} == expected
            lines = server.get("/metrics")[1].splitlines()
            restarts = [int(float(one.split()[-1])) for one in lines if one.startswith("vllm:engine_restarts_total{")]
            assert restarts == [1] * at + [0] * (len(MODELS) - at)
        server.wait_idle()


def test_kills_in_loads_and_unloads_lose_nothing(tight: LiveServer) -> None:
    """Whenever it comes: the request that waits for the load gets its tokens, and so does each to another model."""
    chance, names = random.Random(1), ("chat", "base")
    expected = {name: ask(tight, name) for name in MODELS}
    with ThreadPoolExecutor(8) as pool:
        for round_ in range(4):
            loaded = names[round_ % 2]
            other = names[1 - round_ % 2]
            assert ask(tight, loaded) == expected[loaded]  # `other` is unloaded now
            before, leaving = set(children(tight.process.pid)), engine_of(tight, loaded)
            running: list[tuple[str, Future[Any]]] = [
                (name, pool.submit(ask, tight, name)) for name in (other, other, "embed", loaded)
            ]
            if round_ < 2:  # in the load of the other
                while not (new := set(children(tight.process.pid)) - before):
                    time.sleep(0.002)
                time.sleep(chance.uniform(0, 1.5))
                victim = new.pop()
            else:  # in the unload that makes room for it
                while states(tight)[loaded] == "loaded":
                    time.sleep(0.001)
                victim = leaving
            try:
                os.kill(victim, signal.SIGKILL)
            except ProcessLookupError:
                assert round_ >= 2  # it had ended already
            for name, answer in running:
                assert answer.result() == expected[name], name
            assert loads_of(tight)["loads_total", other, "failed"] == 0
    tight.wait_idle()


def test_twenty_loads_leave_memory_and_open_files_as_they_were(tight: LiveServer) -> None:
    """Of the process that serves: one load in six seconds is its limit."""
    held: list[tuple[int, int]] = []
    expected: dict[str, Any] = {}
    for at in range(26):
        name = ("chat", "base")[at % 2]
        assert ask(tight, name, max_tokens=8) == expected.setdefault(name, ask(tight, name, max_tokens=8))
        tight.post("/models/unload", {"model": name})
        wait_state(tight, name, "unloaded")
        held.append(held_by(tight.process.pid))
    num_bytes, num_files = zip(*held[6:], strict=True)  # the first ones make what is kept once
    assert len(set(num_files)) == 1, num_files
    assert num_bytes[-1] - num_bytes[0] < 4 * 2**20, num_bytes


def held_by(pid: int) -> tuple[int, int]:
    """The bytes of memory and the files that a process has open, besides connections that end just now."""
    counts: list[int] = []
    for _ in range(5):
        time.sleep(0.1)
        counts.append(len(list(Path(f"/proc/{pid}/fd").iterdir())))
    (kibibytes,) = re.findall(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(kibibytes) * 2**10, min(counts)
