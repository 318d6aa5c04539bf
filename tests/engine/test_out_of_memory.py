"""Too little memory at start: the error always names memory and the remedy."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from pagoda.base.config import EngineConfig
from pagoda.base.errors import WorkerDied
from pagoda.engine.clients import supervisor
from pagoda.engine.clients.process_client import ProcessClient
from pagoda.process.out_of_memory import describe_exit, is_out_of_memory
from pagoda.worker.memory import available_memory
from tests.cached_models import cached_model


def test_an_engine_killed_while_loading_names_the_signal_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "START_PAUSE_S", 0.01)

    async def start() -> None:
        client = ProcessClient(EngineConfig(), module="tests.engine.killed_engine")
        try:
            await client.start()
        finally:
            await client.shutdown()

    with pytest.raises(WorkerDied) as caught:
        asyncio.run(asyncio.wait_for(start(), 60))
    message = str(caught.value)
    assert "the engine process was killed by signal 9 (SIGKILL) while loading, 3 times" in message
    assert "probably memory ran out" in message


_LOAD_WITH_LITTLE_MEMORY = """
import resource, sys
import torch
import pagoda.worker.worker
from pagoda import LLM, CapacityError
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limit = used + (int(sys.argv[1]) << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    LLM(sys.argv[2], max_model_len=64, kv_cache_memory=sys.argv[3], kernels="torch", dtype="float32")
except CapacityError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("headroom_mib", "kv_cache", "words"),
    [
        (150, 16 << 20, "memory ran out while loading"),
        (900, 4 << 30, "does not fit in memory, of which"),
    ],
    ids=["weights", "cache"],
)
def test_an_address_space_that_is_too_small_is_a_capacity_error(headroom_mib: int, kv_cache: int, words: str) -> None:
    cached_model("smollm2-135m")
    script = _LOAD_WITH_LITTLE_MEMORY.replace("sys.argv[3]", "int(sys.argv[3])")
    arguments = [str(headroom_mib), "smollm2-135m", str(kv_cache)]
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True)
    assert words in done.stdout
    assert "kv_cache_memory" in done.stdout
    assert "Traceback" not in done.stderr


def test_available_memory_counts_the_limit_of_address_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 8388608 kB\n")
    (tmp_path / "proc/self/statm").write_text("1000 1 1 1 0 1 0\n")
    monkeypatch.setattr("resource.getrlimit", lambda _: (5000 * 4096, 5000 * 4096))
    monkeypatch.setattr("resource.getpagesize", lambda: 4096)
    assert available_memory(tmp_path) == 4000 * 4096


def test_words_of_libraries() -> None:
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(OSError(12, "Cannot allocate memory"))
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"))
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
    assert not is_out_of_memory(ValueError("out of memory"))


@pytest.mark.parametrize(
    ("code", "text"),
    [(1, "ended with exit code 1"), (-9, "was killed by signal 9 (SIGKILL)"), (-99, "was killed by signal 99")],
)
def test_exits_in_words(code: int, text: str) -> None:
    assert describe_exit(code) == text
