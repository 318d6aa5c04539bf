"""WaitingLine keeps the order of its keys, lets adapters be passed over, and never walks."""

import time
from dataclasses import replace

import numpy as np

from pagoda.base.sampling_params import SamplingParams
from pagoda.core.queues import WaitingLine
from pagoda.core.request import LoraRef, Request
from pagoda.core.request_table import LiveRequest


def live(name: str, key: int, lora: LoraRef | None = None) -> LiveRequest:
    request = Request(name, np.array([1], np.int32), SamplingParams(), lora=lora)
    return LiveRequest(request, (key,))


def test_smallest_key_first_whatever_the_order_of_arrival() -> None:
    line = WaitingLine()
    for name, key in (("b", 2), ("c", 3), ("front", -1), ("a", 1)):
        line.push(live(name, key))
    assert [one.request_id for one in line] == ["front", "a", "b", "c"]
    head = line.head()
    assert head is not None
    assert head.request_id == "front"


def test_removal_from_the_middle_and_the_head() -> None:
    line = WaitingLine()
    entries = [live(str(number), number) for number in range(5)]
    for entry in entries:
        line.push(entry)
    for number in (2, 0, 1):
        line.remove(entries[number])
    assert len(line) == 2
    assert "2" not in line
    assert line.head() is entries[3]
    entries[2].line_key = (-5,)
    line.push(entries[2])
    assert line.head() is entries[2]


def test_closed_adapters_are_passed_over_and_keep_their_places() -> None:
    one, two = LoraRef("one"), LoraRef("two")
    line = WaitingLine()
    entries = [live("a", 0, one), live("b", 1, two), live("c", 2), live("d", 3, one)]
    for entry in entries:
        line.push(entry)
    assert line.head({one}) is entries[1]
    assert line.head({one, two}) is entries[2]
    line.remove(entries[2])
    assert line.head({one, two}) is None
    assert [entry.request_id for entry in line] == ["a", "b", "d"]


def test_a_hundred_thousand_that_wait_for_an_adapter_cost_a_step_nothing() -> None:
    line, lora = WaitingLine(), LoraRef("blocked")
    for number in range(100_000):
        line.push(live(str(number), number, lora))
    last = live("last", 100_000)
    line.push(last)
    begin = time.perf_counter()
    for _ in range(1000):
        assert line.head({lora}) is last
    assert time.perf_counter() - begin < 0.5


def test_the_oldest_arrival_is_known_whatever_the_order_of_the_line() -> None:
    line = WaitingLine()
    entries = [live("a", 3), live("b", 1), live("c", 2)]
    for entry, arrival_s in zip(entries, (5.0, 9.0, 7.0), strict=True):
        entry.request = replace(entry.request, arrival_time_s=arrival_s)
        line.push(entry)
    assert line.oldest_arrival_s() == 5.0
    line.remove(entries[0])
    assert line.oldest_arrival_s() == 7.0
