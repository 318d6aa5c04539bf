"""What a look at the scheduler shows agrees with what it says of each request."""

import numpy as np

from pagoda.base.config import PreemptionMode
from pagoda.core.view import CACHED, FIRST_OWNER, FREE, MAX_CELLS, SHARED
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
