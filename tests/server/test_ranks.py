"""A server over several ranks: whichever process is killed, clients only wait, and nothing is left behind."""

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import aiohttp
import pytest

from tests.engine.byte_llama import write_byte_llama
from tests.server.live import LiveServer, children, is_running, serving
from tests.server.test_faults import stream

NUM_TOKENS = 150


def flags_of(model: Path) -> tuple[str, ...]:
    return ("--model", str(model), "--tensor-parallel-size", "2", "--max-model-len", "512", "--kv-cache-memory", "8MiB")


def ranks_of(server: LiveServer) -> list[int]:
    return sorted(pid for pid, line in children(server.engine_pid()).items() if b"executors.rank" in line)


def rank(number: int) -> Callable[[LiveServer], int]:
    """Ranks are started in their order, so that the numbers of their processes ascend, unless those wrap."""
    return lambda server: ranks_of(server)[number]


def kill(victim: Callable[[LiveServer], int]) -> Callable[[LiveServer], None]:
    return lambda server: os.kill(victim(server), signal.SIGKILL)


async def load(server: LiveServer, faults: Sequence[Callable[[LiveServer], None]]) -> list[tuple[int, list[str]]]:
    """Stream eight completions; cause the faults one after another, each after some steps of its engine."""
    so_far = server.load()["engine_restarts"]
    if faults:
        server.steps.hold_after(20)
    async with aiohttp.ClientSession(server.url) as session:
        tasks = [asyncio.create_task(stream(session, i, NUM_TOKENS, 1 + i % 2)) for i in range(8)]
        for number, fault in enumerate(faults):
            await asyncio.to_thread(server.steps.wait_held)
            assert not any(task.done() for task in tasks)
            await asyncio.to_thread(fault, server)
            if number + 1 < len(faults):
                server.steps.hold_next_engine_after(25)
            else:
                server.steps.release()
            await asyncio.to_thread(server.wait_restarts, so_far + number + 1)
        return await asyncio.gather(*tasks)


async def break_off(server: LiveServer) -> None:
    async with aiohttp.ClientSession(server.url) as session:
        began = asyncio.Event()
        running = asyncio.create_task(stream(session, 1, NUM_TOKENS, 8, began))
        await began.wait()
        server.process.kill()
        with pytest.raises(aiohttp.ClientError):
            await running


def wait_until_gone(pids: set[int]) -> None:
    end_s = time.monotonic() + 30
    while left := {pid for pid in pids if is_running(pid)}:
        assert time.monotonic() < end_s, f"processes outlive those that started them: {left}"
        time.sleep(0.05)


def test_every_process_is_killed_in_turn(tmp_path: Path) -> None:
    model = write_byte_llama(tmp_path / "model")
    with tempfile.TemporaryDirectory() as folder:
        env = {"TMPDIR": folder}
        with serving(tmp_path, *flags_of(model), env=env, stepped=True) as server:
            assert not list(Path(folder).glob("pagoda-*")), "nothing stays on disk while it runs"
            seen = {*ranks_of(server), server.engine_pid()}
            undisturbed = asyncio.run(load(server, []))
            assert all(status == 200 and all(texts) for status, texts in undisturbed)
            before = server.wait_idle()
            assert asyncio.run(load(server, [kill(rank(0)), kill(rank(1)), LiveServer.kill_engine])) == undisturbed
            after = server.wait_idle()
            assert after["engine_restarts"] == 3
            assert after["free_blocks"] == before["free_blocks"], "an engine that is restarted has the first pools"
            os.kill(ranks_of(server)[1], signal.SIGKILL)
            server.wait_restarts(4)  # without a request that would need it
            wait_until_gone(seen)
            seen = {*ranks_of(server), server.engine_pid()}
            assert len(seen) == 3
            server.steps.hold_after(30)
            asyncio.run(break_off(server))
            server.process.wait()
            wait_until_gone(seen)
        assert not list(Path(folder).glob("pagoda-*"))
