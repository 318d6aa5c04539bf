"""What a cancelled request held is free within two steps, whatever its state; other requests are not affected."""

from collections.abc import Callable

import pytest

from pagoda.base.config import PreemptionMode
from pagoda.base.sampling_params import SamplingParams
from pagoda.core.scheduler import SchedulerStats
from pagoda.engine.engine_core import EngineCore
from pagoda.executors.fake import FakeExecutor
from tests.engine.driver import Answers, make_core, request
from tests.engine.test_engine_core import expected

MAX_LEN = 256
BLOCK = 4
NUM_BLOCKS = 24
NUM_HOST_BLOCKS = 40
NEIGHBOUR = [1, 2, 3, 4, 5]
VICTIM = list(range(100, 160))
MAX_STEPS_TO_FREE = 2
ALL_BLOCKS = BLOCK * NUM_BLOCKS - 3  # tokens that fill the pool after a prompt of three

# state -> (scheduler's settings, the victim's prompt, how many sequences it has, how that state shows)
STATES: dict[str, tuple[dict[str, object], list[int], int, Callable[[SchedulerStats], bool]]] = {
    "queued": ({"max_num_seqs": 1}, VICTIM, 1, lambda s: s.num_running == 1 and s.num_waiting == 1),
    "prefilling": ({"max_num_seqs": 4, "max_num_batched_tokens": 8}, VICTIM, 1, lambda s: s.num_free_blocks < 14),
    "decoding": ({}, VICTIM[:20], 1, lambda s: s.generation_tokens > 10),
    "decoding several sequences": ({}, VICTIM[:20], 3, lambda s: s.generation_tokens > 16),
    "swapped": ({"preemption_mode": PreemptionMode.SWAP}, VICTIM[:20], 1, lambda s: s.num_swapped == 1),
    "preempted": ({"preemption_mode": PreemptionMode.RECOMPUTE}, VICTIM[:20], 1, lambda s: s.preemptions == 1),
}


def num_used(core: EngineCore) -> tuple[int, int]:
    """Referenced blocks of device and host."""
    stats = core.make_stats()
    return stats.num_blocks - stats.num_free_blocks, NUM_HOST_BLOCKS - stats.num_free_host_blocks


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("state", STATES)
def test_an_aborted_requests_blocks_are_free_within_two_steps(state: str, depth: int) -> None:
    settings, prompt, num_seqs, is_reached = STATES[state]
    core = make_core(
        lambda rows: FakeExecutor(rows, MAX_LEN + 1, BLOCK, vocab_size=1000),
        num_blocks=NUM_BLOCKS,
        num_host_blocks=NUM_HOST_BLOCKS,
        pipeline_depth=depth,
        async_scheduling=depth > 1,
        check_invariants=True,
        **settings,  # type: ignore[arg-type]
    )
    answers = Answers()

    def step() -> None:
        for outputs in core.step().values():
            answers.take(outputs, ["r0", "r1", "r2"])

    core.add_request(request(0, NEIGHBOUR, SamplingParams(max_tokens=70)))
    while ("r0", 0) not in answers.tokens:
        step()
    core.add_request(request(1, prompt, SamplingParams(max_tokens=80, n=num_seqs), seed=5))
    for _ in range(200):
        if is_reached(core.make_stats()):
            break
        step()
    else:
        pytest.fail(f"never {state}")
    assert not any(name == "r1" for name, _ in answers.finishes)

    core.abort([(0, 1)])
    num_steps = 0
    while True:
        stats = core.make_stats()
        neighbours_own = -(-(len(NEIGHBOUR) + len(answers.tokens["r0", 0]) + depth) // BLOCK)
        used, used_of_host = num_used(core)
        is_listed = stats.num_running + stats.num_waiting + stats.num_swapped > 1
        if used <= neighbours_own and not used_of_host and not is_listed:
            break
        num_steps += 1
        assert num_steps <= MAX_STEPS_TO_FREE, f"{used} and {used_of_host} blocks are held"
        step()

    # What was freed can be allocated: this one needs every block of the pool.
    told = {key: list(tokens) for key, tokens in answers.tokens.items() if key[0] == "r1"}
    core.add_request(request(2, [7, 8, 9], SamplingParams(max_tokens=ALL_BLOCKS), seed=3))
    while core.has_unfinished_requests():
        step()
    assert {key: tokens for key, tokens in answers.tokens.items() if key[0] == "r1"} == told, "emitted after its end"
    assert answers.tokens["r0", 0] == expected(NEIGHBOUR, 70, 0)
    assert answers.tokens["r2", 0] == expected([7, 8, 9], ALL_BLOCKS, 3)
    assert num_used(core) == (0, 0)
