"""Engines that die, hang or cannot start: no request is lost, no output repeated, only the request at fault refused."""

import asyncio
import errno
import itertools
import os
import random
import re
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zmq.asyncio

from pagoda.base.config import EngineConfig
from pagoda.base.errors import ConfigError, WorkerDied
from pagoda.base.outputs import RequestOutput
from pagoda.base.pooling import PoolingParams
from pagoda.base.sampling_params import SamplingParams
from pagoda.base.structured_outputs import StructuredOutputsParams
from pagoda.core.request import LoraRef, Request
from pagoda.engine import wire
from pagoda.engine.async_engine import AsyncEngine
from pagoda.engine.clients import engine_link, supervisor
from pagoda.engine.clients.engine_link import EngineProcess
from pagoda.engine.clients.process_client import ProcessClient
from pagoda.engine.outputs.output_processor import OutputKind
from tests.engine.clients.engine_in_process import Work, kill, kill_held, run_engine
from tests.engine.clients.hurried_clock import STEP_TIMEOUT_S, HurriedClock
from tests.engine.steps import Steps
from tests.generate import generate, prepare

AFTER_OR_AHEAD = [pytest.param(False, marks=pytest.mark.slow), True]
"""What a step's end starts is the same either way; one test plays both each time."""

OPTIONS = {"distributed_executor_backend": "fake", "num_blocks": 256, "max_model_len": 512, "max_num_seqs": 16}


async def collect(llm: AsyncEngine, name: str, n: int = 1, max_tokens: int = 60) -> list[RequestOutput]:
    params = SamplingParams(n=n, max_tokens=max_tokens, seed=7, ignore_eos=True)
    prompt = [10 + (len(name) * 7 + i) % 90 for i in range(20)]
    return [output async for output in generate(llm, prompt, params, name, kind=OutputKind.DELTA)]


def tokens(outputs: list[RequestOutput]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for output in outputs:
        for part in output.outputs:
            found.setdefault(part.index, []).extend(part.token_ids)
    return found


def run(
    work: Work,
    module: str = "tests.engine.poisoned_engine",
    step_timeout_s: float = STEP_TIMEOUT_S,
    **options: object,
) -> None:
    config = EngineConfig.from_options(**OPTIONS, **options)
    run_engine(work, ProcessClient(config, step_timeout_s, module), config)


NAMES = ["a", "bb", "ccc", "dddd"]


def test_a_request_does_not_ask_the_system_whether_each_engine_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With many replicas, that is a system call for each of them; the link notices an end by itself."""

    async def work(_: AsyncEngine, client: ProcessClient) -> None:
        assert client._supervisor.link is not None
        with monkeypatch.context() as patch:
            patch.setattr(client._supervisor.link.process.process, "poll", lambda: pytest.fail("it is asked"))
            assert client.is_up
            assert client.load.takes_requests
        await kill(client)
        assert not client.is_up

    run(work)


def test_a_grammar_continues_after_kills_where_it_was(steps: Steps) -> None:
    """The new engine compiles the grammar again, and its matcher reads what was emitted before."""
    pattern = "([a-f]{3}-){12}[a-f]{3}"

    async def constrained(llm: AsyncEngine, name: str) -> str:
        params = SamplingParams(n=2, max_tokens=60, seed=7, structured_outputs=StructuredOutputsParams(regex=pattern))
        prompt = list(range(10, 30))
        outputs = [one async for one in generate(llm, prompt, params, name, kind=OutputKind.CUMULATIVE)]
        assert outputs[-1].error is None
        assert [one.finish_reason for one in outputs[-1].outputs] == ["stop"] * 2
        return " ".join(one.text for one in outputs[-1].outputs)

    async def work(llm: AsyncEngine, client: ProcessClient) -> None:
        undisturbed = await constrained(llm, "a")
        assert all(re.fullmatch(pattern, text) for text in undisturbed.split(" "))
        for num_steps in (0, 6):
            steps.hold_after(num_steps)
            again = asyncio.create_task(constrained(llm, "b"))
            await kill_held(client, steps)
            assert not again.done()
            steps.release()
            assert await again == undisturbed

    run(work, "tests.engine.stepped_engine")


@pytest.mark.parametrize("async_scheduling", AFTER_OR_AHEAD)
def test_requests_continue_after_kills_with_the_same_output(async_scheduling: bool, steps: Steps) -> None:
    async def work(llm: AsyncEngine, client: ProcessClient) -> None:
        undisturbed = [tokens(await collect(llm, name, n=1 + i % 2 * 2)) for i, name in enumerate(NAMES)]

        async def killer() -> None:
            await kill_held(client, steps)
            steps.hold_next_engine_after(10)
            await kill_held(client, steps)
            steps.release()

        steps.hold_after(10)
        kills = asyncio.create_task(killer())
        disturbed = await asyncio.gather(*(collect(llm, name, n=1 + i % 2 * 2) for i, name in enumerate(NAMES)))
        await kills
        assert client.num_deaths == 2
        assert [tokens(outputs) for outputs in disturbed] == undisturbed
        assert all(outputs[-1].finished and outputs[-1].error is None for outputs in disturbed)

    run(work, async_scheduling=async_scheduling)


@pytest.mark.parametrize("async_scheduling", AFTER_OR_AHEAD)
def test_a_request_that_kills_the_engine_twice_is_refused_and_others_continue(async_scheduling: bool) -> None:
    async def work(llm: AsyncEngine, client: ProcessClient) -> None:
        undisturbed = [tokens(await collect(llm, name)) for name in NAMES]
        poison = asyncio.create_task(collect(llm, "poison"))
        disturbed = await asyncio.gather(*(collect(llm, name) for name in NAMES))
        last = (await poison)[-1]
        assert last.error is not None
        assert "repeatedly" in last.error
        assert last.outputs[-1].finish_reason == "error"
        assert client.num_deaths in (2, 3)  # 3: it was probed next to requests that were no suspects
        assert [tokens(outputs) for outputs in disturbed] == undisturbed
        assert tokens(await collect(llm, "a")) == undisturbed[0]

    run(work, async_scheduling=async_scheduling)


@pytest.mark.parametrize("async_scheduling", AFTER_OR_AHEAD)
def test_a_suspect_that_is_probed_when_another_request_kills_the_engine_is_not_refused(
    async_scheduling: bool, steps: Steps
) -> None:
    """After a kill from outside, the first suspect is in the same step as a new request, which kills the engine."""

    async def work(llm: AsyncEngine, client: ProcessClient) -> None:
        undisturbed = [tokens(await collect(llm, name)) for name in NAMES]
        steps.hold_after(5)
        running = [asyncio.create_task(collect(llm, name)) for name in NAMES]
        await kill_held(client, steps)
        steps.release()
        poison = await collect(llm, "poison")
        assert "repeatedly" in str(poison[-1].error)
        disturbed = await asyncio.gather(*running)
        assert [outputs[-1].error for outputs in disturbed] == [None] * len(NAMES)
        assert [tokens(outputs) for outputs in disturbed] == undisturbed
        assert client.num_deaths <= 4  # one from outside, next to the probe, as a probe in company, alone

    run(work, async_scheduling=async_scheduling)


def test_a_hung_step_counts_as_a_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: HurriedClock) -> None:
    hanging = tmp_path / "hanging"
    monkeypatch.setenv("HANGING_FILE", str(hanging))

    async def work(llm: AsyncEngine, client: ProcessClient) -> None:
        clock.hurries = lambda: hanging.exists() and hanging.read_text() == str(client.engine_pid)
        undisturbed = tokens(await collect(llm, "a"))
        hang = asyncio.create_task(collect(llm, "hang"))
        assert tokens(await collect(llm, "a")) == undisturbed
        assert (await hang)[-1].error is not None
        assert client.num_deaths in (2, 3)  # 3: it was probed next to a request that was no suspect

    run(work)


def test_a_long_step_that_computes_is_not_taken_for_hung(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: HurriedClock
) -> None:
    """Of a large model on few cores. Only after many times as long, the engine is taken for hung."""
    hanging = tmp_path / "hanging"
    monkeypatch.setenv("HANGING_FILE", str(hanging))
    monkeypatch.setattr(EngineProcess, "cpu_s", lambda process: clock.monotonic() / 2)

    async def work(llm: AsyncEngine, client: ProcessClient) -> None:
        clock.hurries = lambda: hanging.exists() and hanging.read_text() == str(client.engine_pid)
        hang = asyncio.create_task(collect(llm, "hang"))
        while not clock.hurries():
            await asyncio.sleep(0.01)
        begin_s = clock.ahead_s
        while client.num_deaths == 0:
            await asyncio.sleep(0.01)
        assert clock.ahead_s - begin_s > 5 * STEP_TIMEOUT_S
        hang.cancel()

    run(work)


def test_an_engine_that_the_system_does_not_start_is_tried_again(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "START_PAUSE_S", 0.01)
    popen, num_failures = subprocess.Popen, 3

    def refused(*args: Any, **options: Any) -> Any:
        nonlocal num_failures
        if num_failures:
            num_failures -= 1
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return popen(*args, **options)

    async def work(llm: AsyncEngine, client: ProcessClient) -> None:
        nonlocal num_failures
        undisturbed = tokens(await collect(llm, "a"))
        steps.hold_after(5)
        again = asyncio.create_task(collect(llm, "a"))
        num_failures = 3
        await kill_held(client, steps)
        steps.release()
        assert tokens(await again) == undisturbed
        assert num_failures == 0
        num_failures = supervisor.MAX_FAILED_SPAWNS
        await kill(client)
        with pytest.raises(WorkerDied, match="no engine process could be started, 7 times"):
            await collect(llm, "a", max_tokens=400)

    monkeypatch.setattr(subprocess, "Popen", refused)
    run(work)


def test_a_kill_because_memory_ran_out_blames_the_requests_of_the_step(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = itertools.count()
    monkeypatch.setattr(supervisor, "num_oom_kills", lambda: next(counter))

    async def work(llm: AsyncEngine, client: ProcessClient) -> None:
        steps.hold_after(5)
        greedy = asyncio.create_task(collect(llm, "a", max_tokens=400))
        await kill_held(client, steps)
        steps.hold_next_engine_after(1)  # two would clear it
        await kill_held(client, steps)
        assert "repeatedly" in str((await greedy)[-1].error)
        assert client.num_deaths == 2

    run(work)


def test_the_engine_process_logs_with_time_level_and_process(capfd: pytest.CaptureFixture[str]) -> None:
    pids: list[int | None] = []

    async def work(llm: AsyncEngine, client: ProcessClient) -> None:
        pids.append(client.engine_pid)
        await collect(llm, "a", max_tokens=3)

    run(work)
    lines = [line for line in capfd.readouterr().err.splitlines() if "KV cache: " in line]
    assert len(lines) == 1
    assert re.match(rf"\d{{4}}-\d\d-\d\d [\d:.]+ INFO engine\[{pids[0]}\] KV cache: ", lines[0])


def test_aborts_reach_every_restarted_engine() -> None:
    async def work(llm: AsyncEngine, client: ProcessClient) -> None:
        async def leave(name: str) -> None:
            params = SamplingParams(n=2, max_tokens=400, ignore_eos=True)
            stream = generate(llm, [5] * 40, params, name, kind=OutputKind.DELTA)
            async for _ in stream:
                break
            await stream.aclose()

        for life in range(2):
            await asyncio.gather(*(leave(f"{life}-{i}") for i in range(30)))
            await collect(llm, f"after-{life}", max_tokens=3)
            while client.stats().num_running or client.stats().num_waiting:
                await asyncio.sleep(0.02)
            assert client.stats().kv_usage == 0
            assert client.engine_pid is not None
            os.kill(client.engine_pid, signal.SIGKILL)

    run(work)


async def pool(llm: AsyncEngine, name: str, number: int) -> RequestOutput:
    """Return the last output of a prompt of 20 to 219 tokens that is pooled and shares no cached prefix."""
    prompt = [10 + (number * 7 + i) % 90 for i in range(20 + number * 37 % 200)]
    request = await prepare(llm, prompt, PoolingParams(task="embed"), name, cache_salt=name)
    return [output async for output in llm.stream(request, OutputKind.FINAL_ONLY)][-1]


@pytest.mark.parametrize("async_scheduling", AFTER_OR_AHEAD)
def test_pooled_prompts_end_once_through_kills_and_aborts(async_scheduling: bool, steps: Steps) -> None:
    """Each ends with its vector, or aborted, whatever state it was in; one that kills the engine itself is refused."""
    rng = random.Random(5)

    async def pool_all(llm: AsyncEngine, name: str, count: int = 120) -> list[RequestOutput]:
        return await asyncio.gather(*(pool(llm, f"{name}{i}", i) for i in range(count)))

    async def work(llm: AsyncEngine, client: ProcessClient) -> None:
        vectors = [output.pooled.tobytes() for output in await pool_all(llm, "a")]
        steps.hold_after(8)
        asked = asyncio.create_task(pool_all(llm, "b"))
        aborted: set[str] = set()

        async def abort_some() -> None:
            aborted.update(await llm.abort([f"b{rng.randrange(120)}" for _ in range(4)]))

        for _ in range(2):
            while not steps.is_held:
                await asyncio.sleep(0.002)
            await abort_some()
            pid = client.engine_pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await abort_some()
            while client.is_up:
                await asyncio.sleep(0.002)
            steps.hold_next_engine_after(8)
            while client.engine_pid in (None, pid):
                await asyncio.sleep(0.01)
            await abort_some()
        steps.release()
        found = await asked
        assert client.num_deaths == 2
        assert len(aborted) > 10
        for i, output in enumerate(found):
            if f"b{i}" in aborted:
                assert (output.pooled, output.outputs[0].finish_reason) == (None, "abort")
            else:
                assert output.pooled is not None, output.error
                assert output.pooled.tobytes() == vectors[i]

        poison, company = await asyncio.gather(pool(llm, "poison", 5), pool_all(llm, "c", 16))
        assert "repeatedly" in str(poison.error)
        assert [output.pooled.tobytes() for output in company] == vectors[:16]
        while client.stats().num_running or client.stats().num_waiting or client.stats().kv_usage:
            await asyncio.sleep(0.01)

    run(work, async_scheduling=async_scheduling, max_num_batched_tokens=128)


def test_invalid_settings_are_an_error_at_once() -> None:
    async def main() -> None:
        client = ProcessClient(EngineConfig.from_options(**{**OPTIONS, "max_model_len": 10**9}))
        with pytest.raises(ConfigError, match="max_model_len"):
            await client.start()
        assert client.engine_pid is None
        await client.shutdown()

    asyncio.run(main())


def test_keys_of_a_servers_clients_are_not_handed_to_the_engine_process(monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[bytes] = []

    def start_child(module: str, arguments: list[str], data: bytes) -> Any:
        handed.append(data)
        raise OSError("enough")

    monkeypatch.setattr(engine_link, "start_child", start_child)
    config = EngineConfig.from_options(**OPTIONS, api_keys=["secret-key"], admin_api_key="secret-admin")
    with pytest.raises(OSError, match="enough"):
        EngineProcess(config, "", zmq.asyncio.Context())
    assert b"max_num_seqs" in handed[0]
    assert b"secret" not in handed[0]


def test_waiting_callers_get_an_error_when_no_engine_can_be_started(
    tmp_path: Path, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "START_PAUSE_S", 0.001)
    monkeypatch.setenv("ENGINE_LIVES_FILE", str(tmp_path / "lives"))
    monkeypatch.setenv("ENGINE_LIVES", "1")

    async def work(llm: AsyncEngine, client: ProcessClient) -> None:
        steps.hold_after(5)
        waiting = asyncio.create_task(collect(llm, "a", max_tokens=400))
        await kill_held(client, steps)
        with pytest.raises(WorkerDied, match="while loading, 10 times in a row"):
            await waiting
        assert client.died is llm.died is not None
        with pytest.raises(WorkerDied):
            await collect(llm, "b")
        with pytest.raises(WorkerDied):
            await llm.reset_prefix_cache()

    run(work, module="tests.engine.mortal_engine")


def _let_fates_be(words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Have engine processes end as `words` say; return a file with a letter for each that has begun."""
    monkeypatch.setattr(supervisor, "START_PAUSE_S", 0.001)
    monkeypatch.setenv("ENGINE_FATES", words)
    monkeypatch.setenv("ENGINE_FATES_FILE", str(tmp_path / "fates"))
    return tmp_path / "fates"


def test_a_restart_waits_for_memory_that_has_not_been_released_yet(
    tmp_path: Path, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = _let_fates_be("serve short short short serve", monkeypatch, tmp_path)

    async def work(llm: AsyncEngine, client: ProcessClient) -> None:
        undisturbed = tokens(await collect(llm, "a"))
        steps.hold_after(5)
        again = asyncio.create_task(collect(llm, "a"))
        await kill_held(client, steps)
        steps.release()
        assert tokens(await again) == undisturbed

    run(work, module="tests.engine.fateful_engine")
    assert len(begun.read_text()) == 5


def test_a_first_start_without_enough_memory_is_an_error_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = _let_fates_be("short", monkeypatch, tmp_path)

    async def main() -> None:
        client = ProcessClient(EngineConfig.from_options(**OPTIONS), module="tests.engine.fateful_engine")
        with pytest.raises(ConfigError, match="does not fit in memory"):
            await client.start()
        await client.shutdown()

    asyncio.run(main())
    assert len(begun.read_text()) == 1


def test_engines_that_die_as_soon_as_they_are_ready_are_not_started_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = _let_fates_be("die", monkeypatch, tmp_path)
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def note(pause_s: float) -> None:
        pauses.append(pause_s)
        await sleep(pause_s)

    async def main() -> None:
        client = ProcessClient(EngineConfig.from_options(**OPTIONS), module="tests.engine.fateful_engine")
        await client.start()
        monkeypatch.setattr(supervisor, "MAX_FRUITLESS", 5)
        monkeypatch.setattr(supervisor.asyncio, "sleep", note)
        await client.wait_until_gone()
        assert re.search(r"exit code 3 \d+ s after it was ready, the last of 5 in a row", str(client.died))
        await client.shutdown()

    asyncio.run(main())
    assert len(begun.read_text()) == 5
    assert [pause_s for pause_s in pauses if pause_s < 0.01] == [0.001, 0.002, 0.004, 0.008]


def test_without_a_step_timeout_no_engine_counts_as_hung(clock: HurriedClock) -> None:
    async def work(llm: AsyncEngine, client: ProcessClient) -> None:
        undisturbed = tokens(await collect(llm, "a"))
        stopped = client.engine_pid
        assert stopped is not None
        os.kill(stopped, signal.SIGSTOP)
        again = asyncio.create_task(collect(llm, "a"))
        clock.hurries = lambda: True
        while clock.ahead_s < 4 * STEP_TIMEOUT_S:
            await asyncio.sleep(0.01)
        os.kill(stopped, signal.SIGCONT)
        assert tokens(await again) == undisturbed
        assert client.num_deaths == 0

    run(work, step_timeout_s=0.0)


def test_a_reset_while_the_engine_starts_again_is_done_at_once() -> None:
    async def work(llm: AsyncEngine, client: ProcessClient) -> None:
        await collect(llm, "a", max_tokens=3)
        assert client.engine_pid is not None
        os.kill(client.engine_pid, signal.SIGKILL)
        async with asyncio.timeout(2):
            assert await llm.reset_prefix_cache()
        with pytest.raises(TimeoutError):  # who asked has gone; the answer must not hurt
            await asyncio.wait_for(llm.reset_prefix_cache(), 0)
        await collect(llm, "b", max_tokens=3)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(llm.reset_prefix_cache(), 0)
        await collect(llm, "c", max_tokens=3)
        assert client.died is None

    run(work)


def test_a_lost_engine_runs_nothing() -> None:
    """Its requests count as waiting for the next engine; a reply that nobody waits for is ignored."""

    async def work() -> None:
        client = ProcessClient(EngineConfig.from_options(**OPTIONS), STEP_TIMEOUT_S)
        link: Any = SimpleNamespace(is_up=True, send=lambda message: None, send_bytes=lambda *frames: None)
        client._supervisor.link, client._supervisor.process_number = link, 1
        client.on_ready()
        lora = LoraRef("one", "/one", "one")
        client.add_request(Request("a", np.arange(4, dtype=np.int32), SamplingParams(), handle=1, lora=lora))
        stats = wire.EngineStats(num_running=2, num_blocks=8, running_adapters=("gone", "one"))
        client.on_message(wire.StepOutputs({}, (4,), stats))
        client.on_message(wire.Reply(99))
        client._supervisor.link = None
        client.on_lost()
        lost = client.stats()
        assert (lost.num_running, lost.num_waiting, lost.num_free_blocks) == (0, 1, 8)
        assert (lost.running_adapters, lost.waiting_adapters) == ((), ("one",))

    asyncio.run(work())
