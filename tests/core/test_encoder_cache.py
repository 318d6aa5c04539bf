"""EncoderCache: references by content, eviction only when space is needed, oldest unreferenced first."""

import random
from itertools import pairwise

import numpy as np

from pagoda.base.clock import VirtualClock
from pagoda.base.sampling_params import SamplingParams
from pagoda.core.encoder import EncoderCache, EncoderInputs
from pagoda.core.events import EventStream
from pagoda.core.request import MediaItem, Request, RequestState, Sequence
from pagoda.core.request_table import RequestTable
from pagoda.core.scheduler_output import EncoderRun
from tests.worker.hand_made import step as step_of


def state(name: str, *items: tuple[str, int, int]) -> RequestState:
    media = tuple(MediaItem(*item) for item in items)
    return RequestState(Request(name, np.zeros(40, np.int32), SamplingParams(), media=media), (0,))


def test_space_is_reclaimed_only_when_it_is_needed() -> None:
    cache = EncoderCache(10)
    a, b = state("a", ("x", 0, 4)), state("b", ("y", 0, 7))
    assert cache.make_room(4)
    cache.add(a, 0)
    assert cache.num_free_tokens == 6
    cache.drop_passed(a, 3)
    assert cache.num_reclaimable_tokens == 6
    cache.drop_passed(a, 4)
    assert (cache.num_free_tokens, cache.num_reclaimable_tokens) == (6, 10)
    again = state("again", ("x", 8, 4))
    assert cache.touch(again, 0)
    assert not cache.make_room(7)
    assert cache.take_evicted() == ()
    cache.drop_all(again)
    assert cache.make_room(7)
    cache.add(b, 0)
    assert cache.take_evicted() == ("x",)
    assert cache.take_evicted() == ()


def test_an_output_that_is_evicted_and_run_again_in_one_step_is_reported() -> None:
    """Otherwise a worker would encode an item that it still holds."""
    cache = EncoderCache(9)
    for request in (state("a", ("x", 0, 1)), state("b", ("y", 0, 5))):
        assert cache.make_room(request.spec.media[0].length)
        cache.add(request, 0)
        cache.drop_all(request)
    both = state("c", ("z", 0, 4), ("x", 4, 1))
    assert cache.make_room(4)  # evicts x
    assert not cache.touch(both, 1)
    assert cache.make_room(5)  # evicts y
    cache.add(both, 0)
    cache.add(both, 1)
    assert cache.take_evicted() == ("x", "y")
    assert cache.take_evicted() == ()


def test_a_repeated_item_is_held_to_its_last_place() -> None:
    cache = EncoderCache(8)
    one = state("one", ("x", 0, 2), ("x", 10, 2))
    cache.add(one, 0)
    assert cache.touch(one, 1)
    cache.drop_passed(one, 5)
    assert cache.num_reclaimable_tokens == 6
    cache.drop_passed(one, 12)
    assert cache.num_reclaimable_tokens == 8


def test_an_output_that_is_kept_is_freed_when_a_planned_run_of_it_is_cancelled() -> None:
    """An encoder-decoder request runs the encoder though its output is kept: workers hold it from the earlier run."""
    cache = EncoderCache(8)
    one, two = state("one", ("x", 0, 2)), state("two", ("x", 0, 2))
    cache.add(one, 0)
    cache.drop_all(one)
    assert cache.take_evicted() == ()
    cache.add(two, 0)
    assert cache.release_planned_run(two, "x") is None
    assert cache.num_free_tokens == 8
    assert cache.take_evicted() == ("x",)


def test_a_cancelled_encoder_run_passes_to_the_next_holder_or_is_dropped() -> None:
    cache = EncoderCache(8)
    one, two = state("one", ("x", 0, 2)), state("two", ("x", 0, 2))
    cache.add(one, 0)
    cache.touch(two, 0)
    assert cache.release_planned_run(one, "x") is two
    assert cache.release_planned_run(two, "x") is None
    assert cache.num_free_tokens == 8
    assert not cache.touch(one, 0)


def test_the_next_holder_does_not_depend_on_ids_that_several_requests_have() -> None:
    """Clients may use the same ids: ranks and replays must choose the same holder all the same."""
    cache, media = EncoderCache(8), (MediaItem("x", 0, 2),)
    holders = [
        RequestState(Request("same", np.zeros(4, np.int32), SamplingParams(), client_index=i, media=media), (i,))
        for i in random.Random(1).sample(range(12), 12)
    ]
    cache.add(holders[0], 0)
    for holder in holders:
        cache.touch(holder, 0)
    left = sorted(holders, key=lambda holder: holder.spec.client_index)
    for holder, heir in pairwise(left):
        assert cache.release_planned_run(holder, "x") is heir


def test_siblings_hold_an_output_until_the_last_of_them_has_computed_its_item() -> None:
    table = RequestTable(2, 40, track_in_flight=True)
    inputs = EncoderInputs(table, EventStream(VirtualClock()), 8, 8, encoder_decoder=False, whole_items=False)
    request = state("r", ("x", 4, 3))
    for row in (0, 1):
        inputs.add_row(request, row)
    cache = inputs.cache
    cache.add(request, 0)
    both = np.array([0, 1], np.int32)
    table._num_computed[:] = (7, 7)
    table._num_in_flight[:] = (0, 2)  # the second row's last chunk is not back
    inputs.complete(both)
    assert cache.num_reclaimable_tokens == 5
    table._num_in_flight[:] = 0
    inputs.complete(both[1:])
    assert cache.num_reclaimable_tokens == 8


def test_a_row_that_its_request_has_left_still_counts_as_a_reader_of_a_lost_cross_attention_input() -> None:
    table = RequestTable(2, 40, track_in_flight=True)
    inputs = EncoderInputs(table, EventStream(VirtualClock()), 8, 8, encoder_decoder=True, whole_items=False)
    request = state("r", ("x", 0, 3))
    sequence = Sequence(request, 0, np.zeros(4, np.int32))
    row = table.admit(sequence, 0)
    step = step_of(2, [(row, 0, 4)], encoder_runs=(EncoderRun(row, 0, "x"),))
    later = step_of(3, [(row, 4, 1)])
    assert not inputs.cache.holders_of(step.encoder_runs), "it was preempted: it holds no outputs"
    assert inputs.readers_of((EncoderRun(5, 0, "x"),), (step, later)) == {2: {row}}
