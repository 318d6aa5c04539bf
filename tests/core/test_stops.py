"""StopTokens: stop ids are looked up exactly as long as an unfinished request has them."""

from typing import Any

import numpy as np
import pytest

from pagoda.base.errors import InvariantBroken
from pagoda.base.pooling import PoolingParams
from pagoda.base.sampling_params import PromptReasoning, SamplingParams
from pagoda.core.request import Request, RequestStatus
from pagoda.core.stops import End, StopTokens, find_end
from tests.core.rig import Rig


def request(stop_token_ids: tuple[int, ...] = (), eos: tuple[int, ...] = (), **sampling: Any) -> Request:
    params = SamplingParams(stop_token_ids=stop_token_ids, **sampling)
    return Request("r", np.array([1], np.int32), params, eos_token_ids=eos)


def looked_up(stops: StopTokens, ids: range = range(100)) -> list[int]:
    return np.flatnonzero(stops.among(np.array(ids))).tolist()


def test_an_id_is_forgotten_with_its_last_request() -> None:
    stops = StopTokens()
    first, second = request((7, 9, 9), eos=(2, 7)), request((9,), eos=(2,))
    stops.add(first)
    stops.add(second)
    assert looked_up(stops) == [2, 7, 9]
    stops.remove(first)
    assert looked_up(stops) == [2, 9]
    stops.check([second])
    with pytest.raises(InvariantBroken):
        stops.check([first])
    stops.remove(second)
    assert looked_up(stops) == []
    stops.check([])


def test_stop_ids_that_are_not_sampled_are_not_looked_up() -> None:
    stops = StopTokens()
    stops.add(request((5,), eos=(2,), ignore_eos=True))
    stops.add(request((1 << 22, (1 << 31) - 1)))
    stops.add(Request("p", np.array([1], np.int32), pooling=PoolingParams(), eos_token_ids=(2,)))
    assert looked_up(stops) == [5]


def test_the_scheduler_forgets_stop_ids_however_a_request_ends() -> None:
    rig = Rig()
    stops = rig.scheduler._state.stops
    rig.add("stopped", 4, stop_token_ids=(31,))
    rig.add("long", 4, max_tokens=1, stop_token_ids=(32,))
    rig.add("two", 4, n=2, stop_token_ids=(33,))
    rig.add("kept", 4, stop_token_ids=(34,), eos_token_ids=(2,))
    rig.add("never ran", 4, stop_token_ids=(35,))
    rig.abort("never ran")
    assert looked_up(stops) == [2, 31, 32, 33, 34]
    rig.deliver(rig.plan(), {"stopped": [31]})
    assert looked_up(stops) == [2, 33, 34]
    rig.finish("two", 0)
    assert looked_up(stops) == [2, 33, 34]
    rig.abort("two")
    assert looked_up(stops) == [2, 34]
    rig.abort("kept")
    assert looked_up(stops) == []


def test_a_budget_of_reasoning_lets_no_output_end_before_min_tokens() -> None:
    """A grammar may allow nothing but the end; a budget never does."""
    budgeted = request(eos=(2,), min_tokens=3, thinking_token_budget=1, reasoning=PromptReasoning("think", True))
    assert find_end(budgeted, 0, [2], 100) is None
    assert find_end(budgeted, 2, [2], 100) == End(1, RequestStatus.FINISHED_STOPPED)
