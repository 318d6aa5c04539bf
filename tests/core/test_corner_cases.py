"""Corner cases: ends, failures and refusals that meet a preemption, a fork or a full batch."""

from dataclasses import replace

import numpy as np
import pytest

from pagoda.base.config import PreemptionMode
from pagoda.core import preemption
from pagoda.core.events import FirstToken
from pagoda.core.request import RequestStatus
from pagoda.core.scheduler_output import EngineCoreOutputs, LogprobColumns, ModelRunnerOutput
from pagoda.core.step_plan import StepPlan
from tests.core.rig import FILL, PlannedStep, Rig


def result_of(step: PlannedStep, failed: dict[int, str] | None = None) -> ModelRunnerOutput:
    count = len(step.output.sample_rows)
    return ModelRunnerOutput(
        step.output.step, np.full((count, 1), FILL, np.int32), np.ones(count, np.int32), failed=failed or {}
    )


def deliver(rig: Rig, step: PlannedStep, failed: dict[int, str] | None = None) -> EngineCoreOutputs | None:
    """Apply the result of the step. Return what client 0 gets."""
    outputs = rig.scheduler.update_from_output(step.output, result_of(step, failed)).get(0)
    rig.scheduler.check()
    return outputs


def preempt(rig: Rig, request_id: str) -> None:
    """As a step does that runs out of blocks."""
    state = rig.scheduler._state
    request = state.requests[rig.key(request_id)]
    preemption.preempt(state, request, StepPlan(0, 64, 0, 0.0), request)


def test_a_sibling_that_ends_while_the_resumed_leader_is_mid_prefill() -> None:
    rig = Rig(max_num_batched_tokens=8)
    rig.add("a", 12, n=2)
    rig.step()
    rig.step()
    rig.scheduler.reset_prefix_cache(preempt_running=True)
    assert rig.step().scheduled == {"a/0": 8}
    rig.finish("a", 1)
    rig.scheduler.check()
    assert list(rig.run()) == ["a/0"]
    assert rig.free == 16


def test_a_leader_that_fails_mid_prefill_leaves_its_sibling_running() -> None:
    rig = Rig(max_num_batched_tokens=8)
    rig.add("a", 12, n=2)
    step = rig.plan()
    deliver(rig, step, {int(step.output.rows[0]): "not finite"})
    assert list(rig.run()) == ["a/1"]
    assert rig.free == 16


def test_more_sequences_than_the_batch_takes_end_as_ignored_and_delay_no_request() -> None:
    for next_to_another in (False, True):
        rig = Rig(max_num_seqs=2)
        if next_to_another:
            rig.add("runs", 4)
            rig.step()
        rig.add("wide", 4, n=3)
        rig.add("after", 4)
        step = rig.step()
        assert [(finish.request_id, finish.status) for finish in step.finishes] == [
            ("wide", RequestStatus.FINISHED_IGNORED)
        ] * 3
        assert step.finishes[0].message is not None
        assert "max_num_seqs is 2" in step.finishes[0].message
        assert step.scheduled["after"] == 4


def test_a_row_that_fails_after_it_was_preempted_leaves_nothing_in_the_prefix_cache() -> None:
    rig = Rig(enable_prefix_caching=True, async_scheduling=True, pipeline_depth=2)
    prompt = list(range(100, 112))
    rig.add("a", prompt)
    step = rig.plan()
    preempt(rig, "a")
    outputs = deliver(rig, step, {int(step.output.sample_rows[0]): "not finite"})
    assert outputs is not None
    assert outputs.ends[0].status is RequestStatus.FINISHED_ERROR
    rig.add("b", [*prompt, 5])
    assert rig.step().cached == {"b": 0}


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("leaves", ["aborted", "preempted"])
def test_what_steps_in_flight_compute_is_found_in_the_prefix_cache(depth: int, leaves: str) -> None:
    """A prompt fills two blocks, the second by a step in flight that samples too: its token is not counted twice."""
    rig = Rig(
        pipeline_depth=depth,
        async_scheduling=True,
        enable_prefix_caching=True,
        max_num_batched_tokens=5,
        max_num_seqs=4,
    )
    prompt = list(range(100, 108))
    rig.add("a", prompt)
    in_flight = [rig.plan(), rig.plan()]
    assert rig.computed("a") == 8
    if leaves == "aborted":
        rig.abort("a")
    else:
        preempt(rig, "a")
    if depth == 2:
        rig.deliver(in_flight.pop(0))
    rig.add("b", [*prompt, 1, 2, 3])
    step = rig.plan()
    assert step.cached == {"b": 8}
    in_flight.append(step)
    while in_flight:
        rig.deliver(in_flight.pop(0))
    if leaves == "preempted":
        assert rig.plan().cached == {"a": 8}, "its late token is the only one that it lacks"


@pytest.mark.parametrize("late", [False, True])
def test_first_output_is_reported_of_a_request_that_was_parked_before_it(late: bool) -> None:
    """late: its first token was in flight when it was parked."""
    rig = Rig(
        num_host_blocks=16, preemption_mode=PreemptionMode.SWAP, async_scheduling=late, pipeline_depth=2 if late else 1,
        max_num_batched_tokens=8,
    )  # fmt: skip
    rig.add("a", 8 if late else 12)
    step = rig.plan()
    if not late:
        deliver(rig, step)
    preempt(rig, "a")
    assert rig.swapped == ["a"]
    if not late:
        step = rig.plan()
        assert step.samples == ["a"]
    outputs = deliver(rig, step)
    assert outputs is not None
    assert outputs.token_ids.tolist() == [FILL]
    assert [event.handle for event in outputs.events if isinstance(event, FirstToken)] == [1]
    assert rig.scheduler._state.stats.prompt_tokens == (8 if late else 12)
    again = deliver(rig, rig.plan())
    assert again is not None
    assert not any(isinstance(event, FirstToken) for event in again.events)
    assert rig.scheduler._state.stats.prompt_tokens == (8 if late else 12)


def test_a_step_that_computes_something_needs_its_result() -> None:
    rig = Rig()
    rig.add("a", 4)
    step = rig.plan()
    with pytest.raises(ValueError, match="step 1 computes 4 tokens"):
        rig.scheduler.update_from_output(step.output, None)
    assert rig.deliver(step).emitted == {"a": [FILL]}


def test_hashes_of_a_replayed_request_are_dropped_when_it_ends() -> None:
    """One of its sequences had ended before the engine died: it is not run again, and its tokens are not hashed."""
    rig = Rig(enable_prefix_caching=True)
    rig.add("a", 8, max_tokens=3, n=2, prior_output=((1, 2, 3), (1,)))
    rig.run()
    assert not rig.scheduler._state.kv.prefix_cache._chains


def test_prompt_logprobs_of_an_aborted_request_are_dropped() -> None:
    """Its handle may be in use again."""
    rig = Rig()
    rig.add("a", 4, prompt_logprobs=0)
    step = rig.plan()
    rig.abort("a")
    columns = LogprobColumns(np.zeros((3, 1), np.int32), np.zeros((3, 1), np.float32), np.ones(3, np.int32))
    result = replace(result_of(step), prompt_logprobs={int(step.output.rows[0]): columns})
    assert not any(
        outputs.prompt_logprobs for outputs in rig.scheduler.update_from_output(step.output, result).values()
    )
