"""Kills, leavers, overload and the end, over HTTP: nothing is lost, nothing leaks."""

import asyncio
import contextlib
import json
import os
import random
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.server.live import LiveServer, children, is_running, reserved_port, serving
from tests.server.turn_apis import BODIES, STREAMED, Turn, asked, events_of, summary

FLAGS = ("--distributed-executor-backend", "fake", "--num-blocks", "1024", "--max-model-len", "2048")


async def stream(
    session: aiohttp.ClientSession,
    seed: int,
    max_tokens: int,
    n: int = 1,
    began: asyncio.Event | None = None,
    **more: object,
) -> tuple[int, list[str]]:
    """(status, text per choice) of one completion; `began` is set when its first token is there.

    more: fields of its body. It is streamed unless they say otherwise.
    """
    body = {
        "prompt": [10 + seed % 50] * 12,
        "max_tokens": max_tokens,
        "seed": seed,
        "n": n,
        "stream": True,
        "ignore_eos": True,
        **more,
    }
    texts = [""] * n
    async with session.post("/v1/completions", json=body) as response:
        if response.status != 200:
            return response.status, [(await response.json())["error"]["message"]]
        if not body["stream"]:
            return 200, [choice["text"] for choice in (await response.json())["choices"]]
        async for line in response.content:
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                for choice in chunk["choices"]:
                    texts[choice["index"]] += choice["text"]
                if began is not None:
                    began.set()
        return 200, texts


async def turn(session: aiohttp.ClientSession, path: str, is_streamed: bool) -> dict[str, Any]:
    """What a route says, whole or streamed."""
    async with session.post(path, json=asked(path, Turn("Hello", 300, seed=3), is_streamed)) as response:
        assert response.status == 200, await response.text()
        return summary(events_of(await response.read()))


def test_a_killed_engine_only_causes_a_pause(tmp_path: Path) -> None:
    """In every API, whole and streamed, and for several outputs."""

    async def load(server: LiveServer, kills: int) -> list[object]:
        """The engine is killed after some steps, and so is the next one; none ends a stream before."""
        if kills:
            server.steps.hold_after(30)
        async with aiohttp.ClientSession(server.url) as session:
            turns = [*((path, False) for path in BODIES), *((path, True) for path in STREAMED)]
            tasks: list[asyncio.Task[Any]] = [asyncio.create_task(turn(session, *one)) for one in turns]
            tasks += [asyncio.create_task(stream(session, i, 300, 1 + i % 3)) for i in range(16)]
            for number in range(kills):
                await asyncio.to_thread(server.steps.wait_held)
                assert not any(task.done() for task in tasks)
                await asyncio.to_thread(server.kill_engine)
                if number + 1 < kills:
                    server.steps.hold_next_engine_after(50)
                else:
                    server.steps.release()
                await asyncio.to_thread(server.wait_restarts, number + 1)
            return await asyncio.gather(*tasks)

    with serving(tmp_path, *FLAGS, "--ollama", stepped=True) as server:
        undisturbed = asyncio.run(load(server, 0))
        server.wait_idle()
        assert asyncio.run(load(server, 2)) == undisturbed
        assert server.wait_idle()["engine_restarts"] == 2


def gauges(server: LiveServer, *names: str) -> list[float]:
    lines = server.get("/metrics")[1].splitlines()
    return [float(line.split()[-1]) for name in names for line in lines if line.startswith(f"vllm:{name}{{")]


async def read_to_end(reader: asyncio.StreamReader) -> None:
    while await reader.read(65536):
        pass


def test_many_disconnecting_clients_leave_nothing_behind(tmp_path: Path) -> None:
    """200 clients on a cache far too small for them leave at random times, half of them with a reset.

    The second hundred stay until requests were seen running, waiting and swapped out, however slow the machine is.
    """
    rng = random.Random(7)
    states = {"running", "waiting", "swapped"}

    async def leave(port: int, number: int, after_s: float, seen_all: asyncio.Event) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = {"prompt": [9 + number] * 100, "max_tokens": 1500, "stream": number % 2 == 0, "n": 1 + number % 3}
        data = json.dumps({**body, "ignore_eos": True}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        whole = head + b"Content-Length: %d\r\n\r\n" % len(data) + data
        writer.write(whole if number % 8 else whole[: rng.randrange(len(whole))])
        reading = asyncio.create_task(read_to_end(reader))
        if number >= 100:
            await seen_all.wait()
        await asyncio.wait({reading}, timeout=after_s)
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading
        if number % 4 < 2:
            no_linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, no_linger)
        writer.close()

    async def storm(server: LiveServer) -> None:
        port = int(server.url.rsplit(":", 1)[1])
        seen_all = asyncio.Event()
        leavers = [asyncio.create_task(leave(port, i, rng.uniform(0, 3), seen_all)) for i in range(200)]
        seen: set[str] = set()
        end = time.monotonic() + 60
        while seen != states:
            assert time.monotonic() < end, f"requests were only ever {sorted(seen)}"
            load = await asyncio.to_thread(server.load)
            seen.update(name for name in states if load[name])
            await asyncio.sleep(0.01)
        seen_all.set()
        await asyncio.gather(*leavers)

    flags = (*FLAGS, "--num-blocks", "512", "--preemption-mode", "swap", "--num-host-blocks", "512")
    with serving(tmp_path, *flags) as server:
        asyncio.run(storm(server))
        load = server.wait_idle(10)
        assert (load["live_tokens"], load["swapped"], load["free_blocks"]) == (0, 0, 512)
        names = ("num_requests_running", "num_requests_waiting", "num_requests_swapped", "kv_cache_usage_perc")
        assert gauges(server, *names) == [0.0] * 4
        assert gauges(server, "num_preemptions_total")[0] > 0
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 5})[0] == 200


def test_a_slow_reader_delays_only_itself(fake_server: LiveServer) -> None:
    async def main() -> float:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(fake_server.url.rsplit(":", 1)[1]))
        body = json.dumps({"prompt": "x", "max_tokens": 1900, "stream": True, "ignore_eos": True}).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
            + str(len(body)).encode()
            + b"\r\n\r\n"
            + body
        )
        await reader.read(100)  # and then no more
        begin_s = time.perf_counter()
        async with aiohttp.ClientSession(fake_server.url) as session:
            assert (await stream(session, 1, 50))[0] == 200
        took_s = time.perf_counter() - begin_s
        writer.close()
        return took_s

    assert asyncio.run(main()) < 5
    fake_server.wait_idle(10)


def test_without_a_line_overload_is_429_at_once_and_admitted_requests_are_served(tmp_path: Path) -> None:
    async def main(server: LiveServer) -> list[tuple[int, list[str]]]:
        async with aiohttp.ClientSession(server.url) as session:
            tasks = [asyncio.create_task(stream(session, i, 300)) for i in range(12)]
            for count, one in enumerate(asyncio.as_completed(tasks), 1):
                assert (await one)[0] == (429 if count <= 8 else 200), "those that are admitted have not ended yet"
                if count == 8:
                    server.steps.release()
            return await asyncio.gather(*tasks)

    limits = ("--server-limits.max-queued-requests", "4", "--server-timeouts.queue-timeout-s", "0")
    with serving(tmp_path, *FLAGS, *limits, stepped=True) as server:
        with server.steps.held_after(0):  # none has its first token: all that are admitted wait
            results = asyncio.run(asyncio.wait_for(main(server), 60))
        assert sorted(status for status, _ in results) == [200] * 4 + [429] * 8
        status, answer = server.post("/v1/completions", {"prompt": ["a"] * 5, "max_tokens": 1})
        assert (status, answer["error"]["param"]) == (400, "prompt"), "to come again would not help"
        metrics = server.get("/metrics")[1]
        assert 'vllm:admission_rejections_total{engine="0",model_name="smollm2-135m",reason="requests"} 8.0' in metrics


def test_keys_authenticate_and_separate_clients(keyed_server: LiveServer) -> None:
    body = {"prompt": [5] * 64, "max_tokens": 2}
    assert keyed_server.post("/v1/completions", body)[0] == 401
    assert keyed_server.get("/health")[0] == 200

    def cached(key: str) -> int:
        status, answer = keyed_server.post("/v1/completions", body, Authorization=f"Bearer {key}")
        assert status == 200
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached("one") == 0
    assert cached("one") > 0
    assert cached("two") == 0, "a tenant sees another's prefix"


def wait_until_gone(pid: int) -> None:
    end = time.monotonic() + 60
    while is_running(pid):
        assert time.monotonic() < end, "the engine process outlives its server"
        time.sleep(0.05)


def test_the_engine_ends_with_a_killed_server_and_leaves_no_file(tmp_path: Path) -> None:
    async def break_off(server: LiveServer) -> None:
        async with aiohttp.ClientSession(server.url) as session:
            began = asyncio.Event()
            running = asyncio.create_task(stream(session, 1, 1900, 8, began))
            await began.wait()
            server.process.kill()
            with pytest.raises(aiohttp.ClientError):
                await running

    with tempfile.TemporaryDirectory() as folder:  # a socket's path has to be short
        # The engine computes when its server ends; with 1900 steps of 20 ms, not for much longer.
        slow = {"TMPDIR": folder, "ENGINE_STEP_S": "0.02"}
        with serving(tmp_path, *FLAGS, env=slow, engine="tests.engine.slow_engine") as server:
            assert not list(Path(folder).glob("pagoda-*"))
            pid = server.engine_pid()
            asyncio.run(asyncio.wait_for(break_off(server), 60))
            server.process.wait()
            wait_until_gone(pid)
        assert not list(Path(folder).glob("pagoda-*"))


def test_a_server_killed_while_its_engine_starts_leaves_nothing(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, reserved_port() as port:
        command = [sys.executable, "-m", "pagoda", "serve", *FLAGS, "--port", str(port)]
        process = subprocess.Popen(command, env={**os.environ, "TMPDIR": folder})
        end = time.monotonic() + 60
        while not (started := [pid for pid, line in children(process.pid).items() if b"engine" in line]):
            assert time.monotonic() < end
            time.sleep(0.01)
        (pid,) = started
        assert list(Path(folder).glob("pagoda-*"))
        process.kill()
        process.wait()
        wait_until_gone(pid)
        assert not list(Path(folder).glob("pagoda-*"))


def test_bad_settings_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="max_model_len"), serving(tmp_path, "--max-model-len", "999999999"):
        pass


def test_a_server_that_cannot_process_outputs_any_more_ends_with_a_message(tmp_path: Path) -> None:
    """A process manager can then start it again; before, it went on with every answer an error."""
    with serving(tmp_path, *FLAGS, program=("tests.server.serve_broken",)) as server:
        status, answer = server.post("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 5})
        assert (status, "a defect" in answer["error"]["message"]) == (503, True)
        assert server.process.wait(20) != 0
        last = server.log.read_text().strip().splitlines()[-1]
        assert "a defect" in last, "the reason is the last line"
