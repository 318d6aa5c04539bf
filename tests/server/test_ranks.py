"""A server over several ranks: whichever process is killed, clients only wait, and nothing is left behind."""

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import aiohttp
import pytest

from tests.engine.byte_llama import write_byte_llama
from tests.engine.lora_adapters import write_adapter
from tests.server.live import LiveServer, children, is_running, serving
from tests.server.test_faults import stream

NUM_TOKENS = 150
REGEX = "([a-z]{3} )+"
BEAMS = {"use_beam_search": True, "n": 2, "stream": False}
MIXED: Sequence[Mapping[str, object]] = (
    {},
    {"n": 2},
    {"guided_regex": REGEX},
    {"guided_regex": REGEX, "model": "adapted"},
    {"model": "adapted", "n": 2},
    BEAMS,
    {**BEAMS, "guided_regex": REGEX},
)
"""What differs between the requests of a load."""

TWO_RANKS = ("--tensor-parallel-size", "2")
TWO_STAGES = ("--pipeline-parallel-size", "2")


def flags_of(model: Path, *sizes: str) -> tuple[str, ...]:
    return ("--model", str(model), *(sizes or TWO_RANKS), "--max-model-len", "512", "--kv-cache-memory", "8MiB")


def ranks_of(server: LiveServer) -> list[int]:
    return sorted(pid for pid, line in children(server.engine_pid()).items() if b"assembly.rank_process" in line)


def rank(number: int) -> Callable[[LiveServer], int]:
    """Ranks are started in their order, so that the numbers of their processes ascend, unless those wrap."""
    return lambda server: ranks_of(server)[number]


def kill(victim: Callable[[LiveServer], int]) -> Callable[[LiveServer], None]:
    return lambda server: os.kill(victim(server), signal.SIGKILL)


async def load(
    server: LiveServer,
    faults: Sequence[Callable[[LiveServer], None]],
    bodies: Sequence[Mapping[str, object]] = ({},) * 8,
    num_tokens: int = NUM_TOKENS,
) -> list[tuple[int, list[str]]]:
    """Stream completions; cause the faults one after another, each after some steps of its engine."""
    so_far = server.load()["engine_restarts"]
    if faults:
        server.steps.hold_after(20)
    async with aiohttp.ClientSession(server.url) as session:
        tasks = [asyncio.create_task(stream(session, i, num_tokens, **body)) for i, body in enumerate(bodies)]  # type: ignore[arg-type]
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


@pytest.mark.parametrize(
    ("sizes", "num_kills"),
    [
        (TWO_RANKS, 1),
        pytest.param(TWO_RANKS, 3, marks=pytest.mark.slow),
        pytest.param(TWO_STAGES, 3, marks=pytest.mark.slow),
        pytest.param((*TWO_RANKS, *TWO_STAGES), 5, marks=pytest.mark.slow),
    ],
    ids=["one of two ranks", "two ranks", "two stages", "two stages of two"],
)
def test_processes_are_killed_in_turn(sizes: tuple[str, ...], num_kills: int, tmp_path: Path) -> None:
    """With grammars, beams and adapters: every stream ends with the tokens that it would have had.

    num_kills: under load; of every rank and then of the engine, if there are so many.
    """
    model = write_byte_llama(tmp_path / "model")
    write_adapter(tmp_path / "adapted", model, 4, 1)
    adapters = ("--enable-lora", "--lora-modules", f"adapted={tmp_path / 'adapted'}")
    num_ranks = 2 ** (len(sizes) // 2)
    num_tokens = 25 * (num_kills + 1)  # the last are computed after the last kill
    with tempfile.TemporaryDirectory() as folder:
        env = {"TMPDIR": folder}
        with serving(tmp_path, *flags_of(model, *sizes), *adapters, env=env, stepped=True) as server:
            assert not list(Path(folder).glob("pagoda-*")), "nothing stays on disk while it runs"
            seen = {*ranks_of(server), server.engine_pid()}
            assert len(seen) == num_ranks + 1
            undisturbed = asyncio.run(load(server, [], MIXED, num_tokens))
            assert all(status == 200 and all(texts) for status, texts in undisturbed), undisturbed
            assert len({texts[0] for _, texts in undisturbed}) == len(MIXED)
            before, files = server.wait_idle(), num_open_files(server)
            faults = [*(kill(rank(number)) for number in range(num_ranks)), LiveServer.kill_engine][:num_kills]
            assert asyncio.run(load(server, faults, MIXED, num_tokens)) == undisturbed
            after = server.wait_idle()
            assert after["engine_restarts"] == num_kills
            assert after["free_blocks"] == before["free_blocks"], "an engine that is restarted has the first pools"
            os.kill(ranks_of(server)[1], signal.SIGKILL)
            server.wait_restarts(num_kills + 1)  # without a request that would need it
            wait_until_gone(seen)
            wait_until_closed(server, files)
            seen = {*ranks_of(server), server.engine_pid()}
            assert len(seen) == num_ranks + 1
            server.steps.hold_after(30)
            asyncio.run(break_off(server))
            server.process.wait()
            wait_until_gone(seen)
        assert not list(Path(folder).glob("pagoda-*"))


def wait_until_closed(server: LiveServer, num_files: int) -> None:
    """Until it has no more open files than that; it notices a moment later that the connection of a check has ended."""
    end_s = time.monotonic() + 10
    while (num_open := num_open_files(server)) > num_files:
        assert time.monotonic() < end_s, f"{num_open} open files, of {num_files} before"
        time.sleep(0.05)


def num_open_files(server: LiveServer) -> int:
    """Of the API process: sockets and memory that it shares, too."""
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))
