"""What a look at the scheduler shows agrees with what it says of each request."""

import numpy as np

from pagoda.base.config import PreemptionMode
from pagoda.core.view import CACHED, FIRST_OWNER, FREE, MAX_CELLS, SHARED, joined_views
from tests.core.rig import Rig


def test_blocks_are_free_cached_shared_or_of_one_request() -> None:
    rig = Rig(num_blocks=16, enable_prefix_caching=True)
    assert not rig.scheduler.view().handles.size
    rig.add("past", list(range(8)), max_tokens=1)
    rig.step()
    rig.add("a", list(range(9)))  # its first two blocks are those of "past"
    rig.add("b", [*range(8), 70])
    rig.add("c", 6)
    rig.step()
    view = rig.scheduler.view()
    assert view.handles.tolist() == [2, 3, 4]
    assert view.num_computed.tolist() == [9, 9, 6]
    assert view.num_blocks.tolist() == [sum(rig.blocks(one)) for one in "abc"] == [3, 3, 2]
    counts = dict(zip(*map(np.ndarray.tolist, np.unique(view.cells, return_counts=True)), strict=True))
    assert counts == {FREE: 10, SHARED: 2, FIRST_OWNER: 1, FIRST_OWNER + 1: 1, FIRST_OWNER + 2: 2}
    rig.abort("a", "b", "c")
    assert set(rig.scheduler.view().cells.tolist()) == {FREE, CACHED}


def test_sequences_of_a_request_share_without_being_several_owners() -> None:
    rig = Rig(num_blocks=16)
    rig.add("n", 8, n=3)
    rig.step()
    rig.step()
    view = rig.scheduler.view()
    assert view.num_blocks.tolist() == rig.blocks("n")
    assert SHARED not in view.cells


def test_a_large_pool_is_shown_as_a_bounded_number_of_cells() -> None:
    rig = Rig(num_blocks=3 * MAX_CELLS - 1)
    rig.add("a", 8)
    rig.step()
    view = rig.scheduler.view()
    assert (view.blocks_per_cell, len(view.cells)) == (3, MAX_CELLS)
    assert FIRST_OWNER in view.cells


def test_blocks_in_host_memory_are_of_the_requests_that_are_swapped_out() -> None:
    rig = Rig(num_blocks=5, num_host_blocks=8, preemption_mode=PreemptionMode.SWAP)
    rig.add("a", 8)
    rig.add("b", 7)
    while not rig.swapped:
        rig.step()
    view = rig.scheduler.view()
    assert (view.num_running, view.handles.tolist()) == (1, [1, 2])
    num_held = 8 - rig.scheduler.make_stats().num_free_host_blocks
    assert view.num_blocks.tolist() == [rig.blocks("a")[0], num_held]
    assert view.num_computed[1] > 0
    assert np.bincount(view.host_cells).tolist() == [8 - num_held, 0, 0, 0, num_held]
    assert FIRST_OWNER + 1 not in view.cells
    rig.add("c", 4)
    assert rig.scheduler.view().next_handles.tolist() == [2, 3]


def test_several_views_are_joined_as_one_of_all_requests_and_blocks() -> None:
    rigs = [Rig(num_blocks=5, num_host_blocks=8, preemption_mode=PreemptionMode.SWAP) for _ in range(2)]
    for number, rig in enumerate(rigs):
        rig.add("a", 8)
        rig.add("b", 7)
        while not rig.swapped:
            rig.step()
        for name in ("c", "d")[: number + 1]:
            rig.add(name, 4)
    views = [rig.scheduler.view() for rig in rigs]
    joined = joined_views(views)
    assert joined.num_running == 2
    assert joined.handles.tolist() == [1, 1, 2, 2]  # those that run, then those that are swapped out
    for name in ("num_blocks", "num_computed", "clients"):
        values = [getattr(view, name).tolist() for view in views]
        assert getattr(joined, name).tolist() == [values[0][0], values[1][0], values[0][1], values[1][1]]
    places = {one: [0, 2][one] for one in range(2)}, {0: 1, 1: 3}
    for cells in ("cells", "host_cells"):
        expected = [
            value if value < FIRST_OWNER else FIRST_OWNER + place[value - FIRST_OWNER]
            for view, place in zip(views, places, strict=True)
            for value in getattr(view, cells).tolist()
        ]
        assert getattr(joined, cells).tolist() == expected
    handles = [view.next_handles.tolist() for view in views]
    assert sorted(joined.next_handles.tolist()) == sorted([*handles[0], *handles[1]])
    assert joined.next_handles.tolist()[:2] == [handles[0][0], handles[1][0]]
    assert joined_views(views[:1]).cells.tolist() == views[0].cells.tolist()


def test_joined_views_of_large_pools_have_a_bounded_number_of_cells() -> None:
    rigs = [Rig(num_blocks=MAX_CELLS - number) for number in range(2)]
    for rig in rigs:
        rig.add("a", 8)
        rig.step()
    view = joined_views([rig.scheduler.view() for rig in rigs])
    assert view.blocks_per_cell == 2
    assert len(view.cells) <= MAX_CELLS
    assert {FIRST_OWNER, FIRST_OWNER + 1} <= set(view.cells.tolist())
