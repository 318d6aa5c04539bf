"""Pins: which free blocks lose their content first, for how long, and that nobody waits for one."""

import numpy as np
import pytest

from pagoda.base.errors import RequestError
from pagoda.core.events import Event, Pinned
from pagoda.core.kv.block_pool import BlockPools
from pagoda.core.kv.sizing import KVGroupKind, KVGroupSpec
from pagoda.core.request import Pin
from tests.core.rig import Rig

A, B, C = ([start + place for place in range(9)] for start in (100, 200, 300))  # two full blocks each
FULL_TOO = KVGroupSpec(layers=(1,))
WINDOW = KVGroupSpec(KVGroupKind.WINDOW, 16, layers=(1,))


def rig_with(**config: object) -> Rig:
    return Rig(enable_prefix_caching=True, **{"num_blocks": 8, **config})  # type: ignore[arg-type]


def serve(rig: Rig, name: str, prompt: list[int], pin: Pin | None = None) -> int:
    """Return how many tokens of the prompt were found."""
    rig.add(name, prompt, 1, pin=pin)
    step = rig.step()
    assert not rig.scheduler.has_unfinished_requests()
    return step.cached[name]


def take(rig: Rig, num_blocks: int) -> None:
    """Take blocks from the pool as a request would, and give them back."""
    tables = rig.scheduler._state.kv.tables
    tables.pools.free(tables.allocate(0, num_blocks))


def found(rig: Rig, prompt: list[int]) -> int:
    """Return how many of its tokens the prefix cache has, without using them."""
    rig.add("asked", [*prompt], 1)
    sequence = rig.scheduler._state.requests[rig.key("asked")].unfinished[0]
    count = rig.scheduler._state.kv.prefix_cache.longest_prefix(sequence).num_tokens
    rig.abort("asked")
    return count


def test_pinned_blocks_lose_their_content_after_younger_ones() -> None:
    rig = rig_with()
    serve(rig, "a", A, Pin(60))
    serve(rig, "b", B)
    serve(rig, "c", list(range(25)))  # takes 7 blocks: all that are free but one
    assert (found(rig, A), found(rig, B)) == (4, 0)
    serve(rig, "d", [9] * 32)
    assert found(rig, A) == 0  # a request that needs all blocks takes pinned ones, too


def test_a_pin_is_renewed_by_use_and_ends_with_its_time() -> None:
    rig = rig_with()
    serve(rig, "a", A, Pin(60))
    rig.clock.advance(59)
    assert serve(rig, "again", A, Pin(60)) == 8
    serve(rig, "b", B)
    rig.clock.advance(59)
    serve(rig, "c", list(range(24)))
    assert (found(rig, A), found(rig, B)) == (8, 0)
    rig.clock.advance(1)
    serve(rig, "d", C)
    serve(rig, "e", [9] * 24)  # A was as young as if it had become free when its pin ended: it goes next, C after it
    assert (found(rig, A), found(rig, C)) == (0, 8)


def test_an_owner_pins_a_fourth_of_the_pool_its_longest_unused_blocks_give_way() -> None:
    rig = rig_with(num_blocks=16)
    heard: list[Event] = []
    rig.scheduler.subscribe(heard.append)
    for name, prompt in (("a", A), ("b", B), ("c", C)):
        serve(rig, name, prompt, Pin(60, "tenant"))
    pool = rig.scheduler._state.kv.pools
    assert np.count_nonzero(pool.pinned_until) == 4
    serve(rig, "d", list(range(1000, 1048)))  # 12 blocks
    assert (found(rig, A), found(rig, B), found(rig, C)) == (0, 8, 8)
    serve(rig, "e", list(range(2000, 2028)), Pin(60, "other"))  # seven blocks: the first four are pinned
    assert [event.num_blocks for event in heard if isinstance(event, Pinned)] == [2, 2, 2, 4]
    serve(rig, "f", list(range(3000, 3032)))
    assert (found(rig, list(range(2000, 2028))), found(rig, B)) == (16, 8)


@pytest.mark.parametrize("second_group", [FULL_TOO, WINDOW])
def test_a_prefix_is_evicted_from_its_end_in_all_groups_alike(second_group: KVGroupSpec) -> None:
    rig = rig_with(num_blocks=64, groups=(KVGroupSpec(), second_group))
    prompt = list(range(57))
    serve(rig, "a", prompt)  # 14 full blocks in each group
    take(rig, 36 + 14)
    assert found(rig, prompt) == 28


@pytest.mark.parametrize(("second_group", "num_pinned", "num_found"), [(FULL_TOO, 16, 32), (WINDOW, 0, 0)])
def test_pins_that_an_owner_may_not_have_all_are_of_all_groups_alike(
    second_group: KVGroupSpec, num_pinned: int, num_found: int
) -> None:
    rig = rig_with(num_blocks=64, groups=(KVGroupSpec(), second_group))
    pool = rig.scheduler._state.kv.pools
    serve(rig, "short", A, Pin(60))
    prompt = list(range(57))
    serve(rig, "long", prompt, Pin(60))  # 28 full blocks, 16 may be pinned
    if num_pinned:
        assert np.count_nonzero(pool.pinned_until) == num_pinned
    else:
        assert np.count_nonzero(pool.pinned_until) == 4, "what would not help has taken the pins of other blocks"
    take(rig, 64 - int(np.count_nonzero(pool.pinned_until)))
    assert (found(rig, prompt), found(rig, A)) == (num_found, 0 if num_pinned else 8)


def test_nobody_waits_or_is_preempted_for_a_pin() -> None:
    rig = rig_with()
    for owner, prompt in (("a", A), ("b", B), ("c", C)):
        serve(rig, owner, prompt, Pin(60, owner))
    rig.add("large", 20, max_tokens=12)
    rig.add("small", 4, max_tokens=1)
    first = rig.step()
    assert set(first.scheduled) == {"large", "small"}
    rig.run()
    assert first.preempted == ()
    assert rig.free == 8


def test_a_preempted_or_swapped_request_pins_what_it_leaves() -> None:
    rig = rig_with(num_blocks=16, num_host_blocks=8)
    rig.add("a", A, max_tokens=4, pin=Pin(60))
    rig.step()
    assert rig.scheduler.reset_prefix_cache(preempt_running=True)  # which also forgets what was pinned
    pool = rig.scheduler._state.kv.pools
    assert not pool.pinned_until.any()
    rig.run()
    assert np.count_nonzero(pool.pinned_until) == 3


def test_blocks_of_a_reset_cache_are_not_pinned() -> None:
    rig = rig_with()
    serve(rig, "a", A, Pin(60))
    assert rig.scheduler.reset_prefix_cache()
    assert not rig.scheduler._state.kv.pools.pinned_until.any()
    assert rig.free == 8


def test_a_pin_lasts_a_second_at_least() -> None:
    rig = rig_with()
    with pytest.raises(RequestError, match=r"pin.ttl_s must be at least 1 second \(got 0\)"):
        rig.add("a", A, pin=Pin(0))


@pytest.mark.parametrize("num_blocks", [3, 64])
def test_without_pins_the_order_is_that_of_freeing(num_blocks: int) -> None:
    pool = BlockPools((num_blocks,))
    blocks, _ = pool.allocate(0, num_blocks)
    pool.note_content(blocks.tolist())
    pool.free(blocks[::-1])
    pool.end_pins(100.0)
    assert pool.allocate(0, num_blocks)[0].tolist() == blocks[::-1].tolist()
