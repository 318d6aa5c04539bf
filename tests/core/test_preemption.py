"""Measurements decide in mode `cost`; the other modes look only at what they are named after."""

import random
from collections import Counter

import numpy as np
import pytest

from pagoda.base.config import CacheConfig, PreemptionMode, SchedulingPolicy
from pagoda.base.sampling_params import SamplingParams
from pagoda.core import preemption
from pagoda.core.cost_model import CostModel, RowWork
from pagoda.core.events import Preempted
from pagoda.core.policy import MostUrgentFirst
from pagoda.core.preemption import PREEMPTION_RULES, _computed_again, _swaps
from pagoda.core.request import AdmitKind, MediaItem, Request, RequestState, Sequence
from pagoda.core.scheduler_options import SchedulerOptions
from tests.core.rig import Rig
from tests.core.traffic import Setting, Traffic, make_request


def state(num_seqs: int) -> RequestState:
    request = Request("a", np.zeros(4, np.int32), SamplingParams(n=num_seqs))
    one = RequestState(request, (0,))
    one.sequences = one.unfinished = [Sequence(one, index, request.prompt_token_ids) for index in range(num_seqs)]
    return one


def chunk(num_tokens: int, start: int = 0, num_rows: int = 1) -> RowWork:
    return RowWork(np.full(num_rows, start, np.int32), np.full(num_rows, num_tokens, np.int32))


def test_auto_swaps_while_more_than_one_sequence_is_left() -> None:
    rule, costs = PREEMPTION_RULES[PreemptionMode.AUTO], CostModel()
    four = state(4)
    assert rule(four, chunk(10), 3, costs)
    four.unfinished = four.sequences[3:]
    assert not rule(four, chunk(10), 3, costs)


def test_cost_compares_two_copies_with_one_computation() -> None:
    rule, costs = PREEMPTION_RULES[PreemptionMode.COST], CostModel()
    assert not rule(state(1), chunk(1000), 60, costs)  # nothing is measured yet
    for num_tokens in (10, 100, 1000, 2000):
        costs.observe_step(chunk(num_tokens), 0.01 + 0.001 * num_tokens)
    assert rule(state(1), chunk(1000), 60, costs)  # a copy that was never measured is tried
    costs.observe_copies(10, 0.1)
    assert not rule(state(1), chunk(1000), 60, costs)  # 1.2 s of copies against 1 s of prefill
    assert rule(state(1), chunk(1000), 40, costs)


def test_a_prompt_that_sequences_share_is_lost_once() -> None:
    rig = Rig(
        num_blocks=5,
        preemption_mode=PreemptionMode.RECOMPUTE,
        scheduling_policy=SchedulingPolicy.PRIORITY,
        evict_for_priority=True,
        decision_log_steps=4,
    )
    rig.add("a", 10, n=3, priority=2)
    rig.step()
    rig.step()
    rig.add("b", 4, priority=1)
    rig.step()
    [lost] = [one.lost_tokens for one in rig.scheduler.explain.of_request("a") if isinstance(one, Preempted)]
    assert lost == 8 + 3 * 3, "two full prompt blocks, and three tokens of each sequence after them"


def test_a_head_that_outranks_nobody_is_compared_with_one_request_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []
    outranks = MostUrgentFirst.outranks

    def counted(self: MostUrgentFirst, waiting: RequestState, running: RequestState) -> bool:
        compared.append(running.spec.request_id)
        return outranks(self, waiting, running)

    monkeypatch.setattr(MostUrgentFirst, "outranks", counted)
    rig = Rig(max_num_seqs=3, scheduling_policy=SchedulingPolicy.PRIORITY, evict_for_priority=True)
    for number in range(4):
        rig.add(f"r{number}", 4, priority=1)
    for _ in range(3):
        rig.step()  # in the first one requests enter: nobody is preempted in it
    assert rig.waiting == ["r3"]
    assert compared == ["r2"] * 2


def test_a_model_without_kv_can_be_preempted_for_a_more_urgent_request() -> None:
    rig = Rig(
        groups=(),
        max_num_seqs=1,
        pipeline_depth=2,
        preemption_mode=PreemptionMode.SWAP,
        scheduling_policy=SchedulingPolicy.PRIORITY,
        evict_for_priority=True,
    )
    rig.add("a", 6, priority=2)
    first = rig.plan()
    rig.add("b", 6, priority=1)
    assert rig.plan().preempted == ("a",)
    rig.deliver(first)


def test_a_prompt_that_was_swapped_out_half_computed_is_a_prompt_when_it_comes_back() -> None:
    rig = Rig(
        num_blocks=8,
        num_host_blocks=8,
        max_num_batched_tokens=16,
        long_prefill_token_threshold=8,
        preemption_mode=PreemptionMode.SWAP,
        scheduling_policy=SchedulingPolicy.PRIORITY,
        evict_for_priority=True,
    )
    rig.add("a", 24, priority=2)
    rig.step(duration_s=1.0)
    rig.add("b", 20, max_tokens=1, priority=1)
    while "b" in (*rig.waiting, *rig.running):
        rig.step(duration_s=1.0)
    step = rig.step(duration_s=3.0)
    assert step.kinds == {"a": AdmitKind.SWAPPED_IN}
    assert step.scheduled == {"a": 8}
    assert rig.scheduler._state.in_flight.last_prompt_step_s == 3.0


def test_what_comes_back_from_the_host_is_not_swapped_out_in_the_next_step() -> None:
    """Whatever blocks the running ones need for their next tokens are kept for them."""
    num_returns = 0
    for first in range(4, 12, 3):
        for second in range(4, 12):
            rig = Rig(num_blocks=5, num_host_blocks=8, preemption_mode=PreemptionMode.SWAP)
            for name, num_tokens in (("a", first), ("b", second), ("c", 2)):
                rig.add(name, num_tokens, max_tokens=9)
            came_back: set[str] = set()
            for _ in range(60):
                step = rig.step()
                assert not came_back & set(step.preempted), (first, second)
                came_back = {name for name, kind in step.kinds.items() if kind is AdmitKind.SWAPPED_IN}
                num_returns += len(came_back)
            assert not rig.scheduler.has_unfinished_requests()
    assert num_returns > 15


@pytest.mark.parametrize("shares", [True, False])
def test_what_others_keep_in_the_prefix_cache_is_not_counted_as_lost(shares: bool) -> None:
    """The victim's long prefix is held by another request, too: it would compute few tokens again."""
    options = SchedulerOptions(max_num_seqs=2, max_num_batched_tokens=64, preemption_mode=PreemptionMode.COST)
    traffic = Traffic(Setting(options, CacheConfig(block_size=4, watermark=0.0), num_blocks=16, num_host_blocks=32))
    costs = traffic.scheduler._state.costs
    for number in range(1, 40):  # a token takes 1 ms, a block 2 ms there and back
        costs.observe_step(RowWork(np.zeros(1, np.int32), np.array([number], np.int32)), 0.001 * number)
    costs.observe_copies(10, 0.01)
    traffic.twin = None
    prompt = [n % 7 for n in range(28)]
    traffic.add(make_request(1, prompt, SamplingParams(max_tokens=20)))
    traffic.step()
    other = prompt if shares else [(token + 1) % 7 for token in prompt]
    traffic.add(make_request(2, other, SamplingParams(max_tokens=20)))
    state = traffic.scheduler._state
    while len(state.batch.requests) < 2:
        traffic.step()
    victim = list(state.batch.requests.values())[-1]
    assert victim.spec.request_id == "r2"
    assert _computed_again(state, victim).start.tolist() == [24 if shares else 0]
    assert _swaps(state, victim) == (not shares)


def test_the_twin_swaps_the_same_requests_when_prefixes_are_shared_and_encoders_ran(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: Counter[str] = Counter()

    def counted(*args: object) -> RowWork:
        again = _computed_again(*args)  # type: ignore[arg-type]
        seen.update(kept=int(again.start[0] > 0), encoded=int(again.num_encoded > 0))
        return again

    monkeypatch.setattr(preemption, "_computed_again", counted)
    for seed in range(16):
        rng = random.Random(seed)
        options = SchedulerOptions(
            max_num_seqs=4,
            max_num_batched_tokens=24,
            preemption_mode=PreemptionMode.COST,
            scheduling_policy=SchedulingPolicy.PRIORITY,
            evict_for_priority=True,
            encoder_budget=4,
            encoder_cache_tokens=4,
        )
        traffic = Traffic(Setting(options, CacheConfig(block_size=4, watermark=0.0), num_blocks=14, num_host_blocks=40))
        texts = [[rng.randrange(7) for _ in range(16)] for _ in range(2)]
        for number in range(12):
            text = rng.choice(texts)
            media = (MediaItem(f"{number % 6}", 8, 4),) if rng.random() < 0.5 else ()
            prompt = text[: rng.choice((8, 12, 16))] + [number % 7] * rng.randrange(1, 4)
            params = SamplingParams(max_tokens=rng.randrange(4, 24), n=rng.choice((1, 1, 2)), temperature=1.0)
            media = media if len(prompt) > 11 else ()
            traffic.add(make_request(number, prompt, params, media=media, priority=rng.randrange(4)))
            for _ in range(rng.randrange(4)):
                traffic.step()
        traffic.drain()
    assert seen["kept"] > 5
    assert seen["encoded"] > 2
