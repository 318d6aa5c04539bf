"""RequestQueue keeps the order of its sort keys, lets adapters be skipped, and never walks."""

import gc
import random
from dataclasses import replace

import numpy as np

from pagoda.base.config import SchedulingPolicy
from pagoda.base.sampling_params import SamplingParams
from pagoda.core.policy import RequestQueue, key_of
from pagoda.core.request import LoraRef, Request, RequestState
from tests.core.rig import Rig


def state(name: str, key: int, lora: LoraRef | None = None) -> RequestState:
    handle = int.from_bytes(name.encode(), "big")
    request = Request(name, np.array([1], np.int32), SamplingParams(), lora=lora, handle=handle)
    return RequestState(request, (key,))


def test_smallest_key_first_whatever_the_order_of_arrival() -> None:
    queue = RequestQueue()
    for name, key in (("b", 2), ("c", 3), ("front", -1), ("a", 1)):
        queue.push(state(name, key))
    assert [one.spec.request_id for one in queue] == ["front", "a", "b", "c"]
    head = queue.peek()
    assert head is not None
    assert head.spec.request_id == "front"


def test_removal_from_the_middle_and_the_head() -> None:
    queue = RequestQueue()
    entries = [state(str(number), number) for number in range(5)]
    for entry in entries:
        queue.push(entry)
    for number in (2, 0, 1):
        queue.remove(entries[number])
    assert len(queue) == 2
    assert entries[2].key not in queue
    assert queue.peek() is entries[3]
    entries[2].sort_key = (-5,)
    queue.push(entries[2])
    assert queue.peek() is entries[2]


def test_requests_of_closed_adapters_are_skipped_and_keep_their_places() -> None:
    one, two = LoraRef("one"), LoraRef("two")
    queue = RequestQueue()
    entries = [state("a", 0, one), state("b", 1, two), state("c", 2), state("d", 3, one)]
    for entry in entries:
        queue.push(entry)
    assert queue.peek(1) is entries[1]
    assert queue.peek(2) is entries[2]
    queue.remove(entries[2])
    assert queue.peek(2) is None
    assert [entry.spec.request_id for entry in queue] == ["a", "b", "d"]


def test_ten_thousand_requests_waiting_for_an_adapter_do_not_slow_a_step() -> None:
    queue, lora = RequestQueue(), LoraRef("blocked")
    for number in range(10_000):
        queue.push(state(str(number), number, lora))
    last = state("last", 10_000)
    queue.push(last)
    assert queue.peek(1) is last  # the first place of all that is left; it walks nothing


def test_what_waits_for_many_adapters_is_found_without_looking_at_each() -> None:
    """The heads of the lists stay sorted whatever comes, goes, is set aside and woken."""
    rng = random.Random(0)
    queue, loras = RequestQueue(), [None, *(LoraRef(str(number)) for number in range(20))]
    known: dict[str, RequestState] = {}
    aside: set[str] = set()
    for number in range(3000):
        name = rng.choice([*known]) if known else ""
        action = rng.random()
        if action < 0.45 or not known:
            known[str(number)] = state(str(number), rng.randrange(50), rng.choice(loras))
            queue.push(known[str(number)])
        elif action < 0.7:
            queue.remove(known.pop(name))
            aside.discard(name)
        elif action < 0.85 and name not in aside:
            queue.set_aside(known[name])
            aside.add(name)
        else:
            queue.wake(known[name].key)
            aside.discard(name)
        in_order = [one for one in queue if one.spec.request_id not in aside]
        heads: dict[object, RequestState] = {}
        for one in in_order:
            heads.setdefault(key_of(one), one)
        assert [queue.peek(at) for at in range(len(heads) + 1)] == [*heads.values(), None]
        assert (len(queue), len(queue._aside)) == (len(known), len(aside))
        assert {one.spec.request_id for one in queue} == known.keys()
        assert queue.adapter_names() == {one.spec.lora.name for one in known.values() if one.spec.lora is not None}


def test_the_oldest_arrival_is_known_in_any_queue_order() -> None:
    queue = RequestQueue()
    entries = [state("a", 3), state("b", 1), state("c", 2)]
    for entry, arrival_s in zip(entries, (5.0, 9.0, 7.0), strict=True):
        entry.spec = replace(entry.spec, arrival_time_s=arrival_s)
        queue.push(entry)
    assert queue.oldest_arrival_s() == 5.0
    queue.remove(entries[0])
    assert queue.oldest_arrival_s() == 7.0


def test_aborted_requests_are_not_kept_below_a_waiting_one() -> None:
    rig = Rig(scheduling_policy=SchedulingPolicy.PRIORITY, max_num_seqs=1)
    rig.add("runs", 4)
    rig.step()
    rig.add("first", 4, priority=-1)
    gc.collect()
    before = sum(type(one) is RequestState for one in gc.get_objects())
    for number in range(1000):
        rig.add(str(number), 4)
    rig.abort(*map(str, range(1000)))
    gc.collect()
    assert sum(type(one) is RequestState for one in gc.get_objects()) == before
    assert rig.waiting == ["first"]


def test_requests_that_are_set_aside_keep_their_places_and_are_passed_over() -> None:
    queue, lora = RequestQueue(), LoraRef("one")
    entries = [state("a", 0), state("b", 1, lora), state("c", 2), state("d", 3, lora)]
    for entry in entries:
        queue.push(entry)
    queue.set_aside(entries[0])
    assert queue.peek() is entries[1]
    assert queue.peek(1) is entries[2]
    assert queue.position(entries[2]) == 1
    queue.set_aside(entries[1])
    assert [queue.peek(at) for at in range(3)] == [entries[2], entries[3], None]
    assert [entry.spec.request_id for entry in queue] == ["a", "b", "c", "d"]
    queue.wake(state("b", 0).key)
    queue.wake((0, 0))
    assert queue.peek() is entries[1]
    queue.remove(entries[0])
    assert [entry.spec.request_id for entry in queue] == ["b", "c", "d"]
