"""What the ranks are asked to prepare and to drop, and which requests wait for it."""

import logging
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from pagoda.base.errors import RequestError, WorkerDied
from pagoda.base.sampling_params import SamplingParams
from pagoda.core.events import Reason
from pagoda.core.request import LoraRef, Request
from pagoda.engine import preparations
from pagoda.engine.preparations import ExecutorPreparations


class Ranks:
    """Notes the calls; each is done when the test says so."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.open: dict[str, Future[Any]] = {}

    def call(self, name: str, item: object) -> "Future[Any]":
        text = item.digest if isinstance(item, LoraRef) else str(item)
        self.calls.append((name, text))
        self.open[text] = Future()
        if name.startswith(("drop", "unload")):
            self.open.pop(text).set_result(None)
            return Future()
        return self.open[text]

    def done(self, *items: str) -> None:
        for item in items:
            self.open.pop(item).set_result(None)


def wants(grammar: str | None = None, adapter: str | None = None, request_id: str = "r") -> Request:
    sampling = SamplingParams()
    return Request(
        request_id,
        np.zeros(1, np.int32),
        sampling if grammar is None else sampling.with_grammar(grammar),
        lora=None if adapter is None else LoraRef(adapter, f"/{adapter}", adapter),
        handle=int.from_bytes(request_id.encode(), "big"),
    )


def woken(kept: ExecutorPreparations) -> list[str]:
    """Return the ids of woken requests, which their handles spell."""
    return [handle.to_bytes(-(-handle.bit_length() // 8), "big").decode() for _, handle in kept.take_woken()]


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


def make(ranks: Ranks, max_running: int = 4, max_adapters: int = 2) -> ExecutorPreparations:
    return ExecutorPreparations(ranks, max_running, max_adapters)  # type: ignore[arg-type]


def test_a_request_waits_for_its_grammar_then_for_its_adapter(ranks: Ranks) -> None:
    kept, request = make(ranks), wants("g", "a")
    kept.begin(request)
    assert [kept.why_not_ready(request) for _ in range(2)] == [Reason.GRAMMAR] * 2
    ranks.done("g")
    assert [kept.why_not_ready(request) for _ in range(2)] == [Reason.ADAPTER] * 2
    ranks.done("a")
    assert kept.why_not_ready(request) is None
    assert ranks.calls == [("prepare_grammar", "g"), ("load_adapter", "a")]
    assert make(ranks).why_not_ready(wants()) is None


def test_what_was_asked_for_least_recently_makes_room_unless_a_running_request_has_it(
    ranks: Ranks, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="pagoda")
    kept = make(ranks, max_adapters=2)
    for name in ("a", "b"):
        kept.why_not_ready(wants(adapter=name))
        ranks.done(name)
        kept.pin(wants(adapter=name))
    kept.unpin(wants(adapter="b"))
    kept.pin(wants(adapter="a"))
    kept.unpin(wants(adapter="a"))
    kept.why_not_ready(wants(adapter="b"))
    kept.why_not_ready(wants(adapter="c"))
    assert ranks.calls[2:] == [("unload_adapter", "b"), ("load_adapter", "c")]
    ranks.done("c")
    kept.unpin(wants(adapter="a"))
    kept.why_not_ready(wants(adapter="d"))
    assert ranks.calls[4:] == [("unload_adapter", "a"), ("load_adapter", "d")]
    assert (kept.num_adapters_read, kept.num_adapters_dropped) == (4, 2)
    assert [text.partition(" (")[0] for text in caplog.messages] == [
        "the adapter b was dropped from memory for c",
        "the adapter a was dropped from memory for d",
    ]
    assert "(max_cpu_loras is 2)" in caplog.text
    kept.unload_adapter(LoraRef("d", "/d", "d"))
    assert kept.num_adapters_dropped == 2, "it was not dropped for another one"


def test_what_is_still_being_prepared_is_not_dropped(ranks: Ranks) -> None:
    """Two requests that wait would otherwise take the room from each other, for ever."""
    kept = make(ranks, max_adapters=1)
    assert kept.why_not_ready(wants(adapter="a")) is Reason.ADAPTER
    assert kept.why_not_ready(wants(adapter="b")) is Reason.ADAPTER
    assert ranks.calls == [("load_adapter", "a")]
    ranks.done("a")
    assert kept.why_not_ready(wants(adapter="a")) is None
    kept.pin(wants(adapter="a"))
    assert kept.why_not_ready(wants(adapter="b")) is Reason.ADAPTER
    kept.unpin(wants(adapter="a"))
    assert kept.why_not_ready(wants(adapter="b")) is Reason.ADAPTER
    assert ranks.calls[1:] == [("unload_adapter", "a"), ("load_adapter", "b")]


def test_grammars_of_running_requests_take_no_room_from_others(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparations, "MAX_IDLE_GRAMMARS", 2)
    kept = make(ranks, max_running=3)
    for name in "abc":
        kept.begin(wants(name))
        ranks.done(name)
        kept.pin(wants(name))
    for name in "defg":
        kept.begin(wants(name))
        ranks.done(name)
    dropped = [item for name, item in ranks.calls if name == "drop_grammar"]
    assert dropped == ["d", "e"]
    assert kept.why_not_ready(wants("a")) is None


def test_a_prepared_grammar_is_kept_for_the_request_that_waits_for_it(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More distinct grammars wait than there is room for: none takes another's place before that was used."""
    monkeypatch.setattr(preparations, "MAX_IDLE_GRAMMARS", 1)
    kept = make(ranks, max_running=1)
    asked = [wants(name, request_id=name) for name in "abcdef"]
    assert {kept.why_not_ready(one) for one in asked} == {Reason.GRAMMAR}
    order: list[str] = []
    for _ in range(20):
        for name in [*ranks.open]:
            ranks.done(name)
        for name in woken(kept):
            request = asked["abcdef".index(name)]
            if kept.why_not_ready(request) is None:
                kept.pin(request)
                kept.unpin(request)
                kept.forget(request)
                order.append(name)
    assert order == [*"abcdef"]
    assert [name for call, name in ranks.calls if call == "prepare_grammar"] == [*"abcdef"]  # each once


def test_a_request_is_woken_though_another_finds_what_both_need_first(ranks: Ranks) -> None:
    """It came after `take_woken` of a step, and before the other one was considered in the same step."""
    kept, first, second = make(ranks), wants("g", request_id="first"), wants("g", request_id="second")
    assert kept.why_not_ready(first) is Reason.GRAMMAR
    assert woken(kept) == []
    ranks.done("g")
    assert kept.why_not_ready(second) is None
    kept.pin(second)
    assert woken(kept) == ["first"]
    assert kept.why_not_ready(first) is None


def test_adapters_that_are_loaded_next_to_each_other_over_the_limit_do_not_wait_for_each_other(ranks: Ranks) -> None:
    kept = make(ranks, max_adapters=1)
    asked = {name: wants(adapter=name, request_id=name) for name in "ab"}
    assert kept.why_not_ready(asked["a"]) is Reason.ADAPTER
    lora = asked["b"].lora
    assert lora is not None
    kept.begin_load(lora)  # an operator
    assert kept.why_not_ready(asked["b"]) is Reason.ADAPTER
    ranks.done("a", "b")
    ended: list[str] = []
    for _ in range(10):
        for name in woken(kept):
            if kept.why_not_ready(asked[name]) is None:
                kept.pin(asked[name])
                kept.unpin(asked[name])
                kept.forget(asked[name])
                ended.append(name)
        ranks.done(*ranks.open)
    assert sorted(ended) == ["a", "b"]


def test_a_waiting_request_that_ends_leaves_its_room_to_the_next(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparations, "MAX_IDLE_GRAMMARS", 0)
    kept = make(ranks, max_running=1)
    first, second, third = (wants(name, request_id=name) for name in "abc")
    assert {kept.why_not_ready(one) for one in (first, second, third)} == {Reason.GRAMMAR}
    assert woken(kept) == []
    ranks.done("a")
    assert woken(kept) == ["a", "b"]
    assert kept.why_not_ready(second) is Reason.GRAMMAR  # a's request has not entered
    kept.forget(second)
    assert woken(kept) == ["c"]
    kept.why_not_ready(third)
    kept.forget(first)
    assert woken(kept) == ["c"]
    kept.why_not_ready(third)
    assert ranks.calls[1:] == [("drop_grammar", "a"), ("prepare_grammar", "c")]


def test_a_failure_is_raised_once_and_who_asks_again_tries_again(ranks: Ranks) -> None:
    kept = make(ranks)
    kept.why_not_ready(wants(adapter="a"))
    ranks.open["a"].set_exception(RequestError("no file"))
    with pytest.raises(RequestError, match="the adapter 'a' cannot be used: no file"):
        kept.why_not_ready(wants(adapter="a"))
    assert kept.why_not_ready(wants(adapter="a")) is Reason.ADAPTER
    assert ranks.calls == [("load_adapter", "a"), ("unload_adapter", "a"), ("load_adapter", "a")]  # some may have it


def test_a_dead_rank_holds_nobody_back(ranks: Ranks) -> None:
    """The step that is submitted next says that it has died."""
    kept = make(ranks)
    kept.why_not_ready(wants(adapter="a"))
    ranks.open["a"].set_exception(WorkerDied("gone"))
    assert kept.why_not_ready(wants(adapter="a")) is None


def test_an_operator_loads_over_the_limit_and_unloads_what_is_in_use(ranks: Ranks) -> None:
    kept = make(ranks, max_adapters=1)
    kept.why_not_ready(wants(adapter="a"))
    ranks.done("a")
    kept.pin(wants(adapter="a"))
    ranks.call = lambda name, item: _done(ranks.calls, name, item)  # type: ignore[method-assign]
    kept.begin_load(LoraRef("b", "/b", "b"))
    kept.unload_adapter(LoraRef("a", "/a", "a"))
    kept.unload_adapter(LoraRef("a", "/a", "a"))
    assert ranks.calls[1:] == [("load_adapter", "b"), ("unload_adapter", "a")]
    assert kept.why_not_ready(wants(adapter="c")) is Reason.ADAPTER  # a's rows are still there
    kept.unpin(wants(adapter="a"))
    assert kept.why_not_ready(wants(adapter="c")) is None


def test_loads_at_the_same_time_leave_no_more_than_the_limit(ranks: Ranks) -> None:
    """As after a restart: none of them could make room for another."""
    kept, loras = make(ranks, max_adapters=2), [LoraRef(name, f"/{name}", name) for name in "abcd"]
    loads = [kept.begin_load(lora) for lora in loras]
    ranks.done(*"abcd")
    for lora, loaded in zip(loras, loads, strict=True):
        kept.end_load(lora, loaded)
    dropped = [name for call, name in ranks.calls if call == "unload_adapter"]
    assert len(dropped) == 2
    assert [kept.why_not_ready(wants(adapter=name)) for name in sorted({*"abcd"} - {*dropped})] == [None] * 2
    for name in dropped:
        assert kept.why_not_ready(wants(adapter=name)) is Reason.ADAPTER
        ranks.done(name)
        assert kept.why_not_ready(wants(adapter=name)) is None
    assert len([call for call, _ in ranks.calls if call == "unload_adapter"]) == 4


def test_an_adapter_loaded_over_the_limit_is_used_once_there_is_a_place_for_it(ranks: Ranks) -> None:
    kept, second = make(ranks, max_adapters=1), LoraRef("b", "/b", "b")
    kept.why_not_ready(wants(adapter="a"))
    ranks.done("a")
    kept.pin(wants(adapter="a"))
    loaded = kept.begin_load(second)
    ranks.done("b")
    kept.end_load(second, loaded)
    assert kept.why_not_ready(wants(adapter="a")) is None
    assert kept.why_not_ready(wants(adapter="b")) is Reason.ADAPTER
    kept.unpin(wants(adapter="a"))
    assert kept.why_not_ready(wants(adapter="b")) is None
    assert ranks.calls[2:] == [("unload_adapter", "a")]


def _done(calls: list[tuple[str, str]], name: str, lora: LoraRef) -> "Future[Any]":
    calls.append((name, lora.digest))
    future: Future[Any] = Future()
    future.set_result(None)
    return future


def test_waiting_ends_when_something_is_prepared(ranks: Ranks) -> None:
    kept = make(ranks)
    kept.wait(60)  # for nothing
    kept.begin(wants("g"))
    kept.wait(0.01)
    ranks.done("g")
    kept.wait(60)
