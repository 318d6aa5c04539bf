"""What is measured decides in mode `cost`; the other modes ask only what they are called after."""

import numpy as np

from pagoda.base.config import PreemptionMode
from pagoda.base.sampling_params import SamplingParams
from pagoda.core.preemption import CostModel, make_preemption_rule
from pagoda.core.request import Request, RequestStatus
from pagoda.core.request_table import Branch, LiveRequest


def live(num_branches: int) -> LiveRequest:
    request = Request("a", np.zeros(4, np.int32), SamplingParams(n=num_branches))
    one = LiveRequest(request, (0,))
    one.branches = [Branch(one, index, request.prompt_token_ids) for index in range(num_branches)]
    return one


def test_auto_swaps_while_more_than_one_branch_is_left() -> None:
    rule = make_preemption_rule(PreemptionMode.AUTO, CostModel())
    four = live(4)
    assert rule.prefers_swap(four, 10, 3)
    for branch in four.branches[:3]:
        branch.status = RequestStatus.FINISHED_STOPPED
    assert not rule.prefers_swap(four, 10, 3)


def test_cost_compares_two_copies_with_one_computation() -> None:
    costs = CostModel()
    rule = make_preemption_rule(PreemptionMode.COST, costs)
    assert not rule.prefers_swap(live(1), 1000, 60)  # nothing is measured yet
    costs.observe(num_tokens=1000, num_rows=1, duration_s=1.0, num_copied_blocks=0, copy_s=0.0)
    assert rule.prefers_swap(live(1), 1000, 60)  # a copy that was never measured is tried
    costs.observe(num_tokens=1, num_rows=1, duration_s=0.1, num_copied_blocks=10, copy_s=0.1)
    assert not rule.prefers_swap(live(1), 1000, 60)  # 1.2 s of copies against 1 s of prefill
    assert rule.prefers_swap(live(1), 1000, 40)


def test_small_steps_do_not_count_as_prefill_speed() -> None:
    costs = CostModel()
    costs.observe(num_tokens=8, num_rows=8, duration_s=1.0, num_copied_blocks=0, copy_s=0.0)
    assert costs.prefill_s_per_token == 0.0
