"""EncoderCache: references by content, eviction only when space is needed, oldest unreferenced first."""

import numpy as np

from pagoda.base.sampling_params import SamplingParams
from pagoda.core.encoder_cache import EncoderCache
from pagoda.core.request import MediaItem, Request
from pagoda.core.request_table import LiveRequest


def live(name: str, *items: tuple[str, int, int]) -> LiveRequest:
    media = tuple(MediaItem(*item) for item in items)
    return LiveRequest(Request(name, np.zeros(40, np.int32), SamplingParams(), media=media), (0,))


def test_space_is_reclaimed_only_when_it_is_needed() -> None:
    cache = EncoderCache(10)
    a, b = live("a", ("x", 0, 4)), live("b", ("y", 0, 7))
    assert cache.make_room(4)
    cache.add(a, 0)
    assert cache.num_free_tokens == 6
    cache.drop_passed(a, 3)
    assert cache.num_reclaimable_tokens == 6
    cache.drop_passed(a, 4)
    assert (cache.num_free_tokens, cache.num_reclaimable_tokens) == (6, 10)
    assert cache.hold_cached(live("again", ("x", 8, 4)), 0)
    assert not cache.make_room(7)
    assert cache.take_evicted() == ()
    cache.drop_all(live("again", ("x", 8, 4)))
    assert cache.make_room(7)
    cache.add(b, 0)
    assert cache.take_evicted() == ("x",)
    assert cache.take_evicted() == ()


def test_a_repeated_item_is_held_to_its_last_place() -> None:
    cache = EncoderCache(8)
    one = live("one", ("x", 0, 2), ("x", 10, 2))
    cache.add(one, 0)
    assert cache.hold_cached(one, 1)
    cache.drop_passed(one, 5)
    assert cache.num_reclaimable_tokens == 6
    cache.drop_passed(one, 12)
    assert cache.num_reclaimable_tokens == 8


def test_what_is_called_off_goes_to_an_heir_or_is_forgotten() -> None:
    cache = EncoderCache(8)
    one, two = live("one", ("x", 0, 2)), live("two", ("x", 0, 2))
    cache.add(one, 0)
    cache.hold_cached(two, 0)
    assert cache.disinherit(one, "x") == "two"
    assert cache.disinherit(two, "x") is None
    assert cache.num_free_tokens == 8
    assert not cache.hold_cached(one, 0)
