"""Threads for long texts: calls whose client has gone are dropped, and keys take turns."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from pagoda.engine.cancellation import Cancellation, Cancelled
from pagoda.engine.text_threads import TextThreads

SHORT, LONG = 2_000, 100_000
_WAIT_S = 10.0


class Calls:
    """Calls that block until they may end, and note their names when they begin."""

    def __init__(self, threads: TextThreads, num_chars: int) -> None:
        self._threads = threads
        self._num_chars = num_chars
        self._may_end = threading.Semaphore(0)
        self._begun = threading.Semaphore(0)
        self.names: list[str] = []

    def start(self, name: str) -> "asyncio.Task[str]":
        return asyncio.create_task(self._threads.run(name[0], self._num_chars, lambda _: self._call(name)))

    def _call(self, name: str) -> str:
        self.names.append(name)
        self._begun.release()
        assert self._may_end.acquire(timeout=_WAIT_S)
        return name

    async def wait_begun(self, count: int) -> None:
        for _ in range(count):
            assert await asyncio.to_thread(self._begun.acquire, timeout=_WAIT_S)

    def end(self, count: int) -> None:
        self._may_end.release(count)


@pytest.mark.parametrize("num_chars", [SHORT, LONG])
def test_queued_calls_of_disconnected_clients_never_run(num_chars: int) -> None:
    async def run() -> None:
        threads = TextThreads()
        calls = Calls(threads, num_chars)
        abandoned = [calls.start(f"a{index}") for index in range(12)]
        await calls.wait_begun(2)
        for one in abandoned:
            one.cancel()
        await asyncio.gather(*abandoned, return_exceptions=True)
        last = calls.start("a12")
        await asyncio.sleep(0.05)
        assert calls.names == ["a0", "a1"], "their threads are busy until they return"
        calls.end(3)
        assert await asyncio.wait_for(last, _WAIT_S) == "a12"
        assert sorted(calls.names) == ["a0", "a1", "a12"]
        threads.shutdown()

    asyncio.run(run())


@pytest.mark.parametrize("num_chars", [SHORT, LONG])
def test_a_key_waits_for_one_call_of_another_key_not_for_its_queue(num_chars: int) -> None:
    async def run() -> None:
        threads = TextThreads()
        calls = Calls(threads, num_chars)
        many = [calls.start(f"a{index}") for index in range(20)]
        await calls.wait_begun(2)
        one = calls.start("b0")
        await asyncio.sleep(0)
        calls.end(3)
        await calls.wait_begun(3)
        assert "b0" in calls.names[:4]
        calls.end(20)
        await asyncio.gather(*many, one)
        threads.shutdown()

    asyncio.run(run())


def test_shutting_down_cancels_queued_calls() -> None:
    async def run() -> None:
        threads = TextThreads()
        calls = Calls(threads, LONG)
        many: list[asyncio.Task[str]] = [calls.start(f"a{index}") for index in range(5)]
        await calls.wait_begun(2)
        threads.shutdown()
        ended: list[str | BaseException] = []
        calls.end(2)
        ended += await asyncio.wait_for(asyncio.gather(*many, return_exceptions=True), _WAIT_S)
        assert sum(isinstance(one, asyncio.CancelledError) for one in ended) == 3

    asyncio.run(run())


@pytest.mark.parametrize("num_chars", [SHORT, LONG])
def test_a_running_call_whose_client_has_gone_is_cancelled(num_chars: int) -> None:
    async def run() -> None:
        threads = TextThreads()
        began, stopped, ended = threading.Event(), threading.Event(), threading.Event()

        def call(cancellation: Cancellation) -> None:
            with cancellation.stopped_by(stopped.set):
                began.set()
                assert stopped.wait(_WAIT_S)
            with pytest.raises(Cancelled):
                cancellation.check()
            ended.set()

        task = asyncio.create_task(threads.run("a", num_chars, call))
        assert await asyncio.to_thread(began.wait, _WAIT_S)
        task.cancel()
        assert await asyncio.to_thread(ended.wait, _WAIT_S)
        threads.shutdown()

    asyncio.run(run())


def test_a_cancellation_stops_the_current_step_only() -> None:
    cancellation = Cancellation()
    calls: list[str] = []
    with cancellation.stopped_by(lambda: calls.append("first")):
        pass
    with cancellation.stopped_by(lambda: calls.append("second")):
        cancellation.check()
        cancellation.cancel()
    cancellation.cancel()
    assert calls == ["second"]
    with pytest.raises(Cancelled):
        cancellation.check()


def test_errors_reach_the_caller() -> None:
    def fail(_: Cancellation) -> None:
        raise KeyError("x")

    async def run(function: Callable[[Cancellation], None]) -> None:
        threads = TextThreads()
        for _ in range(5):  # more often than there are threads: each is free again
            with pytest.raises(KeyError):
                await threads.run("", LONG, function)
        threads.shutdown()

    asyncio.run(run(fail))
