"""Requests that fail on their way into the engine: their client gets an error, no state remains, others continue."""

import asyncio
import dataclasses
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from pagoda.base.errors import RequestError
from pagoda.base.outputs import RequestOutput
from pagoda.base.sampling_params import SamplingParams
from pagoda.core.request import Request
from pagoda.core.scheduler import Scheduler
from pagoda.engine.async_engine import AsyncEngine
from pagoda.engine.clients.engine_link import EngineLink
from pagoda.engine.clients.journal import Journal, JournalEntry
from pagoda.engine.clients.process_client import ProcessClient
from pagoda.engine.clients.thread_client import ThreadClient
from pagoda.engine.outputs.output_processor import OutputProcessor
from pagoda.engine.text_engine import TextEngine
from pagoda.llm import LLM
from tests.engine.clients.engine_in_process import kill
from tests.engine.clients.hurried_clock import STEP_TIMEOUT_S, HurriedClock
from tests.engine.clients.test_process_client import collect, run, tokens
from tests.engine.steps import Steps
from tests.fake_engine import byte_inputs, fake_core
from tests.generate import generate, prepare

MODULE = "tests.engine.faulty_engine"
Work = Callable[[AsyncEngine, ProcessClient], Awaitable[None]]


def unencodable(request: Request) -> Request:
    """A request with a string that no check has seen."""
    return dataclasses.replace(request, cache_salt="\ud800")


async def ask(llm: AsyncEngine, name: str, spoil: Callable[[Request], Request] = lambda request: request) -> str:
    """Run one request; the error it ended with."""
    request = await prepare(llm, [5] * 20, SamplingParams(max_tokens=30, n=2, ignore_eos=True), name)
    try:
        last = [output async for output in llm.stream(spoil(request))][-1]
    except Exception as error:
        return f"raised {error}"
    return last.error or ""


async def assert_clean(llm: AsyncEngine, client: ProcessClient, clock: HurriedClock) -> None:
    """Nothing of any request is left anywhere, and an idle engine is not taken for hung."""
    assert len(client._journal) == 0
    assert llm._outputs.live_ids == []
    assert llm._readers == {}
    clock.ahead_s += 2 * STEP_TIMEOUT_S
    while client._supervisor.link.stuck_for_s() > STEP_TIMEOUT_S:  # the watch has not looked yet
        await asyncio.sleep(0.01)
    assert client._supervisor.link is not None
    assert client._supervisor.link.is_idle
    stats = client.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0.0)
    assert client.num_deaths == 0
    assert client.died is None


def fail_for(name: str, method: Callable[..., Any], at: int) -> Callable[..., Any]:
    """`method`, failing where its argument number `at` belongs to the request of this id."""

    def failing(*args: Any) -> Any:
        if name in str(args[at]):
            raise RuntimeError("injected")
        return method(*args)

    return failing


def test_a_request_that_fails_to_enter_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, clock: HurriedClock
) -> None:
    monkeypatch.setattr(Journal, "add", fail_for("in-journal", Journal.add, 1))
    monkeypatch.setattr(OutputProcessor, "open", fail_for("in-outputs", OutputProcessor.open, 1))
    monkeypatch.setattr(EngineLink, "send_bytes", fail_for("in-send", EngineLink.send_bytes, 1))

    async def work(llm: AsyncEngine, client: ProcessClient) -> None:
        undisturbed = tokens(await collect(llm, "a"))
        other = asyncio.create_task(collect(llm, "b"))  # the same prompt as "a"
        errors = {name: await ask(llm, name) for name in ("in-journal", "in-outputs", "in-send")}
        errors["encode"] = await ask(llm, "in-encode", unencodable)
        errors |= {name: await ask(llm, name) for name in ("decode", "early", "late", "lost")}
        expected = {
            "in-journal": "raised injected",
            "in-outputs": "raised injected",
            "in-send": "could not be sent to the engine: RuntimeError: injected",
            "encode": "cannot be encoded: 'utf-8' codec can't encode character",
            "decode": "could not queue this request: DecodeError",
            "early": "could not queue this request: RuntimeError: injected",
            "late": "could not queue this request: RuntimeError: injected",
            "lost": "the engine has lost this request",
        }
        assert errors.keys() == expected.keys()
        for name, part in expected.items():
            assert part in errors[name], name
        assert tokens(await other) == undisturbed
        await assert_clean(llm, client, clock)
        assert tokens(await collect(llm, "a")) == undisturbed

    run(work, MODULE)


@pytest.mark.parametrize("where", ["replay", "encode", "engine"])
def test_an_entry_that_cannot_be_replayed_ends_alone(
    where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clock: HurriedClock, steps: Steps
) -> None:
    faults = tmp_path / "faults"
    monkeypatch.setenv("REPLAY_FAULTS", str(faults))

    async def work(llm: AsyncEngine, client: ProcessClient) -> None:
        undisturbed = tokens(await collect(llm, "a", max_tokens=200))
        steps.hold_after(20)
        victim = asyncio.create_task(collect(llm, "replay", n=3, max_tokens=400))
        other = asyncio.create_task(collect(llm, "b", max_tokens=200))
        while not (steps.is_held and any(entry.request.request_id == "replay" for entry in client._journal)):
            await asyncio.sleep(0.002)
        replay = Journal.replay

        def failing(journal: Journal, entry: JournalEntry) -> Request:
            request = replay(journal, entry)
            if entry.request.request_id == "replay" and where == "replay":
                raise RuntimeError("injected")
            if entry.request.request_id == "replay" and where == "encode":
                return unencodable(request)
            return request

        monkeypatch.setattr(Journal, "replay", failing)
        if where == "engine":
            faults.touch()
        await kill(client)
        steps.release()
        last = (await victim)[-1]
        assert last.finished
        assert last.error is not None
        assert tokens(await other) == undisturbed
        assert client.num_deaths == 1
        client._supervisor.num_deaths = 0
        await assert_clean(llm, client, clock)

    run(work, MODULE)


def test_a_hung_engine_is_still_noticed_when_it_hangs_before_its_first_step(clock: HurriedClock) -> None:
    async def work(llm: AsyncEngine, client: ProcessClient) -> None:
        await collect(llm, "a", max_tokens=3)
        stopped = client.engine_pid
        assert stopped is not None
        os.kill(stopped, signal.SIGSTOP)
        clock.hurries = lambda: client.engine_pid == stopped
        assert len(tokens(await collect(llm, "bb"))[0]) == 60
        assert client.num_deaths == 1

    run(work, MODULE)


class BrokenOnce:
    """Scheduler.add_request that fails for ids with "early" and "late"."""

    def __init__(self) -> None:
        self.add = Scheduler.add_request

    def __call__(self, scheduler: Scheduler, request: Request) -> None:
        if "early" in request.request_id:
            raise RuntimeError("injected")
        self.add(scheduler, request)
        if "late" in request.request_id:
            raise RuntimeError("injected")


def test_an_engine_refuses_a_request_that_fails_to_enter_and_continues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken = BrokenOnce()
    monkeypatch.setattr(Scheduler, "add_request", lambda scheduler, request: broken(scheduler, request))

    async def main() -> None:
        client = ThreadClient(lambda: TextEngine(fake_core(), byte_inputs()), "test")
        await client.start()
        async with AsyncEngine(client, byte_inputs()) as llm:
            for name in ("early", "late"):
                assert "RuntimeError: injected" in await ask(llm, name)
            assert await ask(llm, "fine") == ""
            assert llm._readers == {}
            assert llm._outputs.live_ids == []

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_request_that_fails_to_enter_leaves_an_llm_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    add = Scheduler.add_request
    with LLM.over(lambda: TextEngine(fake_core(), byte_inputs())) as llm:
        expected = llm.generate("hello", SamplingParams(seed=1))[0].outputs[0].text

        def failing(scheduler: Scheduler, request: Request) -> None:
            add(scheduler, request)
            raise RuntimeError("injected")

        monkeypatch.setattr(Scheduler, "add_request", failing)
        with pytest.raises(RuntimeError, match="injected"):
            llm.generate("hello", SamplingParams(seed=1))
        monkeypatch.setattr(Scheduler, "add_request", add)
        assert not llm.llm_engine.core.has_unfinished_requests()
        assert not llm.llm_engine.has_unfinished_requests()
        assert llm.generate("hello", SamplingParams(seed=1))[0].outputs[0].text == expected


def test_output_that_cannot_be_read_ends_its_request_only() -> None:
    class Faulty:
        """A tokenizer that fails on one token."""

        def __init__(self) -> None:
            self._inner = byte_inputs().tokenizer
            self.bad: int | None = None

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def token_bytes(self, token_id: int) -> bytes:
            if token_id == self.bad:
                raise RuntimeError("injected")
            return self._inner.token_bytes(token_id)

    async def main() -> None:
        client = ThreadClient(lambda: TextEngine(fake_core(), byte_inputs()), "test")
        await client.start()
        inputs = byte_inputs()
        faulty = Faulty()
        inputs.tokenizer = faulty  # type: ignore[assignment]
        params = SamplingParams(max_tokens=30, seed=1, ignore_eos=True)
        async with AsyncEngine(client, inputs) as llm:

            async def last_of(prompt: list[int]) -> RequestOutput:
                return [output async for output in generate(llm, prompt, params)][-1]

            good, bad = await last_of([1] * 9), await last_of([2] * 9)
            only_bad = set(bad.outputs[0].token_ids) - set(good.outputs[0].token_ids)
            faulty.bad = min(only_bad)  # a byte: special tokens are left out unread
            again, failed = await asyncio.gather(last_of([1] * 9), last_of([2] * 9))
            assert again.outputs[0].text == good.outputs[0].text
            assert failed.error is not None
            assert "injected" in failed.error
            assert failed.outputs[0].finish_reason == "error"
            assert llm._outputs.live_ids == []

    asyncio.run(asyncio.wait_for(main(), 30))


# ---- text and values that have no wire form are the caller's error


@pytest.mark.parametrize(
    ("make", "param"),
    [
        (lambda: SamplingParams(stop="a\ud800"), "stop"),  # type: ignore[arg-type]
        (lambda: SamplingParams(stop=["a", "\udfff"]), "stop"),  # type: ignore[arg-type]
        (lambda: SamplingParams(bad_words=["\ud83d"]), "bad_words"),  # type: ignore[arg-type]
    ],
)
def test_parameters_that_are_not_valid_unicode_are_refused(make: Callable[[], object], param: str) -> None:
    with pytest.raises(RequestError, match="half of a surrogate pair") as caught:
        make()
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"request_id": "\ud800"}, "request_id"),
        ({"request_id": "a\x1f0"}, "request_id"),
        ({"request_id": ""}, "request_id"),
        ({"request_id": 5}, "request_id"),
        ({"cache_salt": "\ud800"}, "cache_salt"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"priority": 2**70}, "priority"),
        ({"priority": "1"}, "priority"),
        ({"prompt": "x\udc00"}, "prompt"),
    ],
)
def test_a_request_that_cannot_be_encoded_is_refused_before_it_runs(given: dict[str, Any], param: str) -> None:
    prompt = given.pop("prompt", [1, 2, 3])
    request_id = given.pop("request_id", "a")
    with pytest.raises(RequestError) as caught:
        byte_inputs().process(request_id, prompt, SamplingParams(), arrival_time_s=0.0, **given)
    assert caught.value.param == param
