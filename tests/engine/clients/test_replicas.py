"""Replicas: kills and hangs of some change no token and lose no request; all are asked for what concerns all."""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from pagoda.assembly.engine_process import EngineServer
from pagoda.base.clock import VirtualClock
from pagoda.base.config import CacheConfig, EngineConfig
from pagoda.base.errors import ConfigError, RequestError, WorkerDied
from pagoda.base.outputs import RequestOutput
from pagoda.base.pooling import PoolingParams
from pagoda.base.sampling_params import SamplingParams
from pagoda.core.events import Removed, Routed, Stored
from pagoda.core.kv import KVGroupKind, KVGroupSpec, prefix_group
from pagoda.core.request import LoraRef, Request
from pagoda.core.scheduler import Scheduler
from pagoda.core.scheduler_options import SchedulerOptions
from pagoda.core.scheduler_output import EngineCoreOutputs
from pagoda.core.view import view_of
from pagoda.engine import wire
from pagoda.engine.async_engine import AsyncEngine
from pagoda.engine.clients.journal import JournalEntry
from pagoda.engine.clients.process_client import NO_WEIGHTS, ProcessClient
from pagoda.engine.clients.replicas import Replicas
from pagoda.engine.flight_recorder import FlightRecord
from pagoda.engine.outputs.output_processor import OutputKind
from pagoda.engine.step_strip import StepNote
from tests.engine.clients.engine_calls import reply
from tests.engine.clients.engine_in_process import run_engine
from tests.engine.clients.hurried_clock import STEP_TIMEOUT_S, HurriedClock
from tests.engine.steps import Steps
from tests.generate import generate, prepare

OPTIONS = {"distributed_executor_backend": "fake", "num_blocks": 256, "max_model_len": 512, "max_num_seqs": 16}
POISONED = "tests.engine.poisoned_engine"

Tokens = dict[int, list[int]]


async def outputs_of(llm: AsyncEngine, number: int, name: str = "", max_tokens: int = 60) -> list[RequestOutput]:
    """The outputs of a request of one or three sequences."""
    n = 1 + number % 2 * 2
    params = SamplingParams(n=n, max_tokens=max_tokens, seed=number, ignore_eos=True)
    prompt = [10 + (number * 7 + i) % 90 for i in range(20)]
    return [one async for one in generate(llm, prompt, params, name or f"r{number}", kind=OutputKind.DELTA)]


async def collect(llm: AsyncEngine, number: int, name: str = "") -> Tokens:
    outputs = await outputs_of(llm, number, name)
    assert outputs[-1].finished
    assert outputs[-1].error is None
    found: Tokens = {}
    for output in outputs:
        for part in output.outputs:
            found.setdefault(part.index, []).extend(part.token_ids)
    return found


async def embed(llm: AsyncEngine) -> list[float]:
    request = await prepare(llm, list(range(10, 110)), PoolingParams(), "embedding")
    outputs = [one async for one in llm.stream(request, OutputKind.FINAL_ONLY)]
    assert outputs[-1].error is None
    return outputs[-1].pooled.tolist()  # type: ignore[union-attr]


async def collect_all(llm: AsyncEngine) -> list[object]:
    requests = (*(collect(llm, number) for number in range(8)), embed(llm))
    return list(await asyncio.gather(*requests))


def make(**options: object) -> tuple[EngineConfig, Replicas]:
    config = EngineConfig.from_options(**{**OPTIONS, "data_parallel_size": 2, **options})
    return config, Replicas(config, STEP_TIMEOUT_S, POISONED)


def run(work: Callable[[AsyncEngine, Replicas], Awaitable[None]], **options: object) -> None:
    config, replicas = make(**options)
    run_engine(work, replicas, config)  # type: ignore[arg-type]


async def until(is_true: Callable[[], object]) -> None:
    while not is_true():
        await asyncio.sleep(0.002)


def all_run(replicas: Replicas) -> bool:
    return all(one.stats().num_running for one in replicas.each)


def all_are_ready(replicas: Replicas) -> bool:
    return all(one.takes_requests for one in replicas.each)


def kill(replicas: Replicas, number: int, how: signal.Signals = signal.SIGKILL) -> None:
    pid = replicas.each[number].engine_pid
    assert pid is not None
    os.kill(pid, how)


def deaths(replicas: Replicas) -> list[int]:
    return [one.num_deaths for one in replicas.each]


def test_requests_of_a_killed_replica_continue_on_the_other_and_it_comes_back(steps: Steps) -> None:
    """At once: the next engine of the replica may compute no step."""

    async def work(llm: AsyncEngine, replicas: Replicas) -> None:
        running = asyncio.create_task(collect_all(llm))
        await until(lambda: all_run(replicas))
        kill(replicas, 0)
        await until(lambda: replicas.num_moved)
        steps.release()
        disturbed = await running
        assert deaths(replicas) == [1, 0]
        await until(lambda: all_are_ready(replicas))
        assert await collect_all(llm) == disturbed
        assert deaths(replicas) == [1, 0]
        # of two runs of 16 sequences; what was computed before the death counts, too
        await until(lambda: replicas.stats().num_requests == 0)
        await until(lambda: replicas.stats().generation_tokens >= 2 * 16 * 60)
        steps.hold_next_engine_after(0)
        again = asyncio.create_task(collect_all(llm))
        await until(lambda: all(one.load.num_owed for one in replicas.each))  # both have got some
        kill(replicas, 0)
        kill(replicas, 1)
        steps.release()
        assert await again == disturbed
        assert deaths(replicas) == [2, 1]

    steps.hold_next_engine_after(10)
    run(work)


def test_a_replica_that_a_signal_has_stopped_hangs_and_its_requests_continue_on_the_other(
    steps: Steps, clock: HurriedClock
) -> None:
    async def work(llm: AsyncEngine, replicas: Replicas) -> None:
        running = asyncio.create_task(collect_all(llm))
        await until(lambda: all_run(replicas))
        stopped = replicas.each[1].engine_pid
        kill(replicas, 1, signal.SIGSTOP)
        steps.release()
        await until(lambda: not replicas.each[0].stats().num_requests)  # its own have ended
        clock.hurries = lambda: replicas.each[1].engine_pid == stopped
        disturbed = await running
        assert deaths(replicas) == [0, 1]
        assert replicas.num_moved
        assert await collect_all(llm) == disturbed

    steps.hold_next_engine_after(10)
    run(work)


def test_a_request_that_kills_engines_is_tried_alone_and_ends_three_engines_at_most() -> None:
    """One with others, one with other suspects, one alone: the last two of any replica without other requests."""

    async def work(llm: AsyncEngine, replicas: Replicas) -> None:
        undisturbed = await collect_all(llm)
        poison = asyncio.create_task(outputs_of(llm, 0, "poison"))
        disturbed = await collect_all(llm)
        last = (await poison)[-1]
        assert last.error == "this request crashed the engine process repeatedly"
        assert disturbed == undisturbed
        assert sum(deaths(replicas)) in (2, 3)

    run(work)


def test_prompts_go_where_their_prefix_is_cached_until_that_engine_ends() -> None:
    async def work(llm: AsyncEngine, replicas: Replicas) -> None:
        assert replicas.each[0]._supervisor._config.debug.prefix_hash_seed == replicas._hash_seed
        where = list[tuple[int, str]]()

        async def ask(begin: int) -> tuple[int, str]:
            llm.on_event = lambda event: (
                where.append((event.replica, event.because)) if isinstance(event, Routed) else None
            )
            prompt = [begin] * 100
            async for output in generate(llm, prompt, SamplingParams(max_tokens=2, ignore_eos=True)):
                assert output.error is None
            return where.pop()

        (first, _), (second, _) = await ask(1), await ask(2)
        assert first != second
        for _ in range(2):  # in turn, without a cache
            assert [await ask(begin) for begin in (1, 2)] == [(first, "cached_prefix"), (second, "cached_prefix")]
        kill(replicas, first - 1)
        await until(lambda: deaths(replicas)[first - 1] and all_are_ready(replicas))
        assert not any(held >> first - 1 & 1 for held in replicas._prefixes._holders.values())
        assert (await ask(1))[1] == "turn"
        assert await ask(2) == (second, "cached_prefix")

    run(work)


def test_new_requests_do_not_go_to_a_replica_that_hangs_nor_for_a_cache_that_they_do_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(llm: AsyncEngine, replicas: Replicas) -> None:
        where = list[tuple[int, str]]()
        llm.on_event = lambda event: where.append((event.replica, event.because)) if isinstance(event, Routed) else None

        async def ask(**params: Any) -> tuple[int, str]:
            async for output in generate(llm, [1] * 100, SamplingParams(max_tokens=2, ignore_eos=True, **params)):
                assert output.error is None
            return where.pop()

        (first, _), again = await ask(), await ask()
        assert again == (first, "cached_prefix")
        scored = {await ask(prompt_logprobs=0) for _ in range(2)}
        assert scored == {(1, "turn"), (2, "turn")}
        hanging = replicas.each[first - 1]
        monkeypatch.setattr(ProcessClient, "is_stuck", property(lambda one: one is hanging))
        assert await ask() == (3 - first, "only_ready")
        monkeypatch.setattr(ProcessClient, "is_stuck", property(lambda one: True))
        assert (await ask())[1] in {"cached_prefix", "turn"}

    run(work)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
def test_random_kills_of_replicas_change_no_token(seed: int) -> None:
    rng = random.Random(seed)

    async def work(llm: AsyncEngine, replicas: Replicas) -> None:
        undisturbed = [await collect(llm, number) for number in range(6)]
        killed = set[int | None]()

        async def kill_some() -> None:
            while len(killed) < 3:
                await asyncio.sleep(rng.random() * 0.1)
                up = [number for number, one in enumerate(replicas.each) if one.engine_pid not in killed | {None}]
                for number in rng.sample(up, min(len(up), rng.choice((1, 1, 2)))):
                    killed.add(replicas.each[number].engine_pid)
                    kill(replicas, number)

        kills = asyncio.create_task(kill_some())
        runs = 0
        while not kills.done() or runs == 0:
            names = [f"{runs}-{number}" for number in range(6)]
            found = await asyncio.gather(*(collect(llm, number, name) for number, name in enumerate(names)))
            assert list(found) == undisturbed
            runs += 1
        await kills
        await until(lambda: sum(deaths(replicas)) == len(killed))

    run(work, data_parallel_size=2 + seed % 2)


# ---- without processes


LORA = LoraRef("one", "/one", "digest")


def request(handle: int, lora: LoraRef | None = None) -> Request:
    return Request("a", np.arange(20, dtype=np.int32), SamplingParams(), handle=handle, lora=lora)


class Linked:
    """Replicas whose engines are lists of the messages that they get."""

    def __init__(self, count: int = 2) -> None:
        _, self.replicas = make(data_parallel_size=count)
        self.sent: list[list[wire.ToEngine]] = []
        for number in range(count):
            self.sent.append([])
            self.begin(number)

    def begin(self, number: int, weights: str = "") -> None:
        one, codec = self.replicas.each[number], wire.Codec(wire.ToEngine)

        def add(data: bytes, *_: bytes) -> None:
            self.sent[number].append(codec.decode(data))

        class Link:
            is_up, is_stuck, is_idle = True, False, True

            def note_idle(self, num_handled: int) -> None: ...

            def send(self, message: wire.ToEngine) -> None:
                add(codec.encode(message))

            def send_bytes(self, data: bytes, *_: bytes) -> None:
                add(data)

        one._supervisor.link = Link()  # type: ignore[assignment]
        one._supervisor.process_number += 1
        one._supervisor.weights = weights
        one.on_ready()

    def lose(self, number: int) -> None:
        self.replicas.each[number]._supervisor.link = None
        self.replicas.each[number].on_lost()

    def give_up(self, number: int) -> None:
        error = self.replicas.each[number]._supervisor.died = WorkerDied("no engine any more")
        self.replicas.each[number].on_give_up(error)

    def handles(self, number: int) -> list[int]:
        return [one.key[1] for one in self.sent[number] if isinstance(one, wire.AddRequest)]

    def calls(self, number: int) -> list[str]:
        return [one.name for one in self.sent[number] if isinstance(one, wire.Call)]

    def reply(self, number: int, error: str | None = None) -> None:
        """Reply to the last load of an adapter."""
        load = next(one for one in reversed(self.sent[number]) if isinstance(one, wire.Call))
        assert load.name == "load_adapter"
        self.replicas.each[number].on_message(reply(load.call_id, error))


async def some_turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_requests_take_turns_wait_while_no_replica_is_up_and_go_to_the_first_one_that_is() -> None:
    async def main() -> None:
        engines = Linked()
        for handle in range(1, 5):
            engines.replicas.add_request(request(handle))
        assert [sorted(engines.handles(number)) for number in (0, 1)] == [[1, 3], [2, 4]]
        engines.lose(0)
        engines.replicas.add_request(request(5))
        assert engines.handles(1) == [2, 4, 5]
        engines.lose(1)
        assert not engines.replicas.is_up
        engines.replicas.add_request(request(6))
        engines.replicas.abort([1, 2])
        for number in (0, 1):
            engines.sent[number].clear()
        for one in engines.replicas.each:
            one._suspects.assign_blame = lambda *_, **__: []  # type: ignore[method-assign]
            one.on_death(None, killed_from_outside=True)  # type: ignore[arg-type]
        engines.begin(1)
        assert sorted(engines.handles(1)) == [3, 4, 5, 6]
        engines.begin(0)
        assert engines.handles(0) == []

    asyncio.run(main())


def test_a_replica_that_has_given_up_leaves_its_requests_to_the_others_until_none_is_left() -> None:
    async def main() -> None:
        engines = Linked()
        replicas = engines.replicas
        for handle in (1, 2):
            replicas.add_request(request(handle))
        next(iter(replicas.each[0]._journal)).is_suspect = True
        engines.lose(0)
        engines.give_up(0)
        assert engines.handles(1) == [2, 1]
        assert (replicas.died, replicas.is_up) == (None, True)
        replicas.add_request(request(3))
        assert engines.handles(1) == [2, 1, 3]
        events = [(await replicas.next_outputs()).events for _ in range(4)]
        assert [(one.handle, one.replica, one.because) for (one,) in events if isinstance(one, Routed)] == [
            (1, 1, "turn"),
            (2, 2, "shortest_wait"),
            (1, 2, "only_ready"),
            (3, 2, "only_ready"),
        ]
        assert replicas._outputs.empty()
        engines.lose(1)
        engines.give_up(1)
        with pytest.raises(WorkerDied, match="no engine any more"):
            await replicas.next_outputs()
        replicas.add_request(request(4))
        with pytest.raises(WorkerDied, match="no engine any more"):
            await replicas.next_outputs()
        with pytest.raises(WorkerDied):
            await replicas.reset_prefix_cache()
        with pytest.raises(WorkerDied):
            await replicas.load_adapter(LORA)

    asyncio.run(main())


def die(engines: Linked, number: int) -> None:
    """The engine ends for a reason that may be one of its requests."""
    engines.lose(number)
    flight = FlightRecord(0, 0, frozenset())
    engines.replicas.each[number].on_death(flight, killed_from_outside=False)


def emit(engines: Linked, number: int, *handles: int, count: int = 2) -> None:
    outputs = EngineCoreOutputs(
        handles=np.array(handles, np.int64),
        sequences=np.zeros(len(handles), np.int32),
        counts=np.full(len(handles), count, np.int32),
        token_ids=np.zeros(count * len(handles), np.int32),
    )
    engines.replicas.each[number].on_message(wire.StepOutputs({0: outputs}))


def test_requests_go_on_with_the_weights_with_which_they_have_begun_or_end() -> None:
    async def main() -> None:
        engines = Linked()
        replicas = engines.replicas

        def restart(number: int, weights: str) -> None:
            engines.lose(number)
            replicas.each[number].on_death(FlightRecord(0, 0, frozenset()), killed_from_outside=True)
            engines.begin(number, weights)

        for number in (0, 1):
            restart(number, "a")
        for handle in (1, 2):
            replicas.add_request(request(handle))
        assert (engines.handles(0), engines.handles(1)) == ([1], [2])
        emit(engines, 0, 1)
        restart(1, "b")  # its own has no token yet, and goes to the other
        assert (engines.handles(0), engines.handles(1)) == ([1, 2], [2])
        engines.lose(0)
        replicas.each[0].on_death(FlightRecord(0, 0, frozenset()), killed_from_outside=True)
        assert engines.handles(1) == [2, 2]  # not the one with a token
        engines.begin(0, "a")
        assert engines.handles(0) == [1, 2, 1]
        restart(0, "b")
        assert engines.handles(0) == [1, 2, 1]
        outputs = [await replicas.next_outputs() for _ in range(replicas._outputs.qsize())]
        ends = [end for one in outputs for end in one.ends]
        assert [(end.handle, end.message) for end in ends] == [(1, NO_WEIGHTS)]
        assert len(replicas.each[0]._journal) == 0

    asyncio.run(main())


def test_the_last_replica_with_the_old_weights_finishes_its_requests_before_it_gets_new_ones() -> None:
    async def main() -> None:
        engines = Linked()
        replicas, ended = engines.replicas, list[tuple[int, wire.WeightsSource]]()
        for number, one in enumerate(replicas.each):
            one._drain_s, one._supervisor.weights = 0.0, "a"
            one._supervisor.restart = lambda source, number=number: ended.append((number, source))  # type: ignore[assignment]
        for handle in (1, 2):
            replicas.add_request(request(handle))
        emit(engines, 0, 1)
        emit(engines, 1, 2)
        source = wire.WeightsSource("new")
        restarting = asyncio.create_task(replicas.restart(source))
        await until(lambda: ended == [(0, source)])  # the other can continue with what it has
        engines.lose(0)
        replicas.each[0].on_death(FlightRecord(0, 0, frozenset()), killed_from_outside=True)
        engines.begin(0, "b")
        await until(lambda: not replicas.each[1].takes_requests)
        replicas.add_request(request(3))
        await asyncio.sleep(0.1)
        assert (engines.handles(0), engines.handles(1)) == ([1, 3], [2, 1])
        assert len(ended) == 1
        engines.lose(1)  # and if it dies meanwhile, so does its next engine
        replicas.each[1].on_death(FlightRecord(0, 0, frozenset()), killed_from_outside=True)
        engines.begin(1, "a")
        await until(lambda: not replicas.each[1].takes_requests)
        await asyncio.sleep(0.1)
        assert (engines.handles(1), len(ended)) == ([2, 1, 2, 1], 1)
        replicas.abort([1, 2])
        await until(lambda: ended[1:] == [(1, source)])
        engines.lose(1)
        engines.begin(1, "b")
        await restarting
        assert replicas.source == source

    asyncio.run(main())


def test_a_replica_whose_new_weights_cannot_be_loaded_gets_those_of_before(tmp_path: Path) -> None:
    async def work(llm: AsyncEngine, replicas: Replicas) -> None:
        before = await collect(llm, 1)
        source = wire.WeightsSource(str(tmp_path / "nothing"))
        with pytest.raises(ConfigError, match="an engine cannot start with these weights: .*nothing does not exist"):
            await replicas.restart(source)
        assert deaths(replicas) == [2, 0]
        assert all_are_ready(replicas)
        assert await collect(llm, 1) == before
        assert replicas.source is None

    run(work)


def test_engines_are_sent_the_seed_of_their_tier(tmp_path: Path) -> None:
    (tmp_path / "seed").write_text("f" * 30)
    (tmp_path / "seed").chmod(0o600)
    _, replicas = make(kv_tier=f"disk={tmp_path}:1MiB")
    sent = msgspec.msgpack.encode(replicas.each[0]._supervisor._config, enc_hook=str)
    assert msgspec.msgpack.decode(sent, type=EngineConfig).debug.prefix_hash_seed == replicas._hash_seed


def test_suspects_are_tried_by_a_replica_that_is_idle_one_at_a_time() -> None:
    async def main() -> None:
        engines = Linked()
        for handle in (1, 2, 3):
            engines.replicas.add_request(request(handle))
        assert (engines.handles(0), engines.handles(1)) == ([1, 3], [2])
        die(engines, 0)
        assert engines.handles(1) == [2]  # it is not idle
        engines.replicas.abort([2])
        engines.replicas.each[1].on_message(wire.IdleReport(wire.EngineStats(), 0))
        assert engines.handles(1) == [2, 1]
        engines.replicas.add_request(request(4))  # waits for the probes
        engines.begin(0)
        assert (engines.handles(0), engines.handles(1)) == ([1, 3, 4], [2, 1])
        emit(engines, 1, 1)
        assert engines.handles(1) == [2, 1, 3]
        emit(engines, 1, 3)
        engines.replicas.add_request(request(5))
        assert not engines.replicas.each[1]._suspects.is_probing
        events = [one async for one in routed(engines.replicas)]
        assert [(one.handle, one.replica, one.because) for one in events][3:5] == [(1, 2, "probe"), (3, 2, "probe")]

    asyncio.run(main())


async def routed(replicas: Replicas) -> AsyncIterator[Routed]:
    while not replicas._outputs.empty():
        for event in (await replicas.next_outputs()).events:
            if isinstance(event, Routed):
                yield event


def test_a_request_that_ends_the_engine_that_tries_it_alone_is_rejected() -> None:
    async def main() -> None:
        engines = Linked()
        for handle in (1, 2, 3):
            engines.replicas.add_request(request(handle))
        engines.replicas.abort([2])
        die(engines, 0)
        assert engines.handles(1) == [2, 1]
        die(engines, 1)
        engines.begin(0)
        assert engines.handles(0) == [1, 3, 3]

    asyncio.run(main())


def test_an_error_while_one_request_is_moved_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        engines = Linked()
        engines.lose(0)
        engines.lose(1)
        for handle in (1, 2, 3):
            engines.replicas.add_request(request(handle))
        place = engines.replicas._place

        def fails_once(entry: JournalEntry, among: list[ProcessClient]) -> None:
            if entry.request.handle == 1:
                raise RuntimeError("no")
            place(entry, among)

        monkeypatch.setattr(engines.replicas, "_place", fails_once)
        engines.begin(1)
        assert engines.handles(1) == [2, 3]
        outputs = [await engines.replicas.next_outputs() for _ in range(engines.replicas._outputs.qsize())]
        (end,) = [end for one in outputs for end in one.ends]
        assert (end.handle, end.message) == (1, "the request could not be moved to another replica: RuntimeError: no")

    asyncio.run(main())


def test_a_load_does_not_wait_for_an_engine_that_dies_meanwhile() -> None:
    async def main() -> None:
        engines = Linked()
        loading = asyncio.create_task(engines.replicas.load_adapter(LORA))
        await some_turns()
        engines.reply(0)
        engines.lose(1)
        await loading
        engines.begin(1)
        await some_turns()
        assert engines.calls(1) == ["load_adapter", "load_adapter"]

    asyncio.run(main())


def test_looks_do_not_wait_for_an_engine_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr("pagoda.engine.clients.replicas._LOOK_S", 0.01)
        engines = Linked()
        looking = asyncio.create_task(engines.replicas.look(0.0))
        await some_turns()
        view = view_of(Scheduler(SchedulerOptions(), CacheConfig(), (KVGroupSpec(),), 8, 64, VirtualClock())._state)
        found = wire.LookReply(view, (StepNote(3, 4, 1.0, 2.0, 5, 6, 0),), wire.EngineStats(at_s=9.0))
        (call,) = [one for one in engines.sent[1] if isinstance(one, wire.Call)]
        engines.replicas.each[1].on_message(wire.Reply(call.call_id, msgspec.Raw(wire.make_encoder().encode(found))))
        look = await looking
        assert look is not None
        assert [(step.step, step.replica) for step in look.steps] == [(3, 2)]

    asyncio.run(main())


def test_a_replica_that_is_gone_counts_as_such_and_has_no_blocks() -> None:
    async def main() -> None:
        engines = Linked(3)
        replicas = engines.replicas
        for one in replicas.each:
            one.on_message(wire.StepOutputs({}, (1,), wire.EngineStats(num_blocks=10, num_free_blocks=4)))
        emit(engines, 0, 9, count=3)  # after its last statistics
        engines.lose(0)
        stats = replicas.stats()
        assert stats.generation_tokens == 3
        assert (stats.num_up, stats.num_starting, stats.num_gone, stats.num_blocks) == (2, 1, 0, 30)
        engines.give_up(0)
        stats = replicas.stats()
        assert (stats.num_up, stats.num_starting, stats.num_gone, stats.num_blocks) == (2, 0, 1, 20)

    asyncio.run(main())


def test_replicas_are_restarted_one_after_the_other_and_no_request_fails(steps: Steps) -> None:
    async def work(llm: AsyncEngine, replicas: Replicas) -> None:
        undisturbed = await collect_all(llm)
        before = [one.engine_pid for one in replicas.each]
        restarting = asyncio.create_task(replicas.restart())
        while not restarting.done():
            assert replicas.is_up
            assert await collect_all(llm) == undisturbed
            assert sum(one.takes_requests for one in replicas.each) >= 1
        await restarting
        assert not set(before) & {one.engine_pid for one in replicas.each}
        assert replicas.num_moved == 0  # all have finished where they were
        assert deaths(replicas) == [1, 1]
        for one in replicas.each:
            one._drain_s = 0.0
        steps.hold_next_engine_after(0)
        running = asyncio.create_task(collect_all(llm))
        await until(lambda: all(one.load.num_seqs for one in replicas.each))
        restarting = asyncio.create_task(replicas.restart())
        await some_turns()
        with pytest.raises(RequestError, match="already"):
            await replicas.restart()
        steps.release()
        assert await running == undisturbed
        await restarting
        assert deaths(replicas) == [2, 2]

    run(work)


@pytest.mark.parametrize("count", [1, 2])
def test_requests_that_wait_for_a_restart_go_on_if_it_is_given_up(count: int) -> None:
    """Who asked for it has gone: the other replica is down meanwhile, or there is none."""

    async def main() -> None:
        engines = Linked(count)
        for one in engines.replicas.each:
            one._drain_s = 100.0
        engines.replicas.add_request(request(1))
        restarting = asyncio.create_task(engines.replicas.each[0].restart())
        await until(lambda: not engines.replicas.each[0].takes_requests)
        if count > 1:
            engines.lose(1)
        engines.replicas.add_request(request(2))
        assert engines.handles(0) == [1]
        restarting.cancel()
        await asyncio.gather(restarting, return_exceptions=True)
        assert engines.handles(0) == [1, 2]

    asyncio.run(main())


def test_what_steps_cost_is_learned_from_whole_reports() -> None:
    """An engine that is idle may have said how long its steps took before it says what they computed."""
    engines = Linked(1)
    (one,) = engines.replicas.each
    one.on_message(wire.StepOutputs({}, (4000,)))
    one.on_message(wire.IdleReport(wire.EngineStats(num_steps=1, step_s=0.4), 0))
    observed: list[tuple[int, ...]] = []
    one.costs.observe = lambda *args: observed.append(args)  # type: ignore[method-assign,assignment]
    one.on_message(wire.StepOutputs({}, (100,), wire.EngineStats(num_steps=2, step_s=0.5)))
    assert observed == [(0, 2, 4100, 0.5)]


def test_tokens_that_an_idle_engine_has_counted_are_counted_once() -> None:
    engines = Linked(1)
    engines.replicas.add_request(request(1))
    emit(engines, 0, 1, count=3)
    engines.replicas.each[0].on_message(wire.IdleReport(wire.EngineStats(generation_tokens=3), 0))
    engines.lose(0)
    assert engines.replicas.stats().generation_tokens == 3


def test_counters_do_not_fall_when_somebody_looks() -> None:
    """The reply is read when later messages have been."""

    async def main() -> None:
        engines = Linked(1)
        looking = asyncio.create_task(engines.replicas.look())
        await some_turns()
        view = view_of(Scheduler(SchedulerOptions(), CacheConfig(), (KVGroupSpec(),), 8, 64, VirtualClock())._state)
        found = wire.LookReply(view, (), wire.EngineStats(prompt_tokens=5, at_s=1.0))
        (call,) = [one for one in engines.sent[0] if isinstance(one, wire.Call)]
        (one,) = engines.replicas.each
        one.on_message(wire.Reply(call.call_id, msgspec.Raw(wire.make_encoder().encode(found))))
        one.on_message(wire.StepOutputs({}, (4,), wire.EngineStats(prompt_tokens=9, at_s=2.0)))
        look = await looking
        assert look is not None
        assert look.stats.prompt_tokens == 5
        assert engines.replicas.stats().prompt_tokens == 9

    asyncio.run(main())


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ((KVGroupKind.FULL, KVGroupKind.WINDOW), 0),
        ((KVGroupKind.STATE, KVGroupKind.FULL), 1),
        ((KVGroupKind.WINDOW, KVGroupKind.STATE, KVGroupKind.FULL, KVGroupKind.FULL), 2),
        ((KVGroupKind.CROSS, KVGroupKind.WINDOW), 1),
    ],
)
def test_what_is_cached_is_told_by_the_group_that_keeps_all_blocks(
    kinds: tuple[KVGroupKind, ...], expected: int
) -> None:
    windows = {KVGroupKind.WINDOW: 64, KVGroupKind.STATE: 2}
    group = prefix_group(tuple(KVGroupSpec(kind, windows.get(kind, 0)) for kind in kinds))
    assert group == expected
    core: Any = SimpleNamespace(sizes=wire.EngineSizes(64, 16, 8, 0, prefix_group=group))
    for name in ("abort", "finish_sequence", "reset_prefix_cache", "unload_adapter"):
        setattr(core, name, lambda: None)
    server = EngineServer(core, cast(Any, None))
    for number in range(len(kinds)):
        server._note_cache(Stored(1, 0.0, number, (bytes([number]),), None, request(1), 0, b""))
    assert server._cache_changes == {bytes([expected]): True}
    server._note_cache(Removed(1, 0.0, expected, (bytes([expected]),)))
    assert server._cache_changes == {bytes([expected]): False}


def test_adapters_are_loaded_into_all_and_later_into_one_that_is_down() -> None:
    async def main() -> None:
        engines = Linked(3)
        engines.lose(2)
        loading = asyncio.create_task(engines.replicas.load_adapter(LORA))
        await some_turns()
        engines.reply(0)
        await some_turns()
        assert not loading.done()
        engines.reply(1)
        await loading
        engines.begin(2)
        await some_turns()
        assert engines.calls(2) == ["load_adapter"]
        engines.replicas.add_request(request(1, LORA))
        engines.replicas.unload_adapter(LORA)
        assert [engines.calls(number) for number in range(3)] == [["load_adapter"]] * 3
        engines.replicas.abort([1])
        engines.replicas.unload_adapter(LORA)
        assert [engines.calls(number)[-1] for number in range(3)] == ["unload_adapter"] * 3

    asyncio.run(main())


def test_an_adapter_that_one_refuses_is_unloaded_from_all() -> None:
    async def main() -> None:
        engines = Linked()
        loading = asyncio.create_task(engines.replicas.load_adapter(LORA))
        await some_turns()
        engines.reply(0)
        engines.reply(1, "its rank is too large")
        with pytest.raises(RequestError, match="its rank is too large"):
            await loading
        assert [engines.calls(number)[-1] for number in range(2)] == ["unload_adapter"] * 2

    asyncio.run(main())


def test_statistics_are_added_up_and_counters_do_not_fall_when_a_replica_starts_again() -> None:
    async def main() -> None:
        engines = Linked()
        replicas = engines.replicas
        steps = list[int]()
        replicas.on_step = steps.append
        for one, (tokens, at_s) in zip(replicas.each, ((100, 7.0), (50, 5.0)), strict=True):
            stats = wire.EngineStats(num_running=1, prompt_tokens=tokens, num_blocks=10, num_free_blocks=4, at_s=at_s)
            stats.accepted_tokens_per_pos = [1] * (tokens // 50)
            one.on_message(wire.StepOutputs({}, (tokens,), stats))
        found = replicas.stats()
        assert (found.num_running, found.prompt_tokens, found.kv_usage, found.at_s) == (2, 150, 0.6, 5.0)
        assert found.accepted_tokens_per_pos == [2, 1]
        engines.lose(0)
        assert (replicas.stats().num_running, replicas.stats().prompt_tokens) == (1, 150)
        engines.begin(0)
        replicas.each[0].on_message(wire.StepOutputs({}, (3,), wire.EngineStats(prompt_tokens=3)))
        assert replicas.stats().prompt_tokens == 153
        assert steps == [100, 50, 3]

    asyncio.run(main())
