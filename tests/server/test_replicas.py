"""--data-parallel-size: whichever process is killed, streams go on with the tokens that they would have had."""

import asyncio
import contextlib
import itertools
import json
import os
import re
import signal
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import aiohttp
import pytest

from tests.engine.byte_llama import write_byte_llama
from tests.engine.lora_adapters import write_adapter
from tests.server.live import LiveServer, children, is_running, serving
from tests.server.test_faults import stream
from tests.server.test_ranks import MIXED, NUM_TOKENS, ranks_of

Texts = list[tuple[int, list[str]]]


def engines_of(server: LiveServer) -> list[int]:
    """The engine processes of the replicas."""
    return [pid for pid, command in children(server.process.pid).items() if b"stepped_engine" in command]


def rank_pids(server: LiveServer) -> list[int]:
    """The ranks of all engines."""
    commands = [*itertools.chain(*(children(pid).items() for pid in engines_of(server)))]
    return [pid for pid, command in commands if b"assembly.rank_process" in command]


def api_pids(server: LiveServer) -> list[int]:
    return [pid for pid, command in children(server.process.pid).items() if b"api_process" in command]


def kill(server: LiveServer, *numbers: int) -> None:
    engines = engines_of(server)
    for number in numbers:
        os.kill(engines[number], signal.SIGKILL)


def kill_rank(server: LiveServer) -> None:
    """Of one engine, which may have just begun."""
    while len(ranks := ranks_of(server)) < 2:
        time.sleep(0.01)
    os.kill(ranks[1], signal.SIGKILL)


@contextlib.contextmanager
def served(folder: Path, *flags: str) -> Iterator[LiveServer]:
    model = write_byte_llama(folder / "model")
    write_adapter(folder / "adapted", model, 4, 1)
    adapters = ("--enable-lora", "--lora-modules", f"adapted={folder / 'adapted'}")
    sizes = ("--data-parallel-size", "2", "--max-model-len", "512", "--kv-cache-memory", "8MiB")
    with serving(folder, "--model", str(model), *sizes, *adapters, *flags, stepped=True) as server:
        yield server


async def load(server: LiveServer, faults: Sequence[Callable[[LiveServer], None]] = ()) -> Texts:
    """Stream completions; cause each fault while both engines are in the middle of them."""
    num_restarts = server.load()["engine_restarts"]
    server.steps.hold_after(10**9)  # until then, they are slow
    async with aiohttp.ClientSession(server.url) as session:
        begun = [asyncio.Event() for _ in MIXED]
        tasks = [
            asyncio.create_task(stream(session, i, NUM_TOKENS, began=begun[i], **body))  # type: ignore[arg-type]
            for i, body in enumerate(MIXED)
        ]
        await asyncio.gather(*(one.wait() for one, body in zip(begun, MIXED, strict=True) if body.get("stream", True)))
        for fault in faults:
            server.steps.hold_next_engine_after(0)
            assert not any(task.done() for task in tasks)
            await asyncio.to_thread(fault, server)
            while server.load()["engine_restarts"] == num_restarts or len(engines_of(server)) < 2:
                assert server.get("/health")[0] == 200 or len(faults) > 1
                await asyncio.sleep(0.01)
            num_restarts = server.load()["engine_restarts"]
            server.steps.hold_after(10**9)
            await asyncio.sleep(0.2)
        server.steps.release()
        return await asyncio.gather(*tasks)


def test_a_replica_is_killed_under_load(tmp_path: Path) -> None:
    """With grammars, beams and adapters. The server answers meanwhile."""
    with served(tmp_path) as server:
        undisturbed = asyncio.run(load(server))
        assert all(status == 200 and all(texts) for status, texts in undisturbed), undisturbed
        before = server.wait_idle()
        assert asyncio.run(load(server, [lambda server: kill(server, 0)])) == undisturbed
        after = server.wait_idle()
        assert after["engine_restarts"] == 1
        assert after["free_blocks"] == before["free_blocks"]
        tokens = server.metric("generation_tokens_total")
        assert tokens >= 2 * NUM_TOKENS * len(MIXED)
        assert server.post("/reset_prefix_cache", {})[0] == 200
        embedded = server.post("/v1/embeddings", {"input": ["one", "two", "three"]})[1]
        assert len(embedded["data"]) == 3
        headers = {"Content-Type": "application/json", "X-Return-Timings": "1"}
        body = json.dumps({"prompt": "one", "max_tokens": 2}).encode()
        with urllib.request.urlopen(urllib.request.Request(f"{server.url}/v1/completions", body, headers)) as answer:
            # the killed one may still load
            assert re.fullmatch("replica=[12], because=(turn|only_ready)", answer.headers["X-Routed-Because"])
            request_id = json.load(answer)["id"]
        timeline = json.loads(server.get(f"/requests/{request_id}")[1])["timeline"]
        assert re.fullmatch("sent to replica [12]: (turn|only ready)", timeline[1]["what"])
        metrics = server.get("/metrics")[1]
        for because in ("turn", "only_ready"):
            assert re.search(rf'vllm:routed_requests_total{{because="{because}",[^}}]*}} [1-9]', metrics)
        assert [name for name in ("engine-1", "engine-2") if f" {name}[" in server.log.read_text()]


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--api-server-count", "2")], ids=str)
def test_engines_are_restarted_under_load_without_an_error(flags: tuple[str, ...], tmp_path: Path) -> None:
    def restart(server: LiveServer) -> None:
        assert server.post("/restart_engines", {}, timeout_s=300.0)[0] == 200

    with served(tmp_path, *flags, "--server-timeouts.drain-timeout-s", "0") as server:
        undisturbed = asyncio.run(load(server))
        before = set(engines_of(server))
        assert asyncio.run(load(server, [restart])) == undisturbed
        assert not before & set(engines_of(server))
        assert server.wait_idle()["engine_restarts"] == 2
        assert re.search(r'vllm:engines{[^}]*state="up"} 2', server.get("/metrics")[1])


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--api-server-count", "2")], ids=str)
def test_new_weights_come_without_an_error_and_no_answer_has_tokens_of_both(
    flags: tuple[str, ...], tmp_path: Path
) -> None:
    """Also where the drain has no time: the last replica with the old weights gets its requests done first."""
    other, tier = write_byte_llama(tmp_path / "other", seed=2), tmp_path / "tier"
    unlike = write_byte_llama(tmp_path / "unlike", seed=2)
    (unlike / "chat_template.jinja").write_text("{{ messages }}")
    tiers = ("--kv-tier", f"disk={tier}:64MiB") * (not flags)

    async def restart_under(server: LiveServer) -> tuple[list[object], list[object]]:
        """The streams that had begun, and those that came meanwhile."""
        server.steps.hold_after(10**9)  # until then, they are slow
        async with aiohttp.ClientSession(server.url) as session:
            begun = [asyncio.Event() for _ in range(4)]
            first = [asyncio.create_task(stream(session, i, NUM_TOKENS, began=begun[i])) for i in range(4)]
            await asyncio.gather(*(one.wait() for one in begun))
            body = {"model_path": str(other)}
            restarting = asyncio.create_task(asyncio.to_thread(server.post, "/restart_engines", body, 300.0))
            later = list[object]()
            while not restarting.done():
                later += await asyncio.gather(*(stream(session, i, NUM_TOKENS // 10) for i in range(4)))
            assert (await restarting)[0] == 200
            server.steps.release()
            return list(await asyncio.gather(*first)), later

    async def alone(server: LiveServer, count: int) -> list[tuple[int, list[str]]]:
        async with aiohttp.ClientSession(server.url) as session:
            return [await stream(session, i, count) for i in range(4)]

    with served(tmp_path, *flags, *tiers, "--server-timeouts.drain-timeout-s", "0") as server:
        for path, text in ((tmp_path / "no", "does not exist"), (unlike, "chat_template.jinja")):
            status, answer = server.post("/restart_engines", {"model_path": str(path)})
            assert (status, answer["error"]["param"]) == (400, "model_path")
            assert text in answer["error"]["message"]
        old, old_begins = (asyncio.run(alone(server, count)) for count in (NUM_TOKENS, NUM_TOKENS // 10))
        first, later = asyncio.run(restart_under(server))
        assert first == old
        new_begins = asyncio.run(alone(server, NUM_TOKENS // 10))
        assert old_begins != new_begins
        assert later
        assert all(one in (old_begins[at % 4], new_begins[at % 4]) for at, one in enumerate(later))
        assert later[-4:] == new_begins
        assert server.wait_idle()["engine_restarts"] == 2
        kill(server, 1)  # the next engine has the new weights, too
        server.wait_restarts(3)
        assert asyncio.run(alone(server, NUM_TOKENS // 10)) == new_begins
        if tiers:
            assert len([one for one in tier.iterdir() if one.is_dir()]) == 2  # a root for each


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--api-server-count", "2"), ("--tensor-parallel-size", "2")], ids=str)
def test_replicas_are_killed_in_turn_and_together(flags: tuple[str, ...], tmp_path: Path) -> None:
    with served(tmp_path, *flags) as server:
        undisturbed = asyncio.run(load(server))
        faults = [lambda server: kill(server, 0), lambda server: kill(server, 1), lambda server: kill(server, 0, 1)]
        if "--tensor-parallel-size" in flags:
            faults.append(kill_rank)
        assert asyncio.run(load(server, faults)) == undisturbed
        assert server.wait_idle()["engine_restarts"] >= len(faults)


async def stream_alone(server: LiveServer, number: int) -> tuple[int, list[str]] | None:
    """Over a connection of its own, to any API process; None if that ends early."""
    try:
        async with aiohttp.ClientSession(server.url) as session:
            return await stream(session, number, NUM_TOKENS)
    except aiohttp.ClientError:
        return None


@pytest.mark.slow
def test_every_process_is_killed_in_turn_under_load(tmp_path: Path) -> None:
    """Two replicas of two ranks behind two API processes. Only streams of a killed API process end early; at last, all
    processes end with their parent."""

    async def kill_all(server: LiveServer) -> None:
        undisturbed = [await stream_alone(server, number) for number in range(6)]
        num_done, num_broken, is_over = Counter[int](), 0, False
        num_killed = Counter[object]()

        async def ask_again_and_again(number: int) -> None:
            nonlocal num_broken
            while not is_over:
                found = await stream_alone(server, number)
                assert found in (None, undisturbed[number])
                num_broken += found is None
                num_done[number] += found is not None

        async def until(is_true: Callable[[], object]) -> None:
            is_so: object = False
            while not is_so:
                assert not any(task.done() for task in tasks)
                await asyncio.sleep(0.05)
                with contextlib.suppress(OSError):  # a connection to the API process that was killed
                    is_so = await asyncio.to_thread(is_true)

        def is_whole() -> bool:
            num_serving = server.log.read_text().count("this process serves")
            num_deaths = num_killed[engines_of] + num_killed[rank_pids]
            return (
                num_serving == 2 + num_killed[api_pids]
                and server.load()["engine_restarts"] == num_deaths
                and re.search(r'vllm:engines{[^}]*state="up"} 2', server.get("/metrics")[1]) is not None
                and all(len(pids(server)) == count for pids, count in roles)
            )

        async def kill_one(pids: Callable[[LiveServer], list[int]], number: int) -> None:
            before, so_far = num_broken, Counter(num_done)
            os.kill(pids(server)[number], signal.SIGKILL)
            num_killed[pids] += 1
            await until(is_whole)
            await until(lambda: all(num_done[at] > so_far[at] + 1 for at in range(6)))
            assert pids is api_pids or num_broken == before

        server.steps.hold_after(10**9)  # until then, they are slow
        tasks = [asyncio.create_task(ask_again_and_again(number)) for number in range(6)]
        roles = ((api_pids, 2), (engines_of, 2), (rank_pids, 4))
        await until(is_whole)
        for pids, count in roles:
            for number in range(count):
                await kill_one(pids, number)
        is_over = True
        server.steps.release()
        await asyncio.gather(*tasks)

    flags = ("--api-server-count", "2", "--tensor-parallel-size", "2")
    with served(tmp_path, *flags) as server:
        asyncio.run(kill_all(server))
        pids = [*api_pids(server), *engines_of(server), *rank_pids(server)]
        assert len(pids) == 8
        server.process.kill()
        until_s = time.monotonic() + 30
        while any(map(is_running, pids)):
            assert time.monotonic() < until_s
            time.sleep(0.05)


@pytest.mark.slow
def test_an_api_process_is_killed_in_front_of_replicas(tmp_path: Path) -> None:
    """Its requests end in both engines, and nobody else's."""

    def kill_api(server: LiveServer) -> None:
        os.kill(api_pids(server)[0], signal.SIGKILL)

    async def load_alone(server: LiveServer, fault: Callable[[LiveServer], None] | None) -> list[object]:
        server.steps.hold_after(10**9)
        tasks = [asyncio.create_task(stream_alone(server, number)) for number in range(12)]
        while server.load()["running"] < len(tasks):
            await asyncio.sleep(0.01)
        if fault is not None:
            await asyncio.to_thread(fault, server)
            await asyncio.to_thread(kill, server, 1)
        server.steps.release()
        return list(await asyncio.gather(*tasks))

    with served(tmp_path, "--api-server-count", "2") as server:
        undisturbed = asyncio.run(load_alone(server, None))
        disturbed = asyncio.run(load_alone(server, kill_api))
        assert {one is None for one in disturbed} == {True, False}
        assert all(one in (None, other) for one, other in zip(disturbed, undisturbed, strict=True))
        server.wait_idle(60)
        assert json.loads(server.get("/load")[1])["engine_restarts"] == 1
