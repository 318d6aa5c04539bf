"""Workers that compute a step one after the other: as many steps in flight as stages, and work for each of them."""

from collections import deque

import pytest

from pagoda.base.config import PreemptionMode
from tests.core.rig import PlannedStep, Rig


def planned(rig: Rig, count: int, stages: int) -> list[dict[str, int]]:
    """Plan so many steps, as many in flight as there are stages; return what each of them computes."""
    in_flight: deque[PlannedStep] = deque()
    found: list[dict[str, int]] = []
    for _ in range(count):
        if len(in_flight) == stages:
            rig.deliver(in_flight.popleft())
        step = rig.plan()
        found.append(step.scheduled)
        if step.scheduled:
            in_flight.append(step)
        elif in_flight:
            rig.deliver(in_flight.popleft())
    while in_flight:
        rig.deliver(in_flight.popleft())
    return found


def decoding(stages: int, num_requests: int, **config: object) -> Rig:
    """A rig whose requests have computed their prompts."""
    rig = Rig(pipeline_depth=stages, num_stages=stages, num_blocks=64, **config)  # type: ignore[arg-type]
    for name in "abcdefgh"[:num_requests]:
        rig.add(name, 4, max_tokens=20)
    rig.step()
    return rig


@pytest.mark.parametrize(
    ("stages", "num_requests", "shares"),
    [
        (2, 4, ["ab", "cd", "ab", "cd"]),
        (2, 5, ["abc", "de", "abc", "de"]),
        (3, 5, ["ab", "cd", "e", "ab", "cd", "e"]),
        (3, 7, ["abc", "def", "g", "abc", "def", "g"]),
        (2, 1, ["a", "", "a", "", "a"]),
    ],
)
def test_a_step_decodes_a_share_of_the_rows(stages: int, num_requests: int, shares: list[str]) -> None:
    steps = planned(decoding(stages, num_requests), len(shares), stages)
    assert ["".join(step) for step in steps] == shares


def test_chunks_of_one_prompt_follow_each_other_into_the_stages() -> None:
    rig = Rig(pipeline_depth=2, num_stages=2, max_num_batched_tokens=8)
    rig.add("a", 20)
    assert planned(rig, 3, 2) == [{"a": 8}, {"a": 8}, {"a": 4}]


def test_a_prompt_runs_next_to_a_share_of_the_decodes() -> None:
    rig = decoding(2, 4, max_num_batched_tokens=16)
    rig.add("p", 30)
    first, second, *_ = planned(rig, 2, 2)
    assert first == {"a": 1, "b": 1, "p": 14}
    assert second == {"c": 1, "d": 1, "p": 14}


def test_a_prompt_leaves_no_token_for_siblings_that_another_step_decodes() -> None:
    rig = Rig(pipeline_depth=2, num_stages=2, max_num_batched_tokens=8, num_blocks=64, prefix_hash_seed=1)
    rig.add("p", 40)
    rig.add("s", 3, n=4, max_tokens=9)
    steps = planned(rig, 12, 2)
    beside = [step for step in steps if "p" in step and any(name.startswith("s/") for name in step)]
    assert all(sum(step.values()) <= 8 for step in steps)
    assert all(sum(name.startswith("s/") for name in step) <= 3 for step in beside)


def test_a_victim_in_another_step_is_computed_again_with_its_token() -> None:
    """Blocks run out with two steps in flight: the victim's token in flight counts, and all tokens are the same."""
    tight = Rig(pipeline_depth=2, num_stages=2, num_blocks=9, preemption_mode=PreemptionMode.RECOMPUTE)
    for name in "abcd":
        tight.add(name, 6, max_tokens=12)
    in_flight: deque[PlannedStep] = deque()
    emitted: dict[str, int] = {}
    for _ in range(200):
        step = tight.plan()
        if step.scheduled:
            in_flight.append(step)
        if in_flight and (len(in_flight) == 2 or not step.scheduled):
            for name, tokens in tight.deliver(in_flight.popleft()).emitted.items():
                emitted[name] = emitted.get(name, 0) + len(tokens)
        if not tight.scheduler.has_unfinished_requests():
            break
    assert emitted == dict.fromkeys("abcd", 12)
    assert tight.scheduler.make_stats().preemptions
